"""The attention of chunks for sm_90 over 8-bit pages against float64, on such a GPU."""

import pytest
import torch

from qkernels import ops
from tests.qkernels.flat_attention import run_attention

pytestmark = pytest.mark.hopper

CODES = pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn], ids=["int8", "float8"])


@CODES
def test_chunks_and_decodes_over_8_bit_pages(check, half, codes):
    check([1, 300, 1, 30, 2, 700], [40, 5000, 7, 70, 333, 700], 8, 2, 128, 16, half, codes=codes)


@CODES
@pytest.mark.parametrize("count", [1, 3, 63, 257])
def test_8_bit_odd_numbers_of_rows_and_keys(check, half, codes, count):
    check([count], [count], 8, 2, 128, 16, half, codes=codes)
    check([count], [count + 1234], 8, 2, 128, 16, half, codes=codes)


@CODES
@pytest.mark.parametrize("B", [16, 32, 64, 128])
@pytest.mark.parametrize("past", [-1, 0, 1])
def test_8_bit_contexts_at_page_and_step_edges(check, half, codes, B, past):
    """Scales and float8 codes after the last key of a page are NaN."""
    lengths = [B + past, 128 + past, 3 * 128 + past, 128 + B + past]
    check([9, 100, 130, 40], lengths, 8, 2, 128, B, half, codes=codes)


@CODES
@pytest.mark.parametrize("window", [1, 64, 129, 500])
def test_windows_over_8_bit_pages(check, half, codes, window):
    counts, lengths = [118, 257, 3, 1], [130, 1517, 1003, 2000]
    check(counts, lengths, 8, 2, 128, 16, half, window, codes=codes)


@CODES
def test_8_bit_pages_before_the_window_are_not_read(coded_problem, half, codes):
    from qkernels.attention import sm90_prefill

    arguments, scales, _ = coded_problem(codes, [64], [2000], 8, 2, 128, 16, half)
    shared = {"scale": 0.1, "window": 100, "max_query_len": 64, "max_context_len": 2000}
    want = run_attention(sm90_prefill, *arguments, **shared, **scales)
    tables = arguments[3]
    freed = tables[0, : (2000 - 64 - 100) // 16].long()
    for pages, scale in zip(arguments[1:3], scales.values(), strict=True):
        pages.view(torch.int8)[freed] = 127  # NaN in float8
        scale[freed] = float("nan")
    tables[0, : len(freed)] = -7
    got = run_attention(sm90_prefill, *arguments, **shared, **scales)
    assert torch.isfinite(got).all() and torch.equal(got, want)


@CODES
@pytest.mark.parametrize("D", [16, 48, 64, 80, 96])
def test_head_dims_over_8_bit_pages(check, codes, D):
    check([118, 17], [130, 517], 8, 2, D, 16, torch.bfloat16, codes=codes)
    check([118, 17], [130, 517], 8, 2, D, 16, torch.float16, codes=codes, interleaved=True)


@CODES
@pytest.mark.parametrize("H, J", [(2, 2), (14, 2), (130, 1)])
def test_query_heads_per_kv_head_over_8_bit_pages(check, codes, H, J):
    check([60, 1, 33], [300, 200, 33], H, J, 128, 16, torch.bfloat16, codes=codes)


@CODES
@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
@pytest.mark.parametrize("window", [None, 90])
def test_soft_cap_over_8_bit_pages(check, codes, soft_cap, window):
    """Pages of 128, and parts, take the most shared memory."""
    for split in (1, 2):
        check(
            [118, 17],
            [130, 517],
            8,
            2,
            128,
            128,
            torch.bfloat16,
            window,
            soft_cap,
            codes=codes,
            split=split,
        )


@CODES
@pytest.mark.parametrize("split", [2, 8])
@pytest.mark.parametrize("window", [None, 300])
def test_8_bit_splits_of_a_context_merge(check, codes, split, window):
    shape = [100, 1, 33, 40], [5000, 1, 33, 250], 8, 2, 128, 16, torch.bfloat16
    check(*shape, window, split=split, codes=codes)


@CODES
@pytest.mark.parametrize("spread", [2**-24, 2**12])
def test_scales_of_very_different_size(check, half, codes, spread):
    check([100, 40], [300, 1000], 8, 2, 128, 16, half, codes=codes, spread=spread)


@CODES
def test_small_keys_and_values(check, half, codes):
    """Also where a weight times a scale is less than float16 has, and where bfloat16 alone can."""
    size = 1e-3 if half is torch.float16 else 1e-20
    check([100, 40], [100, 60], 8, 2, 128, 16, half, codes=codes, size=size)


@CODES
def test_static_scale_with_zero_strides(check, half, codes):
    """A checkpoint's: its strides are 0."""
    check([100, 1], [300, 1000], 8, 2, 128, 16, half, codes=codes, static=True)


@CODES
def test_8_bit_requests_without_rows_or_keys(check, half, codes):
    for split in (1, 2):
        counts, lengths = [0, 200, 0, 1, 40, 0], [5, 300, 0, 0, 0, 9]
        got = check(counts, lengths, 8, 2, 128, 16, half, split=split, codes=codes)
        assert not got[200:].any(), "rows that see nothing are zero"


@CODES
def test_batch_of_many_requests_over_8_bit_pages(check, half, codes):
    counts = [1 + 37 * r % 90 for r in range(70)]
    lengths = [count + 13 * r for r, count in enumerate(counts)]
    check(counts, lengths, 8, 2, 128, 16, half, codes=codes)


@CODES
def test_captured_chunk_over_8_bit_pages_reads_new_inputs(coded_problem, codes):
    """Rows, lengths, tables, codes and scales change between replays."""
    cases = [
        coded_problem(codes, [1, 100, 99], [700, 600, 99], 8, 2, 128, 16, torch.bfloat16, seed=1),
        coded_problem(
            codes, [150, 49, 1], [150, 2000, 1000], 8, 2, 128, 16, torch.bfloat16, seed=2
        ),
    ]
    shared = {"scale": 0.1, "window": None, "max_query_len": 200, "max_context_len": 2000}

    def padded(case):
        (q, k, v, tables, starts, lengths), scales, _ = case
        wide = torch.full((3, 125), -7, dtype=torch.int32, device="cuda")
        wide[:, : tables.shape[1]] = tables
        pages = [torch.cat([t.view(torch.uint8)] * 3)[:400].view(codes) for t in (k, v)]
        scales = [torch.cat([s, s, s])[:400] for s in scales.values()]
        return [q.clone(), *pages, wide, starts, lengths, *scales]

    def attend(q, k, v, tables, starts, lengths, k_scales, v_scales):
        scales = {"k_scales": k_scales, "v_scales": v_scales}
        return run_attention(ops, q, k, v, tables, starts, lengths, **shared, **scales)

    inputs = [padded(case) for case in cases]
    want = [attend(*case) for case in inputs]
    frozen = [t.clone() for t in inputs[0]]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(*frozen)
    for case, expected in zip((*inputs, inputs[0]), (*want, want[0]), strict=True):
        for place, tensor in zip(frozen, case, strict=True):
            place.copy_(tensor)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)
