"""Kernels read the table that --tune writes, and every config that a search tries is correct."""

import pytest
import torch

from formats.scheme import Scheme
from qkernels import ops
from qkernels.bench.table import run_tune
from qkernels.bench.tune import Tuned
from qkernels.gpu import device as gpu_device
from qkernels.linear.prepared import PreparedWeight
from qkernels.tuning import table as tuning_table
from qkernels.w8a8.config import W8A8Sm90Config, default_sm90_config
from qkernels.w8a8.tuned import TUNED as W8A8
from qkernels.wna16.sm90_large_m_config import LargeMConfig
from qkernels.wna16.tuned import TUNED as WNA16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="measures a GPU")
@pytest.mark.parametrize(
    "op, shape, m",
    [
        ("w4a16", "4096x512", 16),
        ("w4a16", "4096x1024", 128),
        ("w8a8", "4096x512", 16),
        ("w4a8", "4096x512", 16),
        ("paged_attention", "256x1", 2),
    ],
)
def test_tune_writes_a_table_that_the_kernels_read(tmp_path, monkeypatch, op, shape, m):
    path = tmp_path / "table.json"
    monkeypatch.setattr(tuning_table, "default_path", lambda gpu: path)
    path.write_text("damaged")
    tuning_table.tuning_table_of.cache_clear()
    found: list[Tuned] = []
    try:
        run_tune(op=op, shape=shape, m=str(m), seconds=12, show=found.append)
        gpu = torch.cuda.get_device_name()
        tuned, _ = found[0].case.tuned
        stored = tuning_table.read(path, gpu)
        stored.read_rows_(tuned)
        assert (tmp_path / "table.damaged").exists()
        assert not found[0].wrong and found[0].tried > 1
        assert len(stored.rows) == found[0].is_faster
        tuning_table.tuning_table_of.cache_clear()
        read_again = tuning_table.tuning_table_of(torch.device("cuda", 0))
        read_again.read_rows_(tuned)
        assert read_again.rows == stored.rows
    finally:
        tuning_table.tuning_table_of.cache_clear()


@pytest.mark.hopper
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("most", [64, 512])
def test_every_large_m_table_config_is_correct(make_weight, device, assert_close, most, bits):
    """Found for the whole bucket, each number of rows takes as many blocks as it needs."""
    N, K = 1088, 1024
    packed = make_weight(N, K, 128, bits=bits)
    weight, weight_NK = ops.prepare_weight(packed, torch.bfloat16), packed.dequantize(torch.float64)
    problem = {"N": N, "K": K, "group": 128, "bits": bits, "M": most}
    table = tuning_table.tuning_table_of(device)
    tiles = [LargeMConfig(blocks=gpu_device.sm_count(device), bits=bits)]
    for tile in tiles:
        allowed = (t for t in WNA16.neighbours(tile) if not WNA16.fault(t, problem))
        tiles += [other for other in allowed if other not in tiles]
    assert len(tiles) > 6
    for tile in tiles:
        row = tuning_table.TuningRow(
            op=WNA16, problem=problem, config=tile, microseconds=1.0, default_microseconds=None
        )
        with table.trying(row):
            for M in (most // 2 + 1, most - 1, most):
                x = torch.randn(M, K, device=device).to(torch.bfloat16)
                got = ops.linear(x, weight)
                assert row.key in table.taken
                assert_close(f"{tile} M={M}", x.double() @ weight_NK.t(), got, 5e-3)
                assert torch.equal(got, ops.linear(x, weight)), "equal inputs, equal bits"


@pytest.mark.hopper
@pytest.mark.parametrize("field", W8A8.configs[W8A8Sm90Config].options)
@pytest.mark.parametrize("most", [16, 128])
def test_every_8_bit_config_near_default_is_correct(device, most, field):
    """Every value that a search tries for one field, at several numbers of rows of its bucket."""
    from qkernels.w8a8 import sm90

    N, K = 1104, 1152
    scheme = Scheme.parse("w8a8")
    problem = {"N": N, "K": K, "integers": True, "M": most}
    generator = torch.Generator(device).manual_seed(most)
    codes_NK, codes_MK = (
        torch.randint(-128, 128, (rows, K), dtype=torch.int8, device=device, generator=generator)
        for rows in (N, most)
    )
    weight = PreparedWeight(
        kernel="sm90_w8a8",
        tensors={
            "codes": sm90.in_tma_boxes(codes_NK),
            "scales": torch.full((N,), 2.0**-8, device=device),
        },
        spec=scheme.weight,
        out_features=N,
        in_features=K,
        dtype=torch.bfloat16,
        activation=scheme.activation,
    )
    scales_M1 = torch.full((most, 1), 2.0**-9, device=device)
    want = (codes_MK.double() @ codes_NK.double().t() / 2**17).to(torch.bfloat16)
    table, sms = tuning_table.tuning_table_of(device), gpu_device.sm_count(device)
    default = default_sm90_config(most, N, K, sms)
    for tile in [default, *W8A8.neighbours(default)]:
        if getattr(tile, field) == getattr(default, field) and tile.split == default.split:
            continue
        if not W8A8.runs_here(tile, problem, sms):
            continue
        row = tuning_table.TuningRow(
            op=W8A8, problem=problem, config=tile, microseconds=1.0, default_microseconds=None
        )
        with table.trying(row):
            for M in (most // 2 + 1, most - 1, most):
                got = ops.linear_codes(codes_MK[:M], scales_M1[:M], weight)
                assert row.key in table.taken
                assert torch.equal(got, want[:M]), (tile, M)
