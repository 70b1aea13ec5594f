"""Every kind of damage to every kind of quantized folder is one error, when inspected and loaded.

Each golden folder of tests/formats/made_by, and each kind of made_here.py that has none, is damaged
in each way of kinds.py. A few pairs run by default; the whole product is exhaustive.
"""

import copy
import functools
from pathlib import Path

import pytest
import torch

from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from formats.inspection.inspect import inspect_checkpoint
from qserve.model.loading.loader import load
from qserve.model.loading.weight_source import WeightSource
from qserve.model.model_config import ModelConfig
from tests.formats.damaged.kinds import DAMAGES, Folder, NotApplicable
from tests.formats.damaged.made_here import MADE_HERE

MADE_BY = Path(__file__).parents[1] / "made_by"
GOLDEN = sorted(path.parent.name for path in MADE_BY.glob("*/made.json"))
# A linear of an expert is damaged, by its name in the folder, instead of one of attention.
EXPERTS = {
    f"{name}-expert": (name, f"model.layers.0.{module}.experts.2.up_proj")
    for name, module in (
        ("auto-round-qwen3-moe-w4", "mlp"),
        ("gptqmodel-mixtral-w4", "mlp"),
        ("gptqmodel-qwen3-moe-w4", "mlp"),
        ("llmcompressor-mixtral-fp8", "block_sparse_moe"),
        ("llmcompressor-mixtral-w4a16", "block_sparse_moe"),
        ("llmcompressor-qwen3-5-moe-w4a16", "mlp"),
        ("llmcompressor-qwen3-moe-nvfp4", "mlp"),
        ("llmcompressor-qwen3-moe-w4a16", "mlp"),
    )
}
NAMES = [*GOLDEN, *MADE_HERE, *EXPERTS]
USUAL = "gptqmodel-w4"  # gets every damage by default
# Damage that every folder gets by default
COMMON = ("codes missing", "codes empty", "unknown bits")
WITH_KV = "llmcompressor-fp8-kv"  # gets damage of KV scales


def is_usual(name, damage):
    """Return True if a pair runs by default."""
    if damage.startswith("KV"):
        return name == WITH_KV
    return name == USUAL or damage in COMMON


PAIRS = [
    pytest.param(
        name,
        damage,
        marks=[] if is_usual(name, damage) else [pytest.mark.exhaustive],
        id=f"{name}-{damage.replace(' ', '-')}",
    )
    for name in NAMES
    for damage in DAMAGES
]


def folder_of(name):
    """Return a folder of its own for each test: damage changes it."""
    return copy.deepcopy(undamaged(name))


@functools.cache
def undamaged(name):
    if name in MADE_HERE:
        return MADE_HERE[name]()
    if name not in EXPERTS:
        return Folder.read(MADE_BY / name)
    golden, module = EXPERTS[name]
    folder = Folder.read(MADE_BY / golden)
    folder.module = module
    return folder


def load_weights(folder):
    config = ModelConfig.from_folder(folder)
    return load(
        config,
        WeightSource(CheckpointReader(folder), config),
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_model_len=32,
        progress=False,
    )


@pytest.mark.parametrize("name", [*GOLDEN, *MADE_HERE])
def test_undamaged_copy_loads(name, tmp_path):
    """Writing a folder again is no damage, so that the other tests see only what they did."""
    folder = folder_of(name).write(tmp_path / "copy")
    assert inspect_checkpoint(folder).ok
    load_weights(folder)


@pytest.mark.parametrize(("name", "damage"), PAIRS)
def test_damage_is_one_inspect_finding_and_one_loading_error(name, damage, tmp_path):
    damaged = folder_of(name)
    try:
        DAMAGES[damage](damaged)
    except NotApplicable:
        pytest.skip(f"{name} has nothing for: {damage}")
    folder = damaged.write(tmp_path / "damaged")
    with pytest.raises(InputError) as caught:
        load_weights(folder)
    error = caught.value
    assert error.subject and error.problem
    assert "\n" not in str(error) and len(str(error)) < 1000
    found = inspect_checkpoint(folder)
    errors = [problem for problem in found.problems if problem.severity == "error"]
    assert errors and not any("\n" in str(problem) for problem in errors)
    assert found.loads_in[0].answer == "no", "inspect says that this project loads it"
