"""The attention of chunks for sm_90 over 16-bit pages against float64, on such a GPU."""

import pytest
import torch

from qkernels import dispatch, ops
from tests.qkernels.flat_attention import run_attention
from tests.qkernels.gpu.attention_prefill.exact import exact

pytestmark = pytest.mark.hopper


@pytest.mark.parametrize("count", [1, 3, 17, 63, 118, 257])
def test_odd_numbers_of_rows_and_keys(check, half, count):
    check([count], [count], 8, 2, 128, 16, half)
    check([count], [count + 1234], 8, 2, 128, 16, half)


def test_chunks_and_decodes_in_one_batch(check, half):
    check([1, 300, 1, 30, 2, 700], [40, 5000, 7, 70, 333, 700], 8, 2, 128, 16, half)


def test_batch_of_many_requests(check, half):
    """More tiles than SMs, and a search among many requests."""
    counts = [1 + 37 * r % 90 for r in range(70)]
    check(counts, [count + 13 * r for r, count in enumerate(counts)], 8, 2, 128, 16, half)


@pytest.mark.parametrize("B", [16, 32, 64, 128])
@pytest.mark.parametrize("past", [-1, 0, 1])
def test_contexts_at_page_and_step_edges(check, half, B, past):
    """Slots after the last key of a page are NaN, as where nothing was written."""
    lengths = [B + past, 128 + past, 3 * 128 + past, 128 + B + past]
    check([9, 100, 130, 40], lengths, 8, 2, 128, B, half)


@pytest.mark.parametrize("window", [1, 7, 64, 127, 128, 129, 500, 5000])
def test_windows(check, half, window):
    """Also smaller than a page, and than a tile's rows."""
    check([118, 257, 3, 1], [130, 1517, 1003, 2000], 8, 2, 128, 16, half, window)


def test_pages_before_the_window_are_not_read(problem, half):
    from qkernels.attention import sm90_prefill

    (q, k, v, tables, starts, lengths), _ = problem([64], [2000], 8, 2, 128, 16, half)
    shared = {"scale": 0.1, "window": 100, "max_query_len": 64, "max_context_len": 2000}
    want = run_attention(sm90_prefill, q, k, v, tables, starts, lengths, **shared)
    freed = tables[0, : (2000 - 64 - 100) // 16].long()
    k[freed], v[freed] = float("nan"), float("nan")
    tables[0, : len(freed)] = -7
    got = run_attention(sm90_prefill, q, k, v, tables, starts, lengths, **shared)
    assert torch.isfinite(got).all() and torch.equal(got, want)


@pytest.mark.parametrize("D", [16, 40, 64, 72, 80, 96])
def test_head_dims(check, D):
    check([118, 17], [130, 517], 8, 2, D, 16, torch.bfloat16)
    check([118, 17], [130, 517], 8, 2, D, 16, torch.bfloat16, interleaved=True)


@pytest.mark.parametrize("D", [136, 192, 256])
@pytest.mark.parametrize("B", [16, 32, 64])
def test_heads_of_more_than_128(check, half, D, B):
    """Steps of 64 keys, and one stage of queries: more tiles than SMs wait for it."""
    check([118, 17], [130, 517], 8, 2, D, B, half)
    check([118, 17], [130, 517], 8, 2, D, B, half, interleaved=True)
    check([9, 100, 130, 40], [63, 64 * 3, 65 * 2, 64 + B + 1], 4, 4, D, B, half)
    check([60] * 150, [60 + 11 * r for r in range(150)], 4, 2, D, B, half)


@pytest.mark.parametrize("window", [None, 1, 63, 64, 500])
@pytest.mark.parametrize("soft_cap", [None, 30.0])
@pytest.mark.parametrize("split", [1, 4])
def test_windows_and_soft_caps_of_wide_heads(check, window, soft_cap, split):
    counts, lengths = [118, 257, 3, 1], [130, 1517, 1003, 2000]
    check(counts, lengths, 8, 2, 256, 16, torch.bfloat16, window, soft_cap, split=split)


@pytest.mark.parametrize("H, J", [(2, 2), (12, 4), (14, 2), (8, 1), (24, 1), (130, 1)])
def test_query_heads_per_kv_head(check, H, J):
    """A tile of 128 rows may begin within a token; the last group is wider than a tile."""
    check([60, 1, 33], [300, 200, 33], H, J, 128, 16, torch.bfloat16)


@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
@pytest.mark.parametrize("window", [None, 90])
def test_soft_cap(check, soft_cap, window):
    check([118, 17], [130, 517], 8, 2, 128, 16, torch.bfloat16, window, soft_cap)


@pytest.mark.parametrize("split", [2, 8])
@pytest.mark.parametrize("window", [None, 300])
def test_splits_of_a_context_merge(check, split, window):
    """Contexts of one step to many: some parts are empty, some end before a row's last key."""
    bf16 = torch.bfloat16
    check([100, 1, 33, 40], [5000, 1, 33, 250], 8, 2, 128, 16, bf16, window, split=split)


def test_few_tiles_split_their_context(check):
    check([33], [20000], 8, 2, 128, 16, torch.float16)


def test_requests_without_rows_or_keys(check, half):
    """A captured graph's batch is padded with such requests."""
    for split in (1, 2):
        got = check([0, 200, 0, 1, 40, 0], [5, 300, 0, 0, 0, 9], 8, 2, 128, 16, half, split=split)
        assert not got[200:].any(), "rows that see nothing are zero"


def test_token_output_equal_alone_and_in_batch(check, half):
    alone = check([40], [500], 8, 2, 128, 16, half)
    assert torch.equal(alone, check([40], [500], 8, 2, 128, 16, half))


def test_scores_near_float32_limit(problem, half):
    """Each row's scores differ by thousands, so all its weight is on one key."""
    from qkernels.attention import sm90_prefill

    arguments, own = problem([200], [700], 8, 2, 128, 16, half)
    got = run_attention(
        sm90_prefill,
        *arguments,
        scale=100.0,
        window=None,
        max_query_len=200,
        max_context_len=700,
    )
    (k, v), q = own[0], arguments[0]
    want = exact(q, k, v, 700, 100.0, None, None)
    assert ((got.double() - want).norm() / want.norm()) < 5e-2


def test_captured_chunk_reads_new_inputs(problem, half):
    """Rows, lengths and tables change between replays; only the maxima are frozen."""
    small, _ = problem([1, 100, 99], [700, 600, 99], 8, 2, 128, 16, half, seed=1)
    large, _ = problem([150, 49, 1], [150, 2000, 1000], 8, 2, 128, 16, half, seed=2)
    shared = {"scale": 0.1, "window": None, "max_query_len": 200, "max_context_len": 2000}

    def padded(arguments):
        q, k, v, tables, starts, lengths = (t.clone() for t in arguments)
        wide = torch.full((3, 125), -7, dtype=torch.int32, device="cuda")
        wide[:, : tables.shape[1]] = tables
        pages = torch.full((400, *k.shape[1:]), float("nan"), dtype=half, device="cuda")
        k, v = (torch.cat([t, pages[len(t) :]]) for t in (k, v))
        return q, k, v, wide, starts, lengths

    frozen = padded(small)
    want = [run_attention(ops, *padded(case), **shared) for case in (small, large)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run_attention(ops, *frozen, **shared)
    for case, expected in zip((small, large, small), (*want, want[0]), strict=True):
        for place, tensor in zip(frozen, padded(case), strict=True):
            place.copy_(tensor)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.parametrize("first, last", [(1, 129), (0, 128)])
def test_queries_whose_rows_are_not_multiples_of_16_bytes(problem, half, first, last):
    from qkernels.attention import sm90_prefill

    (q, *rest), _ = problem([40, 1], [300, 99], 8, 2, 128, 16, half)
    wide = torch.zeros(41, 8, 131, dtype=half, device="cuda")
    wide[..., first:last] = q
    shared = {"scale": 0.1, "window": None, "max_query_len": 40, "max_context_len": 300}
    want = run_attention(sm90_prefill, q, *rest, **shared)
    got = run_attention(sm90_prefill, wide[..., first:last], *rest, **shared)
    assert torch.equal(got, want)


def test_dispatch_uses_sm90_for_chunks_only(problem, half, monkeypatch):
    taken = []
    implementation = dispatch.implementation

    def spy(op, **problem):
        taken.append(dispatch.choose(op, dispatch.Problem(**problem)).name)
        return implementation(op, **problem)

    monkeypatch.setattr(dispatch, "implementation", spy)
    arguments, own = problem([40, 1], [300, 99], 8, 2, 128, 16, half)
    shared = {"scale": 0.1, "window": None, "max_context_len": 300}
    got = run_attention(ops, *arguments, **shared, max_query_len=40)
    want = exact(arguments[0][:40], *own[0], 300, 0.1, None, None)
    assert ((got[:40].double() - want).norm() / want.norm()) < 5e-3
    q, k, v, *rest = arguments
    odd = torch.zeros(len(k), 16, 2, 132, dtype=half, device="cuda")[..., :128]  # 264 bytes a row
    run_attention(ops, q, odd, odd, *rest, **shared, max_query_len=40)
    decode, _ = problem([1, 1], [300, 99], 8, 2, 128, 16, half)
    run_attention(ops, *decode, **shared, max_query_len=1)
    assert taken == ["sm90_prefill", "triton", "triton"]


@pytest.mark.parametrize("changes", [{}, {"split": 4}, {"split": 1, "by_segment": True}], ids=str)
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("codes", [None, torch.int8, torch.float8_e4m3fn], ids=str)
def test_sinks(check, codes, window, changes):
    """gpt-oss: 8 heads of 64 of a KV head; also rows whose window is shorter than the context."""
    counts, lengths = [300, 1, 40], [300, 700, 1100]
    if codes is not None and "by_segment" in changes:
        pytest.skip("segments are of 16-bit pages")
    check(
        counts, lengths, 16, 2, 64, 16, torch.bfloat16, window, codes=codes, sinks=True, **changes
    )
