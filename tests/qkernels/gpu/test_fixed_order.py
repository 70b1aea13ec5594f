"""Kernels with a fixed order of sums: a row's bits do not depend on the other rows (sm_90)."""

import pytest
import torch

from formats.in_memory.weights import with_activation
from formats.scheme import Scheme
from qkernels import ops
from qkernels.attention.cache import AttentionStep, PagedKv
from qkernels.delta_net import reference as delta_reference
from qkernels.latent import reference as latent_reference
from qkernels.latent.fixed_order import triton_segments
from qkernels.linear.fixed_order import fixed_order_linear
from qkernels.linear.float_config import float_config
from qkernels.mamba1 import reference as mamba1_reference
from qkernels.mamba2 import reference as mamba_reference
from qkernels.moe.routing import SILU, Routing
from tests.qkernels.conv_case import ConvCase
from tests.qkernels.delta_net_case import DeltaCase
from tests.qkernels.latent_case import latent_case
from tests.qkernels.lora_case import adapted, lora_weights
from tests.qkernels.mamba1_case import ChannelCase
from tests.qkernels.mamba2_case import ScanCase
from tests.qkernels.moe_case import make_experts

pytestmark = pytest.mark.hopper
exhaustive = pytest.mark.exhaustive

ROWS = (1, 2, 5, 8, 9, 16, 17, 31, 32, 33, 64, 65, 100, 128, 129, 200, 257, 300, 600, 1100)
SHAPES = ((256, 128), (576, 1152), (4096, 4096), (6144, 4096), (1000, 512))


def random_x(M, K, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(M + K)
    return torch.randn(M, K, device="cuda", generator=generator).to(dtype)


def assert_rows_are_alone(run, x, numbers=ROWS):
    """Rows of `run`(x) equal those of any number of rows, in any order, and of itself again."""
    want = run(x)
    assert want.isfinite().all()
    order = torch.randperm(x.shape[0], generator=torch.Generator().manual_seed(1)).to(x.device)
    assert torch.equal(run(x[order]), want[order]), "in another order"
    for M in (M for M in numbers if x.shape[0] >= M):
        start = (7 * M) % (x.shape[0] - M + 1)
        rows = slice(start, start + M)
        assert torch.equal(run(x[rows].contiguous()), want[rows]), f"{M} rows"


def differs(run, x):
    """True if some row depends on the number of rows."""
    want = run(x)
    return any(not torch.equal(run(x[:M]), want[:M]) for M in ROWS if x.shape[0] >= M)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_weights(make_weight, tolerance, shape, bits, symmetric, bias):
    N, K = shape
    packed = make_weight(N, K, 128, symmetric, bits=bits)
    bias_N = torch.randn(N, device="cuda", dtype=torch.bfloat16) if bias else None
    weight = ops.prepare_weight(packed, torch.bfloat16, kernel="fixed_order")
    x = random_x(1100, K)
    assert_rows_are_alone(lambda x: ops.linear(x, weight, bias_N), x)
    want = x.double() @ packed.dequantize(torch.float64).t()
    want = want if bias_N is None else want + bias_N.double()
    got = ops.linear(x, weight, bias_N).double()
    assert float((got - want).norm() / want.norm()) < tolerance(torch.bfloat16)


@pytest.mark.parametrize("group", [32, 64])
def test_groups_of_the_portable_kernel(make_weight, group):
    packed = make_weight(512, 1024, group, True, bits=4)
    weight = ops.prepare_weight(packed, torch.float16, kernel="fixed_order")
    assert_rows_are_alone(lambda x: ops.linear(x, weight), random_x(1100, 1024, torch.float16))


def test_default_order_rows_differ(make_weight):
    weight = ops.prepare_weight(make_weight(4096, 4096, 128, True, bits=4), torch.bfloat16)
    assert differs(lambda x: ops.linear(x, weight), random_x(1100, 4096))


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (130, 70), (4096, 1544)], ids=str)
def test_float_weights(tolerance, shape, kind):
    weight_NK, bias_N = random_x(*shape, kind), random_x(1, shape[0], kind)[0]
    x = random_x(1100, shape[1], kind)
    assert_rows_are_alone(lambda x: fixed_order_linear(x, weight_NK, bias_N), x)
    want = x.double() @ weight_NK.double().t() + bias_N.double()
    got = fixed_order_linear(x, weight_NK, bias_N).double()
    assert float((got - want).norm() / want.norm()) < tolerance(kind)


def test_every_tile_of_float_weights_gives_the_same_bits():
    from qkernels.linear import triton_float

    x, weight_NK = random_x(300, 4096), random_x(512, 4096)
    want = triton_float.multiply(x, weight_NK)
    for M in (1, 16, 32, 64, 65, 100000):
        config = float_config(M, 512, 132)
        assert torch.equal(triton_float.multiply(x, weight_NK, config=config), want), config


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-fp8", "w8a8-fp8-block"])
def test_8bit_inputs(scheme, shape):
    from tests.qkernels.compile.cases.weights import weight_of

    scheme = Scheme.parse(scheme)
    N, K = shape
    if scheme.weight.rows > 1 and (N % 128 or K % 128):
        pytest.skip("blocks of 128")
    packed = weight_of(scheme, N, K)
    generator = torch.Generator("cuda").manual_seed(N)
    codes = torch.randint(0, 256, (N, K), device="cuda", generator=generator, dtype=torch.uint8)
    if scheme.weight.type == "float":
        codes = torch.where(codes & 0x7F == 0x7F, 0, codes)
        packed.codes_NK.copy_(codes.view(packed.codes_NK.dtype))
    else:
        packed.words_NW.copy_(codes.view(torch.int32))
    packed = with_activation(packed, scheme, None)
    weight = ops.prepare_weight(packed, torch.bfloat16, "cuda", kernel="fixed_order")
    x = random_x(1100, K)
    assert_rows_are_alone(lambda x: ops.linear(x, weight), x)


@pytest.mark.parametrize("num_slots", [3, 40])
@pytest.mark.parametrize(
    "K, sizes", [(4096, (4096, 1024, 1024)), (14336, (4096,)), (300, (70, 33))]
)
def test_adapters(K, sizes, num_slots, assert_close):
    ranks = [[16, 64, 5][: len(sizes)], [7, 0, 64][: len(sizes)], [33, 16, 1][: len(sizes)]]
    ranks += [[8] * len(sizes)] * (num_slots - 3)
    weights = lora_weights(ranks, K, sizes, torch.bfloat16, "cuda", max_rank=64)
    T = 3000
    slots_T = torch.arange(T, device="cuda", dtype=torch.int32) * 7 % (num_slots + 1) - 1
    x, y = random_x(T, K), random_x(T, sum(sizes))

    def run(rows):
        out = y[rows].clone()
        slots = slots_T[rows].contiguous()
        h = ops.lora_shrink(x[rows].contiguous(), slots, weights, "fixed_order")
        ops.lora_expand_(out, h, slots, weights, "fixed_order")
        return out

    assert_rows_are_alone(run, torch.arange(T, device="cuda"), ROWS + (2100,))
    some = slice(0, 200)
    want = adapted(x[some], y[some], slots_T[some].tolist(), weights)
    assert_close("y", want, run(torch.arange(200, device="cuda")), 2e-2)


def assert_cuts_are_one(run, case, states):
    """A request's rows whole, in pieces, and one by one: the same bits of results and of states."""
    want_states, total = states.clone(), case.counts[0]
    want = run(case, want_states)
    assert want.isfinite().all()
    for cuts in ((64, 1, 1, 130, 3), (1,) * 40, (200, 300)):
        own, start = states.clone(), 0
        for count in (*cuts, total - sum(cuts)):
            got = run(case.rows(start, count), own)
            assert torch.equal(got, want[start : start + count]), (cuts, start)
            start += count
        assert torch.equal(own[case.slots[0]], want_states[case.slots[0]]), cuts


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(16, 32, 128, 128), (2, 4, 64, 64), (4, 4, 256, 256)], ids=str)
def test_delta_nets(sizes, kind, tolerance):
    J, H, K, V = sizes
    case = DeltaCase(counts=(700,), before=(0,), J=J, H=H, K=K, V=V).to(kind, "cuda")

    def run(case, states):
        return ops.delta_rule_(*case.rule, states, case.step, kernel="fixed_order")

    assert_cuts_are_one(run, case, case.memory_PHKV)
    wide = case.to(torch.float64, "cuda")
    want = delta_reference.delta_rule_(*wide.rule, wide.memory_PHKV.clone(), wide.step)
    got = run(case, case.memory_PHKV.clone()).double()
    assert float((got - want).norm() / want.norm()) < tolerance(kind)


@pytest.mark.parametrize("sizes", [(1, 48, 128, 64), (8, 64, 256, 64), (2, 4, 16, 80)], ids=str)
def test_mamba(sizes, tolerance):
    G, H, N, D = sizes
    case = ScanCase.make((700,), (0,), G=G, H=H, N=N, D=D).to(torch.bfloat16, "cuda")

    def run(case, states):
        return case.run(ops.selective_scan_, states, kernel="fixed_order")

    assert_cuts_are_one(run, case, case.memory_PHND)
    wide = case.to(torch.float64, "cuda")
    want = wide.run(mamba_reference.selective_scan_, wide.memory_PHND.clone())
    got = run(case, case.memory_PHND.clone()).double()
    assert float((got - want).norm() / want.norm()) < tolerance(torch.bfloat16)


@pytest.mark.parametrize("kernel", ["triton", "fixed_order"])
@pytest.mark.parametrize("sizes", [(8192, 16), (1536, 16), (75, 5)], ids=str)
def test_mamba_1(sizes, kernel, tolerance):
    channels, N = sizes
    case = ChannelCase.make((700,), (0,), channels=channels, N=N).to(torch.bfloat16, "cuda")

    def run(case, states):
        return case.run(ops.channel_scan_, states, kernel=kernel)

    assert_cuts_are_one(run, case, case.memory_P1NI)
    wide = case.to(torch.float64, "cuda")
    want = wide.run(mamba1_reference.channel_scan_, wide.memory_P1NI.clone())
    got = run(case, case.memory_P1NI.clone()).double()
    assert float((got - want).norm() / want.norm()) < tolerance(torch.bfloat16)


@pytest.mark.parametrize("op", ["causal_conv_", "short_conv_"])
def test_convolutions(op):
    case = ConvCase.make(op, (700,), (0,), C=300, bias=True).to(torch.bfloat16, "cuda")
    assert_cuts_are_one(
        lambda case, states: case.run(getattr(ops, op), states, kernel="fixed_order"),
        case,
        case.conv_PCL,
    )


@pytest.mark.parametrize("codes", [None, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("H", [16, 20, 128])
def test_latent_attention(H, codes):
    """A prompt whole, in chunks, token by token, with others, in any number of programs."""
    sizes = {"H": H, "L": 512, "rope": 64, "B": 16, "codes": codes, "device": "cuda"}
    case = latent_case((700, 40), (700, 900), **sizes, dtype=torch.bfloat16)
    starts, settings = [0, 700], {"latent_width": 512, "scale": case.scale}

    def attend(parts, splits=None):
        """`parts`: (request, first row, rows)."""
        counts = torch.tensor([0, *(count for _, _, count in parts)], device="cuda")
        before = [case.lengths[r] - case.counts[r] + first for r, first, _ in parts]
        step = AttentionStep(
            block_tables_RX=case.step.block_tables_RX[[r for r, _, _ in parts]].contiguous(),
            query_starts_R1=counts.cumsum(0).int(),
            context_lengths_R=torch.tensor(
                [n + count for n, (_, _, count) in zip(before, parts, strict=True)],
                device="cuda",
                dtype=torch.int32,
            ),
            max_query_len=max(count for _, _, count in parts),
            max_context_len=900,
        )
        rows = [slice(starts[r] + first, starts[r] + first + n) for r, first, n in parts]
        q = torch.cat([case.q_THE[each] for each in rows])
        if splits is None:
            return ops.latent_attention(q, case.cache, step, **settings, kernel="fixed_order")
        return triton_segments.latent_attention(q, case.cache, step, **settings, splits=splits)

    want = attend([(0, 0, 700)])
    exact = latent_reference.latent_attention(
        case.q_THE.float(), case.cache, case.step, **settings
    )[:700]
    assert float((want.float() - exact).norm() / exact.norm()) < 2e-2
    for splits in (1, 2, 3):
        assert torch.equal(attend([(0, 0, 700)], splits), want), splits
    for size in (1, 2, 63, 64, 130, 333):
        for first in range(0, 700, size if size > 32 else 97):
            count = min(size, 700 - first)
            got = attend([(1, 0, 40), (0, first, count)])[40:]
            assert torch.equal(got, want[first : first + count]), (size, first)
    got = attend([(r % 2, 5 + r // 2, 1) for r in range(64)])
    for r in range(0, 64, 2):
        assert torch.equal(got[r], want[5 + r // 2]), r


@pytest.mark.parametrize("sizes", [(16, 128, 512), (128, 512, 128), (5, 96, 64)], ids=str)
def test_per_head_products(sizes):
    H, K, N = sizes
    x = random_x(1100 * H, K).view(1100, H, K)
    weight = random_x(H * K, N).view(H, K, N)
    assert_rows_are_alone(lambda x: ops.fixed_order_heads(x, weight), x)
    want = torch.einsum("thk,hkn->thn", x.double(), weight.double())
    got = ops.fixed_order_heads(x, weight).double()
    assert float((got - want).norm() / want.norm()) < 1e-2


PAGES = {
    "bfloat16": None,
    "int8": torch.int8,
    "float8": torch.float8_e4m3fn,
}


def filled_cache(codes, pages, J, D):
    generator = torch.Generator("cuda").manual_seed(D)
    k, v = torch.randn(2, pages * 16, J, D, device="cuda", generator=generator).bfloat16()
    scales = {}
    dtype = torch.bfloat16 if codes is None else codes
    if codes is not None:
        scales = {
            name: torch.zeros(pages, 16, J, device="cuda") for name in ("k_scales", "v_scales")
        }
    cache = PagedKv(
        k_pages=torch.zeros(pages, 16, J, D, device="cuda", dtype=dtype),
        v_pages=torch.zeros(pages, 16, J, D, device="cuda", dtype=dtype),
        **scales,
    )
    ops.write_kv_(k, v, cache, torch.arange(pages * 16, device="cuda"))
    return cache


@pytest.mark.parametrize("soft_cap", [None, 20.0], ids=["", "soft cap"])
@pytest.mark.parametrize("window", [None, 100], ids=["", "window"])
@pytest.mark.parametrize("heads", [(4, 1), (8, 2), (6, 6), (16, 2)], ids=str)
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("pages", PAGES)
def test_attention(pages, D, heads, window, soft_cap):
    """A prompt whole, in chunks of any size, token by token, with others: the same bits."""
    H, J = heads
    length = 700
    cache = filled_cache(PAGES[pages], 2 * 44, J, D)
    generator = torch.Generator("cuda").manual_seed(3)
    q = torch.randn(2, length, H, D, device="cuda", generator=generator).bfloat16()
    order = torch.randperm(88, device="cuda", generator=generator).int().view(2, 44)

    def attend(parts):
        """`parts`: (request, first row, rows)."""
        counts = torch.tensor([0, *(count for _, _, count in parts)], device="cuda")
        step = AttentionStep(
            block_tables_RX=order[[request for request, _, _ in parts]].contiguous(),
            query_starts_R1=counts.cumsum(0).int(),
            context_lengths_R=torch.tensor(
                [first + count for _, first, count in parts], device="cuda", dtype=torch.int32
            ),
            max_query_len=max(count for _, _, count in parts),
            max_context_len=704,
        )
        rows = torch.cat([q[r, first : first + count] for r, first, count in parts])
        out = ops.paged_attention(
            rows, cache, step, scale=D**-0.5, window=window, soft_cap=soft_cap, kernel="fixed_order"
        )
        return out.split([count for _, _, count in parts])

    (want,) = attend([(0, 0, length)])
    assert want.isfinite().all()
    for size in (1, 3, 64, 130, 333):
        for first in range(0, length, size if size > 32 else 97):
            count = min(size, length - first)
            got, _ = attend([(0, first, count), (1, 5, 40)])
            assert torch.equal(got, want[first : first + count]), (size, first)
    decodes = [(row % 2, 600 + row, 1) for row in range(64)]
    for (request, row, _), got in zip(decodes, attend(decodes), strict=True):
        if request == 0:
            assert torch.equal(got, want[row : row + 1]), row


@pytest.mark.parametrize("options", [{}, {"window": 300}, {"soft_cap": 20.0}], ids=str)
@pytest.mark.parametrize("pages", PAGES)
@pytest.mark.parametrize("D, heads", [(64, (8, 2)), (80, (7, 1)), (128, (16, 2)), (256, (4, 2))])
def test_portable_kernel_tiles_and_programs_do_not_change_bits(D, heads, pages, options):
    """Segments by one program or several, in tiles of 16 and 32 rows: the same bits."""
    from qkernels.attention.fixed_order import triton_segments
    from qkernels.attention.fixed_order.config import tile_config

    (H, J), length = heads, 700
    cache = filled_cache(PAGES[pages], 44, J, D)
    generator = torch.Generator("cuda").manual_seed(D)
    q = torch.randn(length, H, D, device="cuda", generator=generator).bfloat16()
    step = AttentionStep(
        block_tables_RX=torch.randperm(44, device="cuda", generator=generator).int()[None],
        query_starts_R1=torch.tensor([0, length], device="cuda", dtype=torch.int32),
        context_lengths_R=torch.tensor([length], device="cuda", dtype=torch.int32),
        max_query_len=length,
        max_context_len=704,
    )
    settings = {"scale": D**-0.5, "window": None, **options}
    want = triton_segments.paged_attention(q, cache, step, **settings, splits=1)
    assert want.isfinite().all()
    sizes = {"heads_per_kv_head": H // J, "head_dim": D, "element_size": 2}
    for count in (700, 1):
        config = tile_config(**sizes, max_query_len=count)
        for splits in (1, 2, 6):
            got = triton_segments.paged_attention(
                q, cache, step, **settings, config=config, splits=splits
            )
            assert torch.equal(got, want), (config, splits)


@pytest.mark.parametrize("soft_cap", [None, 20.0], ids=["", "soft cap"])
@pytest.mark.parametrize("window", [None, 300], ids=["", "window"])
@pytest.mark.parametrize("D", [64, 80, 128])
@pytest.mark.parametrize("group, sinks", [(1, False), (4, False), (7, True), (16, False)])
def test_number_of_programs_does_not_change_bits(group, sinks, D, window, soft_cap):
    """One program or several a row, and the kernel for prompts: the same bits, near float64's."""
    from qkernels.attention import reference, sm90_prefill
    from qkernels.attention.fixed_order import sm90_segments

    J, lengths, count = 2, [1, 2, 127, 128, 129, 700, 1000], 3
    counts = [min(count, length) for length in lengths]
    cache = filled_cache(None, 7 * 63 + 1, J, D)
    cache.k_pages[-1], cache.v_pages[-1] = float("nan"), float("nan")
    generator = torch.Generator("cuda").manual_seed(group)
    tables = torch.full((7, 80), 7 * 63, device="cuda", dtype=torch.int32)  # a page of NaN
    order = torch.randperm(7 * 63, device="cuda", generator=generator).int().view(7, 63)
    for row, length in zip(range(7), lengths, strict=True):
        tables[row, : -(-length // 16)] = order[row, : -(-length // 16)]
        cache.v_pages[order[row, (length - 1) // 16], (length - 1) % 16 + 1 :] = float("nan")
    q = torch.randn(sum(counts), group * J, D, device="cuda", generator=generator).bfloat16()
    step = AttentionStep(
        block_tables_RX=tables,
        query_starts_R1=torch.tensor([0, *counts], device="cuda").cumsum(0).int(),
        context_lengths_R=torch.tensor(lengths, device="cuda", dtype=torch.int32),
        max_query_len=count,
        max_context_len=1280,
    )
    settings = {"scale": D**-0.5, "window": window, "soft_cap": soft_cap}
    if sinks:
        settings["sinks_H"] = torch.linspace(-3, 9, group * J, device="cuda")
    want = sm90_prefill.paged_attention(q, cache, step, **settings, split=1, by_segment=True)
    for splits in (1, 2, 3, 10):
        got = sm90_segments.paged_attention(q, cache, step, **settings, splits=splits)
        assert torch.equal(got, want), splits
    cache.v_pages.nan_to_num_(0.0)
    exact = reference.paged_attention(q.float(), _as_float(cache), step, **settings)
    torch.testing.assert_close(want.float(), exact, rtol=2e-2, atol=2e-2)


def _as_float(cache: PagedKv) -> PagedKv:
    return PagedKv(k_pages=cache.k_pages.nan_to_num(0.0).float(), v_pages=cache.v_pages.float())


@pytest.mark.parametrize("sizes", [(512, 256, 16, 4), (2048, 768, 64, 8)], ids=str)
@pytest.mark.parametrize(
    "scheme",
    [
        *(None, "w4a16-sym", "w4a16-asym", "w8a16-sym", "w8a8", "w8a8-fp8", "w8a8-fp8-block"),
        *("w4a16-sym-g64", "w4a16-asym-g32", "w4a16-mxfp4", "w4a16-nvfp4"),
    ],
)
def test_experts(scheme, sizes):
    hidden, inner, E, k = sizes
    parsed = None if scheme is None else Scheme.parse(scheme)
    weights = make_experts(parsed, hidden, inner, E, k, SILU, False, torch.bfloat16)
    prepared = ops.prepare_experts(weights, torch.bfloat16, "cuda", kernel="fixed_order")
    routing = Routing(num_experts=E, top_k=k)
    router_EC = random_x(E, hidden)

    def run(x):
        routes = ops.route_tokens(x, router_EC, routing, fixed_order=True)
        return ops.experts(x, routes, prepared)

    assert_rows_are_alone(run, random_x(1100, hidden))


@pytest.mark.parametrize("of_router", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "softmax_of_chosen"])
def test_routes(scores, of_router):
    routing = Routing(num_experts=128, top_k=8, scores=scores, normalized=True)
    router_EC = random_x(128, 2048).to(of_router)
    x = random_x(5000, 2048)

    def shares(x):
        return ops.route_tokens(x, router_EC, routing, fixed_order=True).weights_Mk

    assert_rows_are_alone(shares, x)
    assert_rows_are_alone(
        lambda x: ops.route_tokens(x, router_EC, routing, fixed_order=True).ids_Mk, x
    )
    exact = ops.route_tokens(x.float().cpu(), router_EC.float().cpu(), routing)
    torch.testing.assert_close(
        shares(x).sum(-1).cpu(), exact.weights_Mk.sum(-1), rtol=1e-2, atol=1e-2
    )
