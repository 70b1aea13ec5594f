"""Helpers for tests of sharded models: a rank's runner, sizes, families."""

import pytest
import torch

from formats.checkpoint import CheckpointReader
from qserve.config import EngineConfig
from qserve.engine.runner.model_runner import ModelRunner
from qserve.engine.sizes import read_model
from qserve.model.loading.loader import load
from qserve.model.loading.rounding_source import open_source
from qserve.model.tp_plan import place_experts
from qserve.parallel.ranks import Ranks
from tests.tiny_families import TINY_FAMILIES

CPU = torch.device("cpu")
ON_ONE_RANK = ("inkling",)  # families that several ranks refuse
# Three KV heads, five groups of features and an odd vocabulary: over two ranks shares differ.
ODD = {
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "hidden_size": 96,
    "intermediate_size": 160,
    "vocab_size": 515,
}


def rank_runner(
    folder, communicator=None, *, context=None, on=CPU, dtype=torch.float32, **settings
):
    """The runner of one rank, or of a whole model, without pages.

    `context`: communicator of ranks that divide long prompts.
    """
    engine = EngineConfig(model=str(folder), max_num_seqs=4, **settings)
    config = read_model(engine)
    ranks = Ranks(communicator=communicator, context=context, experts=place_experts(config, engine))
    decoder = load(
        config,
        open_source(CheckpointReader(folder), config, on),
        device=on,
        dtype=dtype,
        max_model_len=64,
        progress=False,
        ranks=ranks,
    )
    return ModelRunner(decoder, engine, on, ranks=ranks)


def relative_error(found, want):
    """How far the logits of all ranks are from the whole model's; all ranks have the same bits."""
    assert all(torch.equal(found[0], logits) for logits in found)
    return float((found[0] - want).norm() / want.norm())


def families_and_sizes(few, without=()):
    """Each family over 2 and 4 ranks, of which `few` over 2 are in every run."""
    rest = [
        pytest.param(family, size, marks=pytest.mark.exhaustive)
        for family in TINY_FAMILIES
        if family not in (*without, *ON_ONE_RANK)
        for size in (2, 4)
        if (family, size) not in [(each, 2) for each in few]
    ]
    return [*((family, 2) for family in few), *rest]
