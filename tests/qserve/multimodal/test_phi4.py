"""Phi-4-multimodal: numbers of tokens, adapters for images, the vision tower's attention."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Phi4MultimodalVisionConfig

from calibrate.pipeline import quantize_checkpoint
from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from formats.inspection.inspect import inspect_checkpoint
from formats.peft.lora import adapted_shapes, read_adapter
from formats.scheme import Scheme
from qserve.llm import LLM
from qserve.lora.request import LoRARequest
from qserve.model.model_config import family_of
from qserve.multimodal.families import VisionConfig
from qserve.multimodal.image_processors.own_processor import OwnImageProcessor
from qserve.multimodal.layouts.whole_image import GRID, WHOLE_IMAGE
from qserve.multimodal.media import Feature
from qserve.params.request_options import RequestOptions
from qserve.params.sampling_params import SamplingParams
from qserve.text.image_text import IMAGE_TEXTS
from tests.adapters import write_adapter
from tests.qserve.multimodal.conftest import NUM_TOKENS, Vision
from tests.tiny_vision import loaded, picture, rename_tensors

FAMILY = "phi4_multimodal"
TEXT_PART = {"type": "text", "text": "what"}
image_texts_message = IMAGE_TEXTS["Phi4MMForCausalLM"].as_text
# width and height -> number of tokens that transformers' image processor gives at published sizes
TOKENS = {
    (448, 448): 545,
    (640, 480): 1065,
    (480, 640): 1073,
    (1000, 700): 1777,
    (1920, 1080): 3918,
    (3000, 4000): 3409,
    (2000, 300): 1245,
    (449, 20): 339,
}


@pytest.mark.parametrize(
    "size",
    [pytest.param(size, marks=[pytest.mark.exhaustive] * (size[0] > 1000)) for size in TOKENS],
)
def test_numbers_of_tokens_are_those_of_transformers(tmp_path, size):
    (tmp_path / "preprocessor_config.json").write_text("{}")
    cut = OwnImageProcessor(tmp_path, "phi4").cut(picture(*size))
    values = {"vision_config": {"image_size": 448, "patch_size": 14}}
    (run,) = WHOLE_IMAGE.pieces(cut, values)
    assert run.length == TOKENS[size]


def test_images_with_an_adapter(vision, tmp_path):
    """The published model has an adapter for prompts with images."""
    source = vision(FAMILY)
    adapter = write_adapter(source.folder, tmp_path / "vision-lora", size=1.0)
    reader = CheckpointReader(source.folder)
    shapes, model = (
        adapted_shapes(family_of(reader.config), reader.config),
        loaded(source.folder, FAMILY),
    )
    with torch.no_grad():
        for name, pair in read_adapter(adapter, shapes).pairs.items():
            model.get_parameter(f"{name}.weight").add_(pair.delta())
    adapted, text, images = Vision(source.folder, model), f"{source.mark} what", (picture(40, 30),)
    wanted = [source.expected(text, images), adapted.expected(text, images)]
    assert wanted[0] != wanted[1]
    llm = LLM(str(source.folder), device="cpu", dtype="float32", enable_lora=True, max_model_len=64)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    prompt = {"prompt": text, "multi_modal_data": {"image": list(images)}}
    loras = [None, LoRARequest("vision", 1, str(adapter))]
    outputs = llm.generate([prompt] * 2, params, use_tqdm=False, lora_request=loras)
    assert [list(output.outputs[0].token_ids) for output in outputs] == wanted
    llm.close()


def test_the_tower_sees_ahead_without_padding(vision):
    """transformers' attention is causal there, except for its eager one."""
    model = vision(FAMILY)
    _, (item,) = model.prompt(model.mark, (picture(64, 64, 2),))
    assert item.features[1].array().tolist() == [2, 2, 8, 8]  # no patch is padding
    inputs = model.inputs(
        *model.prompt(model.mark, (picture(64, 64, 2),))[:1], [picture(64, 64, 2)]
    )
    tower = model.engine().runner.encoder.tower
    embed, ids_1M = model.model.model.embed_tokens_extend.image_embed, inputs["input_ids"]
    names = ("image_pixel_values", "image_sizes", "image_attention_mask")
    with torch.no_grad():
        embeds_1MC = model.model.model.embed_tokens(ids_1M)
        wanted = embed(ids_1M, embeds_1MC, *(inputs[name] for name in names))[0]
    (found,) = tower.encode([item])
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    for module in tower.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = True
    (causal,) = tower.encode([item])
    assert not torch.allclose(causal, wanted, atol=1e-2)


# names in transformers' files -> in Microsoft's
MICROSOFTS = {
    **{f"{name}.weight": f"{name}.base_layer.weight" for name in ("n.qkv_proj", "p.gate_up_proj")},
    "img_projection_up.": "img_projection.0.",
    "img_projection_down.": "img_projection.2.",
    "global_img_feature_extensor": "glb_GN",
    "sub_img_feature_extensor": "sub_GN",
}


@pytest.fixture(scope="module")
def microsofts(vision, tmp_path_factory):
    """The tiny model as Microsoft publishes the model: with adapters next to the weights."""
    source = vision(FAMILY).folder
    folder = shutil.copytree(source, tmp_path_factory.mktemp("phi4mm") / FAMILY)
    rename_tensors(folder, MICROSOFTS)
    state = load_file(folder / "model.safetensors")
    assert sum("base_layer" in name for name in state) == 6
    for number in range(3):
        for part, shape in (("A", (4, 64)), ("B", (128, 4))):
            name = f"model.layers.{number}.self_attn.qkv_proj.lora_{part}.vision.weight"
            state[name] = torch.randn(shape)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["audio_config"], config["vision_config"]["crop_size"], config["dtype"]
    config |= {
        "architectures": ["Phi4MMForCausalLM"],
        "model_type": "phi4mm",
        "img_processor": None,
        "embd_layer": {"image_embd_layer": {"crop_size": 32}},
        "vision_lora": {"r": 4, "lora_alpha": 8},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_microsofts_files(vision, microsofts):
    """Without an adapter, which is a folder next to the files."""
    source = vision(FAMILY)
    model = Vision(microsofts, source.model)
    requests = [("what is a page table", ()), (f"{source.mark} what", (picture(40, 30),))]
    found, _ = model.run(model.engine(), *requests)
    assert found == [source.expected(*request) for request in requests]


def test_microsofts_files_are_quantized(vision, microsofts, tmp_path):
    folders = []
    for name, source in (("microsofts", microsofts), ("transformers", vision(FAMILY).folder)):
        folders.append(tmp_path / name / FAMILY)
        scheme = Scheme.parse("w4a16-sym-g32")
        quantize_checkpoint(source, folders[-1], scheme=scheme, recipe="rtn", progress=False)
    found, wanted = map(CheckpointReader, folders)
    assert found.entries.keys() == wanted.entries.keys()
    assert all(torch.equal(found.get(name), wanted.get(name)) for name in wanted.entries)
    assert found.other_parts.keys() == CheckpointReader(microsofts).other_parts.keys()
    block = found.whole_config["quantization_config"]
    assert "re:.*embed_tokens_extend.*" in block["ignore"]
    assert not inspect_checkpoint(folders[0]).problems
    request = f"{vision(FAMILY).mark} what", (picture(40, 30),)
    models = [Vision(folder, vision(FAMILY).model) for folder in folders]
    first, second = (model.run(model.engine(), request)[0] for model in models)
    assert first == second


def test_sizes_of_microsofts_tower_are_transformers_defaults():
    stated = {"architectures": ["Phi4MMForCausalLM"], "model_type": "phi4mm", "hidden_size": 3072}
    config = VisionConfig.of({**stated, "img_processor": None, "vision_lora": {"r": 256}})
    vision = Phi4MultimodalVisionConfig()
    assert config.values["vision_config"]["hidden_size"] == vision.hidden_size == 1152
    assert config.image_token_id == vision.image_token_id
    text = image_texts_message({"role": "user", "content": [{"type": "image"}, TEXT_PART]})
    assert text["content"] == "<|image_1|>what"


@pytest.mark.parametrize(
    "grid", [[1, 1, 8, 8], [2, 2, 9, 8], [2, 2, 0, 8], [-2, -2, 4, 4], [10**6, 10**6, 1, 1]]
)
def test_features_of_another_grid_are_refused(vision, grid):
    model = vision(FAMILY)
    ids, (item,) = model.prompt(model.mark, (picture(64, 64, 2),))
    wrong = replace(item, features=(item.features[0], Feature.of(GRID, np.array(grid))))
    with pytest.raises(InputError, match="media item 0: expected pixel_values as uint8"):
        model.engine().add_request(
            "r", ids, SamplingParams(), options=RequestOptions(media=(wrong,))
        )


def test_sounds_are_refused_by_name(vision):
    model = vision(FAMILY)
    ids, (item,) = model.prompt(model.mark, (picture(64, 64, 2),))
    sound = replace(item, kind="audio")
    with pytest.raises(InputError, match="kind 'audio'; .* takes text, image"):
        model.engine().add_request(
            "r", ids, SamplingParams(), options=RequestOptions(media=(sound,))
        )
