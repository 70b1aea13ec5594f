"""Cosmos3: the Reasoner of a unified checkpoint in sub-folders, next to a generator's tensors."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from calibrate.pipeline import quantize_checkpoint
from formats.architecture.published_names.cosmos3 import OMNI, reasoner_name
from formats.checkpoint import CheckpointReader
from formats.errors import CheckpointError
from formats.inspection.inspect import inspect_checkpoint
from formats.scheme import Scheme
from tests.qserve.model.variants import logits
from tests.qserve.multimodal.conftest import Vision
from tests.tiny_vision import picture

INDEX = "model.safetensors.index.json"
# tensors of the generator in published files, with other shapes than the Reasoner's
GENERATOR = (
    *("layers.0.self_attn.add_q_proj.weight", "layers.0.self_attn.to_add_out.weight"),
    *("layers.0.self_attn.norm_added_k.weight", "layers.0.mlp_moe_gen.gate_proj.weight"),
    *("norm_moe_gen.weight", "proj_in.weight", "time_embedder.linear_1.weight"),
    *("audio_modality_embed", "action_proj_out.fc.weight"),
)
TEXT_FILE, TOWER_FILE = "transformer/text-00001-of-00001.safetensors", "vision/model.safetensors"


def diffusers_name(name):
    """Return a tensor's name in newer published files."""
    for own in "qkv":
        name = name.replace(f".self_attn.{own}_proj.", f".self_attn.to_{own}.")
        name = name.replace(f".self_attn.{own}_norm.", f".self_attn.norm_{own}.")
    return name.replace(".self_attn.o_proj.", ".self_attn.to_out.")


def published(source, folder, names, architecture):
    """Write a folder as published: sub-folders, and the generator's tensors."""
    shutil.copytree(source, folder)
    state = {names(name): t for name, t in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    state |= {name: torch.ones(2, 3) for name in GENERATOR}
    files, listed = {TEXT_FILE: {}, TOWER_FILE: {}}, {}
    for name, tensor in state.items():
        is_tower = (reasoner_name(name) or "").startswith("model.visual.")
        listed[name] = TOWER_FILE if is_tower else TEXT_FILE
        files[listed[name]][name] = tensor
    for file, tensors in files.items():
        (folder / file).parent.mkdir()
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": listed}
    (folder / INDEX).write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = [architecture]
    config["vision_config"]["model_type"] = "qwen3_vl"  # of older files
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module", params=OMNI)
def folder(request, vision, tmp_path_factory):
    made = tmp_path_factory.mktemp("published") / "cosmos3"
    return published(vision("cosmos3").folder, made, diffusers_name, request.param)


def test_tokens_of_published_files(vision, folder):
    source = vision("cosmos3")
    model = Vision(folder, source.model)
    for images in ((), (picture(40, 30),)):
        request = f"{' and '.join([source.mark] * len(images))} what", images
        assert model.run(model.engine(), request)[0] == [source.expected(*request)]


def test_older_names_are_those_of_a_text_model(vision, folder, tmp_path):
    """`model.layers...` for the text model; the tower's names are the same."""
    text = ("layers.", "embed_tokens.", "norm.")
    older = published(
        vision("cosmos3").folder,
        tmp_path / "older",
        lambda name: f"model.{name}" if name.startswith(text) else name,
        OMNI[0],
    )
    found, want = CheckpointReader(older), CheckpointReader(folder)
    assert found.entries.keys() == want.entries.keys()
    assert found.other_parts.keys() == want.other_parts.keys()
    assert torch.equal(logits(older), logits(folder))


def test_quantized_model_is_a_qwen3_vl(vision, folder, tmp_path):
    import transformers

    target = tmp_path / "model"
    scheme = Scheme.parse("w4a16-sym-g32")
    quantize_checkpoint(folder, target, scheme=scheme, recipe="rtn", progress=False)
    found = CheckpointReader(target)
    assert found.whole_config["architectures"] == ["Qwen3VLForConditionalGeneration"]
    assert found.whole_config["model_type"] == "qwen3_vl"
    stored = list(load_file(target / "model.safetensors"))
    assert all(
        name.startswith(("model.language_model.", "model.visual.", "lm_head.")) for name in stored
    )
    assert found.other_parts.keys() == CheckpointReader(folder).other_parts.keys()
    config = transformers.AutoConfig.from_pretrained(target)
    assert type(config).__name__ == "Qwen3VLConfig"
    exact = tmp_path / "exact"
    quantize_checkpoint(
        folder, exact, scheme=Scheme.parse("w8a16-sym-g32"), recipe="rtn", progress=False
    )
    want = logits(folder)
    worse, better = ((logits(each) - want).norm() / want.norm() for each in (target, exact))
    assert better < 0.05 < worse < 1


def test_inspection_counts_the_reasoner_alone(folder):
    found = inspect_checkpoint(folder)
    assert not [each for each in found.problems if each.severity == "error"]
    state = CheckpointReader(folder)
    assert found.vision_bytes == sum(each.num_bytes for each in state.other_parts.values())
    assert found.total_bytes == sum(each.num_bytes for each in state.entries.values())


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "a/../../x.safetensors"])
def test_an_index_cannot_leave_its_folder(folder, tmp_path, name):
    copy = shutil.copytree(folder, tmp_path / "model")
    index = json.loads((copy / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = name
    (copy / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="is not the name of a file in the folder"):
        CheckpointReader(copy)
    assert any("not the name of a file" in each.text for each in inspect_checkpoint(copy).problems)
