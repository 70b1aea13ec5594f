"""Tensors in memory under the names that a model folder's reader gives them."""

import pytest
import torch
from safetensors.torch import load_file

from formats.checkpoint import CheckpointReader
from formats.errors import CheckpointError
from formats.files.memory_tensors import MemoryTensors


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "mixtral"])
def test_names_and_shapes_equal_folder(family, tiny_model):
    reader = CheckpointReader(tiny_model(family))
    stored = {entry.name: entry.read() for entry in reader.entries.values()}
    held = MemoryTensors(stored.items(), reader.config)
    assert held.entries.keys() == reader.entries.keys() and held.config == reader.config
    for name, entry in reader.entries.items():
        own = held.entries[name]
        assert (own.dtype, own.shape, own.num_bytes) == (entry.dtype, entry.shape, entry.num_bytes)
        assert torch.equal(held.get(name), reader.get(name))


def test_equal_row_chunks_are_joined(tiny_model):
    """As transformers writes the convolutions of OLMo-Hybrid."""
    folder = tiny_model("olmo_hybrid")
    reader, stored = CheckpointReader(folder), load_file(folder / "model.safetensors")
    held = MemoryTensors(stored.items(), reader.config)
    assert held.entries.keys() == reader.entries.keys()
    same = held.entries.keys() & stored.keys()  # norms have other names in the file
    changed = [name for name in same if held.entries[name].shape != stored[name].shape]
    assert len(changed) >= 3 and all("conv1d" in name for name in changed)
    for name in reader.entries:
        assert torch.equal(held.get(name), reader.get(name))


def test_head_stays_tied_only_if_it_equals_the_embedding(tiny_model):
    reader = CheckpointReader(tiny_model("qwen3"))  # tied
    stored = [(name, reader.get(name)) for name in reader.entries]
    embedding = reader.get("model.embed_tokens.weight")
    tied = MemoryTensors([*stored, ("lm_head.weight", embedding.clone())], reader.config)
    untied = MemoryTensors([*stored, ("lm_head.weight", -embedding)], reader.config)
    assert (tied.unties_head, untied.unties_head) == (False, True)


def test_duplicate_invalid_and_missing_names_are_refused():
    one = torch.zeros(1)
    with pytest.raises(CheckpointError, match="tensor a: comes twice"):
        MemoryTensors([("a", one), ("a", one)], {})
    with pytest.raises(CheckpointError, match="expected a tensor, found list"):
        MemoryTensors([("a", [1.0])], {})
    with pytest.raises(CheckpointError, match="is not in the update"):
        MemoryTensors([("a", one)], {}).get("b")
