"""Paged attention in Triton against float64: in the interpreter on a CPU, compiled on a GPU."""

from dataclasses import replace

import pytest
import torch

from qkernels import ops
from qkernels.attention import triton_paged as paged_attention
from qkernels.attention.cache import AttentionStep, DecodeRows, RequestArrays, decode_bounds
from qkernels.attention.config import default_attention_config
from qkernels.gpu.device import sm_count
from qkernels.operands.limbs import LimbForm, Limbs
from qkernels.operands.limbs_reference import from_limbs, to_limbs
from tests.qkernels.flat_attention import exact_attention, paged_kv, run_attention

exhaustive = pytest.mark.exhaustive


@pytest.fixture
def check(assert_close, tolerance, device, poison):
    def run(
        counts,
        lengths,
        H,
        J,
        D,
        B,
        dtype,
        window=None,
        split=None,
        interleaved=False,
        codes=None,  # dtype of 8-bit pages
        soft_cap=None,
        sinks=None,
        slopes=None,
        chunk_size=None,
        spread=1,  # largest over smallest scale
        size=1.0,  # of keys and values
        limbs=None,  # form of the result
        inputs_ready=False,
    ):
        generator = torch.Generator().manual_seed(D + B + len(counts))
        R, T = len(counts), sum(counts)
        X = max(1, -(-max(lengths) // B))
        # unused pages and tails hold NaN, so that reading one shows
        pages = torch.full((R * X + 2, B, 2, J, D), float("nan"))
        scales = torch.full((R * X + 2, B, 2, J), float("nan"))
        tables = torch.randperm(R * X + 2, generator=generator)[: R * X].view(R, X).int()
        keys, values = [], []
        for r, length in enumerate(lengths):
            kv = torch.randn(length, 2, J, D, generator=generator).to(dtype)
            t = torch.arange(length)
            index = tables[r, t // B].long(), t % B
            if codes is not None:
                rounded = (kv * 30).to(codes)
                scale = spread ** torch.rand(length, 2, J, generator=generator) * size / 30
                scales[index] = scale
                kv = rounded.double() * scale.double()[..., None]
                pages[index] = rounded.float()
            else:
                pages[index] = kv.float()
            keys.append(kv[:, 0])
            values.append(kv[:, 1])
            # entries beyond the context are stale
            tables[r, -(-length // B) :] = -7
        qkv = torch.randn(T, H + 2, D, generator=generator).to(dtype)
        q = qkv[:, :H]  # strided, as a slice of a fused projection is
        if codes is torch.int8:
            pages = pages.nan_to_num(113)
        pages = pages.to(device, codes or dtype)
        k_scales = v_scales = None
        if codes is not None:
            k_scales, v_scales = scales.to(device).unbind(2)
        k_pages, v_pages = pages.unbind(2)
        if not interleaved:
            k_pages, v_pages = k_pages.contiguous(), v_pages.contiguous()
            if codes is not None:  # one head's scales of a page together, as the engine keeps them
                k_scales, v_scales = (
                    s.transpose(1, 2).contiguous().transpose(1, 2) for s in (k_scales, v_scales)
                )
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        shared = {"window": window, "max_query_len": max(counts), "max_context_len": max(lengths)}
        inputs = (qkv.to(device)[:, :H], k_pages, v_pages)
        bodies = [False]  # also the one in Gluon, where it can
        cache = paged_kv(k_pages, v_pages, k_scales, v_scales)
        has_options = paged_attention.has_options(sinks, slopes, chunk_size)
        if not has_options and paged_attention.gluon_refuses(inputs[0], cache) is None:
            bodies.append(True)
        results = []
        for gluon in bodies:
            tile = default_attention_config(
                num_requests=R,
                num_kv_heads=J,
                heads_per_kv_head=H // J,
                head_dim=D,
                element_size=dtype.itemsize,
                page_element_size=k_pages.element_size(),
                sm_count=sm_count(device),
                gluon=gluon,
                **shared,
            )
            results.append(
                run_attention(
                    paged_attention,
                    *inputs,
                    tables.to(device),
                    starts.to(device),
                    torch.tensor(lengths, dtype=torch.int32, device=device),
                    scale=D**-0.5,
                    soft_cap=soft_cap,
                    sinks_H=None if sinks is None else sinks.to(device),
                    slopes_H=None if slopes is None else slopes.to(device),
                    chunk_size=chunk_size,
                    k_scales=k_scales,
                    v_scales=v_scales,
                    **shared,
                    limbs=limbs,
                    inputs_ready=inputs_ready,
                    config=tile if split is None else replace(tile, split=split),
                )
            )
            if isinstance(results[-1], Limbs):  # a result that is not split becomes them in ops
                results[-1] = from_limbs(results[-1]).to(dtype).view(T, H, D)
        want = [
            exact_attention(
                *(q[start : start + count], k, v, count, length, D**-0.5),
                *(window, soft_cap, sinks, slopes, chunk_size),
            )
            for start, count, length, k, v in zip(
                starts, counts, lengths, keys, values, strict=False
            )
        ]
        # the bend of a score near zero is a difference of two numbers as large as the cap
        allowed = tolerance(dtype) + (5e-6 if soft_cap else 0)
        # a score as large as the scales is rounded in float32 before it becomes a power
        allowed += 2**-24 * max(1, spread)
        for gluon, got in zip(bodies, results, strict=True):
            assert_close(f"paged attention, gluon {gluon}", torch.cat(want), got, allowed)
        return results[-1]

    return run


@pytest.mark.parametrize("inputs_ready", [False, True])
def test_chunks_and_decodes_in_one_batch(check, dtype, inputs_ready):
    check([1, 5, 1, 30, 2], [40, 5, 7, 70, 33], 4, 2, 32, 16, dtype, inputs_ready=inputs_ready)


@pytest.mark.parametrize("window", [1, 7, 64, 65, 1000])
def test_window_edges(check, dtype, window):
    check([1, 9, 1], [200, 80, 3], 4, 1, 32, 32, dtype, window)


@pytest.mark.parametrize("D", [16, 24, 80, 128, 256])
def test_head_dims(check, dtype, D):
    check([2, 1], [20, 37], 2, 1, D, 16, dtype)


@pytest.mark.parametrize("H, J", [(1, 1), (3, 3), (7, 1), (14, 2), (16, 1), (24, 1)])
def test_query_heads_per_kv_head(check, dtype, H, J):
    check([1, 4], [19, 21], H, J, 16, 16, dtype)


@pytest.mark.parametrize("B", [16, 32, 64, 128])
def test_contexts_at_page_edges(check, dtype, B):
    check([1, 1, 1, 3], [B - 1, B, B + 1, 2 * B + 1], 2, 1, 16, B, dtype)


@pytest.mark.parametrize("B", [16, pytest.param(64, marks=exhaustive), 128])
def test_chunk_after_many_keys(check, dtype, B):
    """Most steps lie before the chunk's first row and take the path without a mask."""
    check([40, 33, 1], [300, 33, 200], 4, 2, 32, B, dtype)


def test_chunk_whose_rows_are_not_multiples_of_16_bytes(check, dtype):
    check([40], [200], 2, 1, 18, 16, dtype, interleaved=True)


@pytest.mark.parametrize("split", [2, 8, pytest.param(32, marks=exhaustive)])
@pytest.mark.parametrize("window", [None, 50])
def test_splits_of_a_context_merge(check, dtype, split, window):
    """Contexts of one key to hundreds: some parts are empty."""
    check([1, 1, 1, 1], [300, 1, 65, 129], 4, 2, 32, 16, dtype, window, split)


def test_splits_of_a_context_merge_for_several_rows(check, dtype):
    check([3, 1, 2], [130, 64, 200], 4, 2, 32, 16, dtype, 70, 4)


@pytest.mark.parametrize("split", [1, 2, 8])
@pytest.mark.parametrize("H, J, D", [(4, 2, 32), (2, 1, 64), (1, 1, 128), (8, 4, 80), (2, 1, 256)])
@pytest.mark.parametrize("counts", [[1, 1, 1, 1], [1, 2, 1]])
def test_result_as_limbs(check, half, H, J, D, counts, split):
    """Heads smaller and larger than the 128 inputs of a step, and across their edges."""
    lengths = [300, 2, 65, 129][: len(counts)]
    form = LimbForm(bits=4, with_sums=True)
    check(counts, lengths, H, J, D, 16, half, None, split, limbs=form)


def test_unsplit_result_as_limbs(half, device):
    q = torch.randn(2, 2, 64, generator=torch.Generator().manual_seed(0)).to(device, half)
    pages = torch.randn(2, 16, 1, 64, generator=torch.Generator().manual_seed(1)).to(device, half)
    tables, starts, lengths = (
        torch.tensor(values, dtype=torch.int32, device=device)
        for values in ([[0], [1]], [0, 1, 2], [9, 16])
    )
    step = {"max_query_len": 1, "max_context_len": 16, "scale": 0.125, "window": None}

    def run(limbs):
        arguments = q, pages, pages.flip(0), tables, starts, lengths
        return run_attention(ops, *arguments, **step, limbs=limbs, kernel="triton")

    form = LimbForm(bits=4, with_sums=True)
    got, want = run(form), to_limbs(run(None).flatten(1), form)
    for name in ("words", "scales", "sums"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name


@pytest.mark.parametrize("split", [1, 4])
def test_padding_rows_do_not_change_limbs(check, half, split):
    form = LimbForm(bits=8)
    check([1, 0, 1, 0], [5, 20, 9, 0], 4, 1, 32, 16, half, None, split, limbs=form)


def test_keys_and_values_interleaved_in_one_tensor(check, dtype):
    check([1, 3], [20, 40], 2, 2, 16, 16, dtype, interleaved=True)


@pytest.mark.parametrize("split", [1, 4])
def test_requests_without_rows_or_keys(check, half, split):
    """A captured graph's batch is padded with such requests."""
    rows = [0, 1, 0, 1, 0], [5, 20, 0, 0, 9]
    got = check(*rows, 2, 1, 16, 16, half, None, split, inputs_ready=True)
    assert not got[1].any()


@pytest.mark.parametrize("codes", [None, torch.int8], ids=["half", "int8"])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(
    ("on_device", "num_decodes"), [(False, 2), (True, 2), (True, 0), (True, 5)]
)
def test_decodes_and_chunks_computed_separately(
    half, device, codes, window, on_device, num_decodes, assert_close, tolerance
):
    """With `on_device`, the device alone knows the number of decodes; rows and requests are padded.

    A chunk of one row is a chunk for the bounds. 5 decodes: the second part has no request.
    """
    counts, lengths = [1, 1, 40, 1, 33, 0], [70, 5, 64, 90, 33, 0]
    if num_decodes == 5:
        counts = [1, 1, 3, 1, 2, 0]
    H, J, D, B, R, T = 8, 2, 64, 16, 6, sum(counts)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(T + 7, H, D, generator=generator).to(half)
    k, v = (torch.randn(R * 6, B, J, D, generator=generator).to(half) for _ in range(2))
    scales = {}
    if codes is not None:
        k, v = ((pages * 30).to(codes) for pages in (k, v))
        scales = {f"{name}_scales": torch.rand(R * 6, B, J, generator=generator) for name in "kv"}
    tables = torch.randperm(R * 6, generator=generator).view(R, 6).int()
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    decodes = {"num_requests": R if on_device else num_decodes, "max_query_len": 3}
    if on_device:
        bounds = torch.tensor(decode_bounds(num_decodes), dtype=torch.int32, device=device)
        decodes |= {"bounds_8": bounds}
    else:
        arrays = tables, starts - num_decodes, torch.tensor(lengths, dtype=torch.int32)
        chunks = RequestArrays(*(each[num_decodes:].to(device) for each in arrays))
        decodes |= {"num_rows": num_decodes, "chunks": chunks}
    step = AttentionStep(
        block_tables_RX=tables.to(device),
        query_starts_R1=starts.to(device),
        context_lengths_R=torch.tensor(lengths, dtype=torch.int32, device=device),
        max_query_len=40,
        max_context_len=90,
        decodes=DecodeRows(**decodes, max_context_len=90),
    )
    cache = paged_kv(k.to(device), v.to(device), **{n: s.to(device) for n, s in scales.items()})
    options = {"scale": D**-0.5, "window": window}
    chosen = None if device.type == "cuda" else "triton"
    got = ops.paged_attention(q.to(device), cache, step, **options, kernel=chosen)
    flat = [pages[tables.long()].view(R, -1, J, D).double() for pages in (k, v)]
    for at, name in enumerate(scales):
        flat[at] *= scales[name][tables.long()].view(R, -1, J, 1)
    want = [
        exact_attention(
            *(q[start : start + count], flat[0][r, :length], flat[1][r, :length], count, length),
            *(D**-0.5, window, None, None, None, None),
        )
        for r, (start, count, length) in enumerate(zip(starts, counts, lengths, strict=False))
    ]
    assert_close("divided", torch.cat(want), got[:T], tolerance(half))


def test_rows_of_one_request_are_independent_of_the_batch(check, half):
    alone = check([4], [50], 2, 1, 16, 16, half)
    assert torch.isfinite(alone).all()
    assert torch.equal(alone, check([4], [50], 2, 1, 16, 16, half)), "equal inputs, equal bits"


CODES = pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn], ids=["int8", "float8"])


@CODES
def test_8_bit_pages(check, dtype, codes):
    check([1, 5, 1, 30, 2], [40, 5, 7, 70, 33], 4, 2, 32, 16, dtype, codes=codes)


@CODES
@pytest.mark.parametrize("B", [16, 32, 64, 128])
def test_8_bit_pages_of_every_size(check, half, codes, B):
    """A chunk's whole steps, a decode, a verify; the pages of k and v apart and interleaved."""
    check([40, 1, 3], [110, 90, B + 1], 4, 1, 64, B, half, codes=codes)
    check([1, 3], [20, 2 * B], 8, 2, 64, B, half, codes=codes, interleaved=True)


@CODES
@pytest.mark.parametrize("D", [16, 24, 80, 256])
def test_8_bit_pages_of_every_head_dim(check, half, codes, D):
    check([2, 1], [20, 37], 2, 1, D, 16, half, codes=codes)


@CODES
@pytest.mark.parametrize("H, J", [(1, 1), (4, 1), (7, 1), (14, 2), (16, 1)])
def test_8_bit_pages_and_query_heads(check, half, codes, H, J):
    check([1, 1], [19, 150], H, J, 128, 16, half, codes=codes)


@CODES
@pytest.mark.parametrize("spread", [2**-24, 2**12])
def test_scales_of_very_different_size(check, dtype, codes, spread):
    """Small keys and values next to large ones, and the reverse."""
    check([1, 20], [100, 50], 4, 1, 32, 16, dtype, codes=codes, spread=spread)


@CODES
def test_small_values(check, half, codes):
    """The product of a weight and a value's scale is less than a float16 has bits for."""
    check([1, 20], [100, 90], 4, 2, 32, 16, half, codes=codes, size=1e-4)


@CODES
def test_8_bit_splits_of_a_context_merge(check, half, codes):
    check([1, 1, 1], [200, 1, 65], 4, 1, 128, 16, half, 50, 4, codes=codes)
    check([1, 2, 1], [300, 2, 129], 4, 1, 128, 16, half, None, 4, codes=codes)


@pytest.mark.parametrize("split", [None, 4])
@pytest.mark.parametrize("window", [None, 20])
def test_sinks(check, half, split, window):
    """gpt-oss: a score of each head takes its share of the weights and adds nothing."""
    sinks = torch.tensor([-3.0, 0.0, 2.0, 9.0])
    check([1, 40, 1], [40, 110, 7], 4, 2, 64, 16, half, window, split, sinks=sinks)


@pytest.mark.parametrize("split", [None, 4])
@pytest.mark.parametrize("codes", [None, torch.int8])
def test_alibi(check, half, split, codes):
    """Decodes, and a chunk whose steps need no mask; slopes differ in the heads of a KV head."""
    slopes = torch.tensor([0.5, 0.125, 2.0, 0.0])
    check([1, 40, 1], [40, 110, 7], 4, 2, 64, 16, half, None, split, slopes=slopes, codes=codes)
    check([2, 1], [64, 90], 3, 1, 64, 16, half, None, split, slopes=slopes[:3], codes=codes)


@pytest.mark.parametrize("split", [None, 2])
def test_heads_of_512(check, half, split):
    """Gemma 4's; decodes, and a chunk of more rows than a block has."""
    check([1, 20], [40, 33], 4, 2, 512, 16, half, None, split)


@pytest.mark.parametrize("split", [None, 4])
@pytest.mark.parametrize("chunk_size", [16, 23, 200])
def test_chunked_attention(check, half, split, chunk_size):
    """Rows at both sides of a chunk's end, in one block."""
    check([1, 40, 1], [48, 110, 7], 4, 2, 64, 16, half, None, split, chunk_size=chunk_size)
    check([1, 3, 1], [47, 49, 93], 4, 1, 64, 16, half, None, split, chunk_size=chunk_size)


@pytest.mark.parametrize("soft_cap", [0.5, 50.0])
@pytest.mark.parametrize("codes", [None, torch.int8])
def test_soft_cap(check, half, soft_cap, codes):
    """Decodes, and a chunk whose steps need no mask; a small cap changes every score."""
    check([1, 40, 1], [40, 110, 7], 4, 1, 64, 16, half, codes=codes, soft_cap=soft_cap)
    check([1, 2], [130, 65], 4, 1, 64, 16, half, 70, 2, codes=codes, soft_cap=soft_cap)
