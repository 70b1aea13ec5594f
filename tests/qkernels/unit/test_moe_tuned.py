"""W4A16 experts in the tuning table: rows are stored, found, refused, and overruled by a choice."""

import dataclasses

import pytest
import torch

from formats.scheme import Scheme
from qkernels.choice import parse_choice
from qkernels.errors import KernelError
from qkernels.gpu import device as gpu_device
from qkernels.moe import tuned
from qkernels.moe.experts import ExpertsProblem
from qkernels.moe.sm90_few_tokens_config import few_tokens_tiles, few_tokens_tiles_fault
from qkernels.tuning.table import TuningRow, TuningTable, read, write

GPU = "NVIDIA H200"
LAYER = {"hidden": 2048, "inner": 768, "num_experts": 128, "top_k": 8}
PROBLEM = ExpertsProblem(
    kernel="triton",
    kind="packed",
    spec=Scheme.parse("w4a16-sym").weight,
    activation=None,
    dtype=torch.bfloat16,
    device=torch.device("cuda", 0),
    routed_experts=LAYER["num_experts"],
    **LAYER,
)


def row(M=4, **changes):
    tiles = dataclasses.replace(few_tokens_tiles(M=M, sm_count=132, **LAYER), gate_up_stages=3)
    return TuningRow(
        op=tuned.TUNED,
        problem=LAYER | {"group": 128, "M": M},
        config=dataclasses.replace(tiles, **changes),
        microseconds=30.0,
        default_microseconds=31.0,
    )


@pytest.fixture
def on_an_h200(monkeypatch):
    """A GPU without one; gives its table."""
    table = TuningTable(gpu=GPU)
    monkeypatch.setattr(gpu_device, "sm_count", lambda device: 132)
    monkeypatch.setattr(gpu_device, "shared_bytes", lambda device: 227 * 1024)
    monkeypatch.setattr(gpu_device, "lacks_arch", lambda device, arch: None)
    monkeypatch.setattr(tuned.tuning_table, "tuning_table_of", lambda device: table)
    return table


def test_tuned_row_applies_to_its_token_bucket(on_an_h200):
    on_an_h200.add_(row())
    for M, found in ((2, False), (3, True), (4, True), (5, False)):
        plan = tuned.measured_plan(PROBLEM, M, parse_choice(None))
        assert (plan is not None) == found, M
    plan = tuned.measured_plan(PROBLEM, 4, parse_choice("sm90_few_tokens"))
    assert plan.gate_up.stages == 3 and plan.down.stages != 3 and plan.output == "parts"


@pytest.mark.parametrize("choice", ["-sm90_few_tokens", "few"])
def test_explicit_choice_overrides_table(on_an_h200, choice):
    on_an_h200.add_(row())
    assert tuned.measured_plan(PROBLEM, 4, parse_choice(choice)) is None


def test_other_numerics_have_no_tuned_rows(on_an_h200):
    on_an_h200.add_(row())
    eight_bits = dataclasses.replace(PROBLEM, spec=Scheme.parse("w8a16-sym").weight)
    assert tuned.measured_plan(eight_bits, 4, parse_choice(None)) is None
    plain = dataclasses.replace(PROBLEM, spec=None, kind="float")
    assert tuned.measured_plan(plain, 4, parse_choice(None)) is None


def test_tuned_file_round_trips_and_refuses_invalid_rows(tmp_path):
    path = tmp_path / "table.json"
    table = TuningTable(gpu=GPU)
    table.add_(row())
    write(table, path)
    again = read(path, GPU)
    again.read_rows_(tuned.TUNED)
    assert again.rows == table.rows
    table.add_(row(down_split=4))
    write(table, path)
    with pytest.raises(KernelError, match="adds the parts of split 2 at most, found 4"):
        read(path, GPU).read_rows_(tuned.TUNED)


@pytest.mark.parametrize("M", [1, 8, 9, 64])
def test_search_starts_from_default_and_visits_neighbours(M):
    problem = LAYER | {"group": 128, "M": M}
    first = tuned.TUNED.default(132, **problem)
    assert first == few_tokens_tiles(M=M, sm_count=132, **LAYER)
    assert few_tokens_tiles_fault(first, **problem) is None
    runs = [each for each in tuned.TUNED.neighbours(first) if not tuned.TUNED.fault(each, problem)]
    assert len(runs) >= 12
    columns_are_tokens = dataclasses.replace(first, sorts=False, block_m=8)
    assert (tuned.TUNED.fault(columns_are_tokens, problem) is None) == (M <= 8)
