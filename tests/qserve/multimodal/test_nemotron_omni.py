"""Nemotron Nano Omni: files as published, models with MTP layers, and what is refused.

test_image_tokens.py compares the tokens of the tiny model with transformers'.
"""

import json
import shutil
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from calibrate.pipeline import quantize_checkpoint
from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from formats.inspection.inspect import inspect_checkpoint
from formats.scheme import Scheme
from qserve.multimodal.families import VisionConfig
from qserve.multimodal.image_processors.own_processor import OwnImageProcessor
from qserve.multimodal.tower import Tower
from qserve.params.request_options import RequestOptions
from qserve.params.sampling_params import SamplingParams
from tests.qserve.multimodal.conftest import Vision
from tests.tiny_vision import picture

FAMILY = "nemotron_omni"
NANO = "NemotronH_Nano_Omni_Reasoning_V3"


def as_published(config):
    """Keys of the published config.json, with the sizes of the tiny tower."""
    vision = config["vision_config"]
    kept = ("hidden_size", "num_hidden_layers", "num_attention_heads", "patch_size", "max_img_size")
    kept += ("num_cls_tokens", "num_registers")
    config |= {
        "architectures": [NANO],
        "model_type": NANO,
        "llm_config": config.pop("text_config"),
        "img_context_token_id": config.pop("image_token_id"),
        "vit_hidden_size": config.pop("vision_hidden_size"),
        "sound_config": {"model_type": "parakeet", "hidden_size": 16},
        "vision_config": {
            **{key: vision[key] for key in kept},
            **{"version": "radio_v2.5-h", "args": {"model": "vit_huge_patch16_224"}},
        },
        **{"force_image_size": 512, "patch_size": 8, "use_thumbnail": True},
    }
    del config["audio_config"]


@pytest.fixture(scope="module")
def published(vision, tmp_path_factory):
    """The tiny model with the names, keys and other parts of the published one."""
    source = vision(FAMILY).folder
    folder = shutil.copytree(source, tmp_path_factory.mktemp("published") / FAMILY)
    state = load_file(folder / "model.safetensors")
    factors = [name for name in state if "layer_scale" in name]
    assert len(factors) == 4 and all(bool((state.pop(name) == 1).all()) for name in factors)
    state["vision_model.radio_model.input_conditioner.norm_mean"] = torch.zeros(3, 1, 1)
    state["sound_encoder.encoder.x.weight"] = torch.ones(4)
    state["sound_projection.norm.weight"] = torch.ones(4)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    as_published(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_published_files(vision, published):
    source = vision(FAMILY)
    model = Vision(published, source.model)
    requests = [("what is a page table", ()), (f"{source.mark} what", (picture(40, 30),))]
    found, _ = model.run(model.engine(), *requests)
    assert found == [source.expected(*request) for request in requests]
    assert not [p for p in inspect_checkpoint(published).problems if p.severity == "error"]


def test_published_files_are_quantized(vision, published, tmp_path):
    """The towers stay as they are, and images work."""
    folder = tmp_path / FAMILY
    scheme = Scheme.parse("w4a16-sym-g32")
    quantize_checkpoint(published, folder, scheme=scheme, recipe="rtn", progress=False)
    assert CheckpointReader(folder).other_parts.keys() == (
        CheckpointReader(published).other_parts.keys()
    )
    model = Vision(folder, vision(FAMILY).model)
    found, _ = model.run(model.engine(), (f"{model.mark} what", (picture(40, 30),)))
    assert len(found[0]) == 8
    features = [tower_of(each).encode(items_of(model)) for each in (folder, published)]
    assert torch.equal(features[0][0], features[1][0])


def tower_of(folder):
    config = VisionConfig.of(json.loads((folder / "config.json").read_text()))
    entries = CheckpointReader(folder).other_parts
    return Tower.load(config, folder, entries, device=torch.device("cpu"), dtype=torch.float32)


def items_of(model):
    return model.prompt(model.mark, (picture(40, 30, 1),))[1]


def test_sizes_of_the_published_tower_are_transformers_defaults():
    text = {"hidden_size": 2688, "vocab_size": 131072, "num_attention_heads": 32}
    stated = {
        **{"architectures": [NANO], "model_type": NANO, "llm_config": text},
        **{"img_context_token_id": 18, "vit_hidden_size": 1280, "projector_hidden_size": 20480},
        "vision_config": {"version": "radio_v2.5-h", "patch_size": 16, "max_resolution": 2048},
    }
    config, radio = VisionConfig.of(stated), transformers.RadioConfig()
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_img_size"):
        assert config.values["vision_config"][key] == getattr(radio, key)
    assert (config.image_token_id, config.values["projector_hidden_size"]) == (18, 20480)
    stated["vision_config"]["version"] = "radio_v2.5-l"
    assert VisionConfig.of(stated) is None, "sizes of other towers are not known"


def test_towers_of_models_with_mtp_layers_are_normalized(vision, tmp_path):
    source = vision(FAMILY)
    folder = shutil.copytree(source.folder, tmp_path / FAMILY)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    theirs = source.model
    pixels = OwnImageProcessor(folder, "nemotron")([picture(40, 30, 1)])
    inputs = [torch.from_numpy(pixels[name]) for name in ("pixel_values", "image_grid_hw")]
    plain = tower_of(source.folder).encode(items_of(source))[0]
    normed = tower_of(folder).encode(items_of(source))[0]
    width, eps = theirs.config.vision_hidden_size, theirs.config.vision_config.layer_norm_eps
    for found, norm in ((plain, None), (normed, torch.nn.LayerNorm(width, eps=eps))):
        theirs.vision_final_layernorm = norm
        with torch.no_grad():
            (want,) = theirs.get_image_features(*inputs).pooler_output
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    theirs.vision_final_layernorm = None
    assert not torch.allclose(plain, normed, rtol=1e-2)


@pytest.mark.parametrize("kind", ["audio", "video"])
def test_other_media_are_refused_by_name(vision, kind):
    model = vision(FAMILY)
    ids, (item,) = model.prompt(model.mark, (picture(64, 64, 2),))
    with pytest.raises(InputError, match=f"kind '{kind}'; .* takes text, image"):
        model.engine().add_request(
            "r", ids, SamplingParams(), options=RequestOptions(media=(replace(item, kind=kind),))
        )
