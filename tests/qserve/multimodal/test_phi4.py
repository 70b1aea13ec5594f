"""Phi-4-multimodal: numbers of tokens, adapters for images, the vision tower's attention."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from formats.peft.lora import adapted_shapes, read_adapter
from qserve.llm import LLM
from qserve.lora.request import LoRARequest
from qserve.model.model_config import family_of
from qserve.multimodal.image_processors.own_processor import OwnImageProcessor
from qserve.multimodal.layouts.whole_image import GRID, WHOLE_IMAGE
from qserve.multimodal.media import Feature
from qserve.params.handling import Handling
from qserve.params.sampling_params import SamplingParams
from tests.adapters import write_adapter
from tests.qserve.multimodal.conftest import NUM_TOKENS, Vision
from tests.tiny_vision import loaded, picture

FAMILY = "phi4_multimodal"
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


@pytest.mark.parametrize("size", TOKENS)
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
    llm = LLM(str(source.folder), device="cpu", dtype="float32", enable_lora=True)
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


@pytest.mark.parametrize(
    "grid", [[1, 1, 8, 8], [2, 2, 9, 8], [2, 2, 0, 8], [-2, -2, 4, 4], [10**6, 10**6, 1, 1]]
)
def test_features_of_another_grid_are_refused(vision, grid):
    model = vision(FAMILY)
    ids, (item,) = model.prompt(model.mark, (picture(64, 64, 2),))
    wrong = replace(item, features=(item.features[0], Feature.of(GRID, np.array(grid))))
    with pytest.raises(InputError, match="media item 0: expected pixel_values as uint8"):
        model.engine().add_request("r", ids, SamplingParams(), handling=Handling(media=(wrong,)))


def test_sounds_are_refused_by_name(vision):
    model = vision(FAMILY)
    ids, (item,) = model.prompt(model.mark, (picture(64, 64, 2),))
    sound = replace(item, kind="audio")
    with pytest.raises(InputError, match="kind 'audio'; .* takes text, image"):
        model.engine().add_request("r", ids, SamplingParams(), handling=Handling(media=(sound,)))
