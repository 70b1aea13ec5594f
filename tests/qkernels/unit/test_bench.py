"""The bench command's arithmetic and choices; the measuring itself needs a GPU."""

import json

import pytest
import torch

from qkernels.bench.linear import LINEAR_SHAPES
from qkernels.bench.measure import (
    CEILINGS,
    COLD_BYTES,
    MAX_CALLS,
    Case,
    Result,
    check,
    copies_needed,
    floor_microseconds,
    format_result,
    plot,
)
from qkernels.bench.table import OPS, run, select
from qkernels.errors import KernelError

H200 = CEILINGS["NVIDIA H200"]


def case(got, want, num_bytes=0, operations=0):
    return Case(
        op="w4a16",
        shape="o",
        m=1,
        num_bytes=num_bytes,
        operations=operations,
        calls=[lambda: torch.tensor(got)],
        want=torch.tensor(want),
        allowed_error=1e-2,
    )


@pytest.mark.parametrize("got", [[1.0, 2.1], [1.0, float("nan")]])
def test_wrong_result_is_not_timed(got):
    with pytest.raises(KernelError, match="relative error"):
        check(case(got, [1.0, 2.0]))


def test_error_is_relative_to_result_norm():
    assert check(case([3.0, 4.04], [3.0, 4.0])) == pytest.approx(0.04 / 5, rel=1e-4)


def test_floor_is_the_larger_of_bytes_and_operations():
    assert floor_microseconds(case([1.0], [1.0], num_bytes=4_400_000), H200) == pytest.approx(1)
    both = case([1.0], [1.0], num_bytes=4_400_000, operations=1_576_000_000)
    assert floor_microseconds(both, H200) == pytest.approx(2)
    assert floor_microseconds(both, None) is None
    assert floor_microseconds(case([1.0], [1.0]), H200) is None


def test_copies_exceed_the_cache_unless_they_are_tiny():
    for N, K in LINEAR_SHAPES.values():
        assert copies_needed(N * K // 2) * N * K // 2 >= COLD_BYTES
    assert copies_needed(0) == copies_needed(100) == MAX_CALLS
    assert copies_needed(10**9) == 1


def test_bench_case_selection():
    chosen = select("w4a16", "qkv,down", "1,16", "cublas")
    assert [(shape, ms) for _, shape, ms, _ in chosen] == [("qkv", (1, 16)), ("down", (1, 16))]
    assert all(baselines == {"cublas"} for *_, baselines in chosen)
    everything = select(None, None, None, "none")
    assert len(everything) == sum(len(op.shapes) for op in OPS.values())
    assert not any(baselines for *_, baselines in everything)
    assert all(ms for _, _, ms, _ in everything)


@pytest.mark.parametrize(
    "arguments, flag",
    [
        (("w3a16", None, None, None), "--op"),
        (("rms_norm", "qkv", None, None), "--shape"),
        (("w4a16", None, "1,x", None), "--m"),
        (("w4a16", None, "0", None), "--m"),
        (("w4a16", None, None, "sdpa"), "--baseline"),
    ],
)
def test_unknown_bench_name_is_refused(arguments, flag):
    with pytest.raises(KernelError, match=flag):
        select(*arguments)


def result(**changes):
    fields = {
        "op": "w4a16",
        "shape": "o",
        "m": 16,
        "microseconds": 8.0,
        "floor_microseconds": 2.0,
        "gigabytes_per_second": 1000.0,
        "teraflops": 60.0,
        "error": 1e-3,
        "baselines": {"cublas": 12.0},
    }
    return Result(**fields | changes)


def test_printed_line_and_json():
    assert "cublas 12.0 (1.50x)" in format_result(result())
    assert json.loads(json.dumps(result().to_dict()))["percent_of_floor"] == 25
    unknown_gpu = result(floor_microseconds=None)
    assert unknown_gpu.percent_of_floor is None and " - " in format_result(unknown_gpu)


def test_plot_draws_every_panel(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "times.png"
    plot([result(), result(m=32), result(op="rms_norm", shape="4096", baselines={})], str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_missing_gpu_is_reported():
    with pytest.raises(KernelError, match="GPU: is needed .* torch sees none .run this on"):
        run(show=print)
