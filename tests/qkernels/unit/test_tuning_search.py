"""The search of --tune, with times that are made up; the measuring itself needs a GPU."""

import dataclasses
import math

import pytest
import torch

from qkernels.attention.config import AttentionConfig
from qkernels.attention.tuned import TUNED as ATTENTION
from qkernels.bench import tune as tune_module
from qkernels.bench.table import run_tune, select
from qkernels.bench.tune import NotTaken, format_tuned, search, starts
from qkernels.errors import KernelError
from qkernels.gpu import device as gpu_device
from qkernels.tuning import table as tuning_table
from qkernels.tuning.op import bucket
from qkernels.w4a8.tuned import TUNED as W4A8
from qkernels.w8a8.config import W8A8Sm90Config, W8A8TritonConfig, default_sm90_config
from qkernels.w8a8.tuned import TUNED as W8A8
from qkernels.wna16.sm90_large_m_config import LARGE_M_SIZES, LargeMConfig
from qkernels.wna16.triton_config import TritonGemmConfig
from qkernels.wna16.tuned import TUNED as WNA16

START = TritonGemmConfig(block_m=16, block_n=64, split=2)
PROBLEM = {"M": 16, "N": 6144, "K": 4096, "group": 128, "bits": 4}
INT8 = {"M": 128, "N": 4096, "K": 14336, "integers": True}


def never():
    return False


def test_neighbours_differ_in_one_field():
    options = WNA16.configs[TritonGemmConfig].options
    for config in WNA16.neighbours(START):
        changed = [name for name in options if getattr(config, name) != getattr(START, name)]
        assert len(changed) == 1
    assert len(set(WNA16.neighbours(START))) == sum(len(v) - 1 for v in options.values())


def test_split_is_tried_with_either_reduction():
    one = W8A8Sm90Config(num_consumers=1, block_b=64)
    found = {(c.split, c.reduce_scatter) for c in W8A8.neighbours(one) if c.split > 1}
    assert found == {(2, False), (2, True), (4, False), (4, True)}


def test_attention_block_rows_follow_tokens():
    config = AttentionConfig(block_m=16, block_q=4, keys=64, split=1, warps=4, stages=2)
    found = list(ATTENTION.neighbours(config))
    assert all(each.block_m == 4 * each.block_q for each in found)
    assert len({each.block_q for each in found}) > 2


@pytest.mark.parametrize("op", [WNA16, W4A8, W8A8, ATTENTION], ids=lambda op: op.name)
def test_options_name_fields_of_the_config(op):
    for cls, space in op.configs.items():
        assert set(space.options) <= {field.name for field in dataclasses.fields(cls)}


def test_search_finds_config_two_steps_away():
    def time_of(tile):
        return 10 - (tile.split == 8) - (tile.split == 8 and tile.stages == 4)

    times = search(WNA16, [START], lambda tile: True, time_of, never)
    assert min(times, key=times.get) == dataclasses.replace(START, split=8, stages=4)


def test_search_tries_valid_configs_once():
    tried = []

    def time_of(tile):
        tried.append(tile)
        return float(tile.stages)

    search(WNA16, [START, START], lambda tile: tile.split < 4, time_of, never)
    assert len(tried) == len(set(tried)) > 5
    assert all(tile.split < 4 for tile in tried)


def test_failed_start_config_does_not_end_search():
    times = search(
        WNA16, [START], lambda tile: True, lambda tile: math.inf if tile == START else 5.0, never
    )
    assert times[START] == math.inf and min(times.values()) == 5


def test_library_may_be_fastest():
    times = search(
        WNA16, [START, None], lambda tile: True, lambda tile: 1.0 if tile is None else 2, never
    )
    assert min(times, key=times.get) is None


def test_out_of_time_keeps_what_was_measured():
    times = search(WNA16, [START], lambda tile: True, lambda tile: 3.0, lambda: True)
    assert times == {START: 3.0}


def test_search_starts_from_default():
    for m in (1, 16, 300, 4096):
        first = starts(WNA16, PROBLEM | {"M": m}, 132)
        assert first[0] == WNA16.default(sm_count=132, **PROBLEM | {"M": m})
        assert (None in first) == (m >= 256)


def runs_sm90(monkeypatch, answer):
    reason = None if answer else "written for sm_90"
    monkeypatch.setattr(gpu_device, "lacks_arch", lambda device, arch: reason)


@pytest.fixture
def hopper(monkeypatch):
    runs_sm90(monkeypatch, True)


@pytest.mark.parametrize("M", [17, 64, 128, 1024])
def test_large_m_kernel_is_a_start_if_it_runs(hopper, M):
    """On another GPU it may be faster where the config takes another one, and the other way."""
    first = starts(WNA16, PROBLEM | {"M": M}, 132)
    found = {type(tile) for tile in first}
    assert {LargeMConfig, TritonGemmConfig} <= found
    assert LargeMConfig(blocks=132, block_m=64 if M <= 64 else 128) in first
    assert all(tile.blocks == 132 for tile in first if isinstance(tile, LargeMConfig))
    assert all(tile is None or not WNA16.fault(tile, PROBLEM | {"M": M}) for tile in first)
    eight_bits = starts(WNA16, PROBLEM | {"M": M, "bits": 8}, 132)
    assert {tile.bits for tile in eight_bits if isinstance(tile, LargeMConfig)} == {8}


def test_large_m_kernel_is_no_start_without_gluon(monkeypatch):
    runs_sm90(monkeypatch, False)
    for M in (17, 128, 1024):
        first = starts(WNA16, PROBLEM | {"M": M}, 132)
        assert LargeMConfig not in {type(tile) for tile in first}


@pytest.mark.parametrize("M", [1, 16, 64, 128, 1024])
@pytest.mark.parametrize("integers", [True, False])
def test_8_bit_products_start_from_every_size_that_runs(hopper, M, integers):
    problem = INT8 | {"M": M, "integers": integers}
    for sms in (4, 40, 132):
        first = starts(W8A8, problem, sms)
        assert first[0] == default_sm90_config(
            M, 4096, 14336, sms, kind="int" if integers else "float"
        )
        assert (
            len({(t.num_consumers, t.consumer_rows, t.block_b, t.blocks_per_sm) for t in first}) > 1
        )
        for tile in first:
            assert W8A8.fault(tile, problem) is None
            assert tile.fits(bucket(M), 4096, sms)


def test_8_bit_products_start_from_the_portable_kernel_without_gluon(monkeypatch):
    runs_sm90(monkeypatch, False)
    assert {type(tile) for tile in starts(W8A8, INT8, 132)} == {W8A8TritonConfig}


def test_search_reaches_every_measured_config_of_8_bit_products():
    """From any size, since each may be the fastest start."""
    problem = INT8 | {"M": 64, "N": 6144}
    seen = [W8A8Sm90Config(num_consumers=1, block_b=16)]
    found = set(seen)
    for tile in seen:
        for other in W8A8.neighbours(tile):
            if other not in found and W8A8.fault(other, problem) is None:
                found.add(other)
                seen.append(other)
    for M in (1, 16, 64, 128, 256, 1024):
        for N, K in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
            assert default_sm90_config(M, N, K, 132) in found
    assert {tile.split for tile in found} == {1, 2, 4}
    assert not any(tile.reduce_scatter and tile.split == 1 for tile in found)


def test_search_skips_nonresident_splits(hopper, monkeypatch):
    """65 SMs have no place for the two parts of each of 64 tiles, 128 have."""
    tried = {}
    for sms in (65, 128):
        table = tuning_table.TuningTable(gpu="made up")
        tried[sms] = []

        def time_calls(calls, replays, table=table, tiles=tried[sms]):
            tiles.append(table.find(W8A8, **INT8).config)
            return 5.0

        monkeypatch.setattr(tune_module, "check", lambda case, t=table: t.find(W8A8, **INT8))
        monkeypatch.setattr(tune_module, "time_calls", time_calls)
        case = SimpleCase()
        case.tuned = (W8A8, INT8)
        tune_module.tune_case(case, table, sms, "torch 1", never)
    meeting = {
        sms: [t for t in tiles if t.reduce_scatter and (t.block_a, t.block_b) == (64, 128)]
        for sms, tiles in tried.items()
    }
    assert not meeting[65] and meeting[128]
    assert all(tile.fits(128, 4096, 65) for tile in tried[65])


@pytest.mark.parametrize("start", LARGE_M_SIZES)
def test_search_reaches_every_large_m_config_that_can_run(start):
    """From any size, since each start may be the fastest."""
    problem = PROBLEM | {"M": 64, "N": 4096}
    parts, block_m = start
    seen = [LargeMConfig(blocks=132, num_consumers=parts, block_m=block_m)]
    for tile in seen:
        for other in WNA16.neighbours(tile):
            can_run = WNA16.fault(other, problem) is None
            if can_run and other not in seen:
                seen.append(other)
    # four sizes, whole or in 2 or 4 parts, and one in halves
    assert len(seen) == 4 * 3 + 1


def test_faster_large_m_config_is_kept(hopper, monkeypatch):
    best = LargeMConfig(blocks=132, num_consumers=3, block_m=128, split=2)
    problem = PROBLEM | {"M": 128}
    table = tuning_table.TuningTable(gpu="made up")
    monkeypatch.setattr(tune_module, "check", lambda case: table.find(WNA16, **problem))

    def time_calls(calls, replays):
        tile = table.find(WNA16, **problem).config
        return 5.0 if tile == best else 6.0 + isinstance(tile, TritonGemmConfig)

    monkeypatch.setattr(tune_module, "time_calls", time_calls)
    case = SimpleCase()
    case.tuned = (WNA16, problem)
    tuned = tune_module.tune_case(case, table, 132, "torch 1", never)
    assert tuned.is_faster and tuned.best == best and not tuned.wrong
    assert table.find(WNA16, **problem).config == best
    assert isinstance(tuned.default, LargeMConfig) and "split 2" in format_tuned(tuned)


@pytest.fixture
def tuning(monkeypatch):
    """tune_case with made-up times; the tile is what a kernel would find in the table."""

    def run(time_of, wrong=(), is_read=True):
        table = tuning_table.TuningTable(gpu="made up")

        def tile():
            return table.find(WNA16, **PROBLEM).config

        def check(case):
            if is_read and tile() in wrong:
                raise KernelError("w4a16", "is wrong on this GPU")

        monkeypatch.setattr(tune_module, "check", check)
        monkeypatch.setattr(tune_module, "time_calls", lambda calls, replays: time_of(tile()))
        (case,) = [SimpleCase()]
        return table, tune_module.tune_case(case, table, 132, "torch 1", never)

    return run


class SimpleCase:
    op, shape, m, calls = "w4a16", "qkv", 16, ()
    tuned = (WNA16, PROBLEM)


def test_faster_config_is_kept_and_found(tuning):
    table, tuned = tuning(lambda tile: 5.0 if tile.stages == 4 else 6.0)
    assert tuned.is_faster and (tuned.microseconds, tuned.default_microseconds) == (5.0, 6.0)
    row = table.find(WNA16, **PROBLEM)
    assert row.config.stages == 4 and row.versions == "torch 1"
    assert "stages 4" in format_tuned(tuned) and "1.20x" in format_tuned(tuned)


def test_equally_fast_config_is_not_kept(tuning):
    table, tuned = tuning(lambda tile: 5.95 if tile.stages == 4 else 6.0)
    assert not table.rows and not tuned.is_faster
    assert tuned.microseconds == 6.0 and "default kept" in format_tuned(tuned)


def test_wrong_config_is_reported_and_never_kept(tuning):
    default = WNA16.default(sm_count=132, **PROBLEM)
    bad = dataclasses.replace(default, stages=4)
    table, tuned = tuning(lambda tile: 1.0 if tile == bad else 6.0, wrong=(bad,))
    assert not table.rows and tuned.wrong == (bad,) and tuned.refused == 0
    assert "WRONG" in format_tuned(tuned)


def test_invalid_default_is_replaced(tuning):
    default = WNA16.default(sm_count=132, **PROBLEM)

    def time_of(tile):
        if tile == default:
            raise RuntimeError("out of resource: shared memory")
        return 6.0

    table, tuned = tuning(time_of)
    assert tuned.refused == 1 and table.find(WNA16, **PROBLEM).default_microseconds is None


def test_unused_configs_are_not_timed(tuning):
    """Times would differ by noise alone, and the best of them would be kept."""
    with pytest.raises(NotTaken):
        tuning(lambda tile: 5.0 if tile.stages == 4 else 6.0, is_read=False)


def test_lost_cuda_context_ends_run(tuning):
    def lost(tile):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        tuning(lost)


def test_shapes_given_as_numbers():
    chosen = select("w4a16", "896x4864,qkv", "1", "none")
    assert [(shape, ms) for _, shape, ms, _ in chosen] == [("896x4864", (1,)), ("qkv", (1,))]
    assert [shape for _, shape, _, _ in select("paged_attention", "999x3", None, "none")] == [
        "999x3"
    ]
    for bad in ("0x128", "896", "1x2x3", "ax128"):
        with pytest.raises(KernelError, match="--shape"):
            select("w4a16", bad, None, "none")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_missing_gpu_is_reported():
    with pytest.raises(KernelError, match="GPU: is needed .* torch sees none .run this on"):
        run_tune(seconds=1, show=print)
