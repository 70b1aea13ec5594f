"""Adapters of a sharded model. Ranks are threads here; test_ranks.py has processes."""

import dataclasses

import numpy as np
import pytest
import torch

from formats.quant_config import BLOCK
from qserve.engine.step.step_input import StepInput
from qserve.lora.layout import AdapterLayout
from qserve.lora.rank_adapters import RankAdapters
from qserve.lora.slot_memory import SlotMemory
from qserve.model.model_config import ModelConfig
from qserve.params.sampling_params import SamplingParams
from tests.adapters import write_adapter
from tests.conftest import make_tiny
from tests.qserve.model.test_variants import reorder
from tests.qserve.model.variants import TOKENS, edited
from tests.qserve.parallel.in_threads import run_ranks
from tests.qserve.parallel.sharded import (
    CPU,
    ODD,
    families_and_sizes,
    rank_runner,
    relative_error,
)
from tests.tiny_families import WITHOUT_ADAPTERS

FEW = ("phi3", "qwen2_moe")


def adapted_logits(folder, adapter, communicator=None):
    """Logits [T, V] of TOKENS with an adapter in slot 1, and its digest."""
    with torch.inference_mode():
        runner = rank_runner(folder, communicator)
        decoder, config = runner.decoder, ModelConfig.from_folder(folder)
        runner.adapters = SlotMemory(
            decoder, AdapterLayout(config, decoder.parts), num_slots=2, max_rank=4
        )
        runner.adapters.memory.fill_(torch.nan)
        adapters = RankAdapters(runner.adapters, torch.float32, CPU)
        digest = adapters.read(7, str(adapter))
        adapters.place(1, 7)
        runner.allocate_pages(4)
        step = StepInput.of_sequence(TOKENS, [1, 2], page_size=16, params=SamplingParams())
        slots_T = np.ones(len(TOKENS), np.int32)
        return runner.logits(dataclasses.replace(step, adapter_slots_T=slots_T)), digest


def assert_sharded(folder, num_ranks, tmp_path, **adapter):
    """Every rank has the logits of the whole with the adapter, which change much by it."""
    path = write_adapter(folder, tmp_path / "adapter", **{"rank": 3, "size": 1.0, **adapter})
    zeros = write_adapter(folder, tmp_path / "zeros", rank=1, size=0.0)
    want, digest = adapted_logits(folder, path)
    base, _ = adapted_logits(folder, zeros)
    found = run_ranks(num_ranks, lambda communicator: adapted_logits(folder, path, communicator))
    assert {each for _, each in found} == {digest}
    error = relative_error([logits for logits, _ in found], want)
    effect = float((base - want).norm() / want.norm())
    assert error < 1e-5 < 1e-2 < effect, (error, effect)


@pytest.mark.parametrize(("family", "size"), families_and_sizes(FEW, without=WITHOUT_ADAPTERS))
def test_every_family(family, size, tiny_model, tmp_path):
    assert_sharded(tiny_model(family), size, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "only", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
)
def test_every_target_module_separately(only, size, tiny_model, tmp_path):
    """One of a fused group has an adapter, the others have none."""
    assert_sharded(tiny_model("llama"), size, tmp_path, only=[only], size=3.0)


@pytest.mark.parametrize("name", ["self_attn.o_proj", "mlp.down_proj"])
def test_act_order(name, written, tmp_path):
    """A's columns follow the order of the inputs, B's rows that of the features that are read."""
    folder = edited(
        written("w4a16-sym-g32", "gptq"),
        tmp_path / "x",
        lambda state: reorder(state, f"model.layers.1.{name}"),
        config=lambda c: c[BLOCK].update(desc_act=True),
    )
    assert_sharded(folder, 2, tmp_path)


def test_uneven_adapter_shards(tmp_path):
    folder = make_tiny(tmp_path / "odd", "LlamaConfig", ODD)
    assert_sharded(folder, 2, tmp_path)
