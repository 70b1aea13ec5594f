"""Adapters that name linears as transformers' modules, whose names differ from a checkpoint's."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from formats.checkpoint import CheckpointReader
from formats.errors import CheckpointError
from formats.families import FAMILIES
from formats.peft.lora import adapted_shapes, read_adapter
from tests.adapters import write_adapter

NEMOTRON, MIXER = "nemotron_h", "backbone.layers.0.mixer.in_proj"
# family, linear in the checkpoint, in the adapter, and in its list of targets
CASES = [
    (NEMOTRON, MIXER, "model.layers.0.mixer.in_proj", "in_proj"),
    (NEMOTRON, MIXER, "model.language_model.layers.0.mixer.in_proj", "in_proj"),
    (NEMOTRON, MIXER, MIXER, "in_proj"),
    ("ling_3", "model.layers.1.attention.dense", "model.layers.1.self_attn.o_proj", "o_proj"),
    ("ling_3", "model.layers.0.attention.g_proj", "model.layers.0.self_attn.g_proj", "g_proj"),
    ("lfm3", "model.layers.1.self_attn.gate_proj", "model.layers.1.self_attn.g_proj", "g_proj"),
    (
        "kimi_linear",
        "model.layers.1.block_sparse_moe.shared_experts.up_proj",
        "model.layers.1.mlp.shared_experts.up_proj",
        "up_proj",
    ),
]


@pytest.fixture
def base(tiny_model):
    """family -> its row, and the shapes of the linears of a tiny model."""

    def make(family):
        reader = CheckpointReader(tiny_model(family))
        row = FAMILIES[reader.config["architectures"][0]].variant(reader.config)
        return row, adapted_shapes(row, reader.config)

    return make


def write_named(model, folder, ours, theirs, **config):
    """An adapter of one linear with another name. Returns its folder and A."""
    write_adapter(model, folder, only=[ours], rank=2, **config)
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({name.replace(ours, theirs): each for name, each in tensors.items()}, path)
    return folder, tensors[f"base_model.model.{ours}.lora_A.weight"]


@pytest.mark.parametrize(("family", "ours", "theirs", "target"), CASES)
def test_linear_is_found_by_name_in_transformers(
    tiny_model, base, tmp_path, family, ours, theirs, target
):
    row, shapes = base(family)
    layer = int(ours.split(".")[2])
    folder, a_rK = write_named(
        *(tiny_model(family), tmp_path / "a", ours, theirs),
        **{"target_modules": [target], "layers_to_transform": [layer], "r": 7},
        rank_pattern={target: 2},
    )
    ((name, pair),) = read_adapter(folder, shapes, family=row).pairs.items()
    assert name == ours and torch.equal(pair.a_rK, a_rK) and pair.scale == 8 / 2
    if theirs != ours:
        with pytest.raises(CheckpointError, match=f"adapts {theirs}, which is not a linear of"):
            read_adapter(folder, {f"other.{name}": shape for name, shape in shapes.items()})


@pytest.mark.parametrize(("family", "ours", "theirs", "target"), [CASES[0], CASES[3]])
def test_listed_linear_without_tensors_is_missed(
    tiny_model, base, tmp_path, family, ours, theirs, target
):
    """The list has names of transformers, and so have the linears that it lists."""
    row, shapes = base(family)
    folder, _ = write_named(
        *(tiny_model(family), tmp_path / "a", ours, theirs), target_modules=[target]
    )
    with pytest.raises(CheckpointError, match=r"lists .*, but the file has no tensors for it"):
        read_adapter(folder, shapes, family=row)


def test_linear_with_two_names_is_refused(tiny_model, base, tmp_path):
    row, shapes = base(NEMOTRON)
    folder, _ = write_named(tiny_model(NEMOTRON), tmp_path / "a", MIXER, MIXER)
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    twice = {name.replace("backbone", "model"): each.clone() for name, each in tensors.items()}
    save_file({**tensors, **twice}, path)
    with pytest.raises(CheckpointError, match="adapts a linear that .* also names"):
        read_adapter(folder, shapes, family=row)
