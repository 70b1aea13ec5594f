"""Kernels run the config of the tuning table instead of the default."""

from dataclasses import replace

import torch

from formats.in_memory.weights import with_activation
from formats.scheme import CHANNEL, Scheme
from qkernels import ops
from qkernels.attention import triton_paged as paged_attention
from qkernels.attention.config import AttentionConfig
from qkernels.attention.tuned import TUNED as ATTENTION
from qkernels.tuning import table as tuning_table
from qkernels.tuning.table import TuningRow
from qkernels.w8a8 import triton_gemm as w8a8
from qkernels.w8a8.config import W8A8TritonConfig
from qkernels.w8a8.tuned import TUNED as W8A8
from qkernels.wna16 import gemm
from qkernels.wna16.sm90_large_m_config import LargeMConfig
from qkernels.wna16.triton_config import TritonGemmConfig
from qkernels.wna16.tuned import TUNED as WNA16
from tests.qkernels.flat_attention import run_attention
from tests.qkernels.plans import multiply


def row(op, problem, tile):
    return TuningRow(op=op, problem=problem, config=tile, microseconds=1, default_microseconds=2)


def no_default(*args, **kwargs):
    raise AssertionError("the config was asked, though the table has a row")


def test_w4a16(make_weight, device, half, monkeypatch, assert_close, tolerance):
    packed = make_weight(128, 256, 64)
    weight = ops.prepare_weight(packed, half, kernel="w4a16")
    x = torch.randn(5, 256).to(device, half)
    monkeypatch.setattr(gemm, "default_config", no_default)
    problem = {"N": 128, "K": 256, "group": 64, "bits": 4, "M": 8}
    want = x.double() @ packed.dequantize(torch.float64).t()
    for tile in (TritonGemmConfig(block_m=16, block_n=128, split=3), None):
        with tuning_table.tuning_table_of(x.device).trying(row(WNA16, problem, tile)):
            assert_close("w4a16", want, multiply(x, weight), tolerance(half))


def test_w4a16_config_with_nonresident_splits_is_skipped(
    make_weight, device, half, monkeypatch, assert_close, tolerance
):
    """Such splits would wait for each other forever, so the default config is used."""
    packed = make_weight(128, 512, 128)
    weight = ops.prepare_weight(packed, half, kernel="w4a16")
    x = torch.randn(17, 512).to(device, half)
    default = TritonGemmConfig(block_m=32, block_n=64, split=1)
    monkeypatch.setattr(gemm, "default_config", lambda *_, **__: default)
    shape_of = gemm.shape_of
    monkeypatch.setattr(gemm, "shape_of", lambda problem: replace(shape_of(problem), sm_count=3))
    problem = {"N": 128, "K": 512, "group": 128, "bits": 4, "M": 32}
    tile = LargeMConfig(blocks=132, block_m=64, split=4)
    with tuning_table.tuning_table_of(x.device).trying(row(WNA16, problem, tile)):
        assert gemm.plan(weight.problem, 17).config is default
        want = x.double() @ packed.dequantize(torch.float64).t()
        assert_close("w4a16", want, multiply(x, weight), tolerance(half))


def test_w8a8(make_weight, device, half, monkeypatch, assert_close, tolerance):
    packed = make_weight(64, 256, CHANNEL, bits=8)
    packed = with_activation(packed, Scheme.parse("w8a8"), None)
    weight = ops.prepare_weight(packed, half, kernel="triton_w8a8")
    x = torch.randn(5, 256).to(device, half)
    codes, scales = ops.quantize_input(x, packed.activation)
    monkeypatch.setattr(w8a8, "default_w8a8_triton_config", no_default)
    problem = {"N": 64, "K": 256, "integers": True, "M": 8}
    tile = W8A8TritonConfig(block_m=16, block_n=64, split=2)
    want = codes.double() * scales.double() @ packed.dequantize(torch.float64).t()
    with tuning_table.tuning_table_of(x.device).trying(row(W8A8, problem, tile)):
        assert_close("w8a8", want, w8a8.linear_codes(codes, scales, weight), tolerance(half))


def test_paged_attention(device, half, monkeypatch, assert_close, tolerance):
    k, v = (torch.randn(4, 16, 1, 32).to(device, half) for _ in range(2))
    q = torch.randn(1, 2, 32).to(device, half)
    lengths = torch.tensor([40], dtype=torch.int32, device=device)
    table = torch.tensor([[2, 0, 3]], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
    arguments = (q, k, v, table, starts, lengths)
    options = {"scale": 0.2, "window": None, "max_query_len": 1, "max_context_len": 48}
    want = run_attention(paged_attention, *arguments, **options)
    monkeypatch.setattr(paged_attention, "default_attention_config", no_default)
    problem = {
        "num_requests": 1,
        "num_kv_heads": 1,
        "heads_per_kv_head": 2,
        "head_dim": 32,
        "element_size": 2,
        "max_query_len": 1,
        "max_context_len": 48,
        "window": None,
    }
    tile = AttentionConfig(block_m=16, block_q=8, keys=16, split=2, warps=4, stages=2)
    with tuning_table.tuning_table_of(q.device).trying(row(ATTENTION, problem, tile)):
        got = run_attention(paged_attention, *arguments, **options)
    assert_close("paged_attention", want, got, tolerance(half))
