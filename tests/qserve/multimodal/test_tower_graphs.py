"""CUDA graphs of a vision tower: a replay has the bits of a call kernel by kernel."""

import pytest
import torch
from transformers import AutoModel

from qserve.config import EngineConfig
from qserve.engine.engine import Engine
from qserve.engine.runner.graphs import tower_graphs
from qserve.engine.runner.graphs.tower_graphs import TowerGraphs
from qserve.multimodal.qwen_tower import QwenTower
from tests.tiny_vision import write_tiny_vision

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
PATCH = 3 * 2 * 8 * 8


def tower_of(family, folder, device):
    write_tiny_vision(folder, family)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return QwenTower(AutoModel.from_pretrained(folder, dtype=dtype).to(device).eval().visual)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_replays_have_the_bits_of_calls(family, tmp_path, monkeypatch):
    """Sizes come in turn: graphs share memory, and of three sizes two are kept."""
    monkeypatch.setattr(tower_graphs, "NUM_GRAPHS", 2)
    tower = tower_of(family, tmp_path, "cuda")
    graphs = TowerGraphs(tower)
    sizes = [(1, 4, 4), (3, 6, 10), (1, 14, 18)]
    for turn in range(4):
        if turn == 3:
            graphs.close()
        for batch, *grid in sizes:
            for _ in range(3):
                patches_BNP = torch.randn(batch, grid[0] * grid[1], PATCH, device="cuda")
                patches_BNP = patches_BNP.to(torch.bfloat16)
                found = graphs.encode(patches_BNP, *grid)
                assert torch.equal(found, tower.encode(patches_BNP, *grid))
        assert list(graphs._captured) == sizes[1:]


@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_of_graphs_are_in_the_memory_budget(family, tmp_path):
    """The first capture allocates them, when KV pages already have what the budget left."""
    folder = write_tiny_vision(tmp_path / family, family)
    engine = Engine(EngineConfig(model=str(folder), kv_cache_memory=0.01))
    encoder = engine.runner.encoder
    before = encoder.deferred_bytes
    encoder.use_graphs()
    encoder._graphs._allocate(torch.device("cpu"))
    buffers = encoder._graphs._patches, encoder._graphs._embeddings
    assert buffers[0].numel() == tower_graphs.MAX_PATCHES * PATCH
    activations = encoder.tower.activation_bytes(tower_graphs.MAX_PATCHES)
    added = encoder.deferred_bytes - before - activations
    assert added == sum(each.nbytes for each in buffers)


@torch.inference_mode()
def test_only_sizes_that_come_again_are_captured(tmp_path, monkeypatch):
    monkeypatch.setattr(tower_graphs, "MAX_PATCHES", 64)
    tower = tower_of("qwen3_vl", tmp_path, "cpu")
    graphs, captured = TowerGraphs(tower), []

    def capture(patches_BNP, size):
        captured.append(size)
        raise KeyError("no GPU")

    monkeypatch.setattr(graphs, "_capture", capture)
    large, small = torch.randn(1, 80, PATCH), torch.randn(2, 32, PATCH)
    for _ in range(2):  # more patches than a graph has
        assert torch.equal(graphs.encode(large, 8, 10), tower.encode(large, 8, 10))
    assert torch.equal(graphs.encode(small, 4, 8), tower.encode(small, 4, 8))
    assert torch.equal(graphs.encode(small, 8, 4), tower.encode(small, 8, 4))
    assert torch.equal(graphs.encode(small[:1], 4, 8), tower.encode(small[:1], 4, 8))
    assert not captured
    with pytest.raises(KeyError):
        graphs.encode(small, 8, 4)
    assert captured == [(2, 8, 4)]
