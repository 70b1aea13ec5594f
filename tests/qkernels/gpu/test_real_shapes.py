"""Tests that need a GPU: real shapes, CUDA graphs, consecutive launches."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from formats.in_memory.packed import PackedWeight
from formats.in_memory.weights import round_to_nearest, with_activation
from formats.numerics.activation import quantize_input
from formats.scheme import ActivationSpec, QuantSpec, Scheme
from qkernels import QuantLinear, ops, reference
from qkernels.attention import reference as attention_reference
from qkernels.gpu.workspace import workspace
from qkernels.wna16.triton_config import MAX_FUSED_ROWS
from tests.qkernels.flat_attention import paged_kv, run_attention

w4a16 = pytest.importorskip("qkernels.wna16.gemm", exc_type=ImportError)

pytestmark = pytest.mark.gpu

LLAMA_3_8B = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
}


def random_weight(N, K, symmetric=True, group=128):
    spec = QuantSpec(bits=4, symmetric=symmetric, group_size=group)
    generator = torch.Generator("cuda").manual_seed(N + K)
    G = spec.num_groups(K)
    words = torch.randint(
        -(2**31), 2**31, (N, K // 8), dtype=torch.int32, device="cuda", generator=generator
    )
    scales = (torch.rand(N, G, device="cuda", generator=generator) + 0.5) / 512
    zeros = torch.full((N, G), 8, dtype=torch.uint8, device="cuda")
    if not symmetric:
        zeros.random_(0, 16, generator=generator)
    return PackedWeight(
        words_NW=words, scales_NG=scales.half(), zeros_NG=zeros, spec=spec, in_features=K
    )


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("shape", LLAMA_3_8B)
def test_llama_shapes(assert_close, tolerance, poison, half, shape, symmetric):
    N, K = LLAMA_3_8B[shape]
    packed = random_weight(N, K, symmetric)
    weight = ops.prepare_weight(packed, half)
    assert weight.kernel == "w4a16"
    weight_NK = packed.dequantize(torch.float64)
    for M in (1, 16, 17, 64, 129, 257, MAX_FUSED_ROWS + 1):
        x = torch.randn(M, K, device="cuda").to(half)
        got = ops.linear(x, weight)
        want = x.double() @ weight_NK.t()
        assert_close(f"{shape} M={M}", want, got, tolerance(half))
        assert torch.equal(got, ops.linear(x, weight)), "equal inputs, equal bits"
    assert not workspace(torch.device("cuda", 0))[1].any()


@pytest.mark.parametrize("M", [1, 16, 64, 200, MAX_FUSED_ROWS + 1])
def test_linear_in_a_cuda_graph(half, M):
    """Replayed with new inputs, split parts and counters must start afresh."""
    layer = QuantLinear.from_packed(random_weight(4096, 4096)).prepare(half, "cuda")
    x = torch.randn(M, 4096, device="cuda").to(half)
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(layer(x))
    for _ in range(3):
        x.normal_()
        graph.replay()
        if M <= MAX_FUSED_ROWS:
            assert torch.equal(y, layer(layer(x)))
        else:  # the library may choose another algorithm inside a graph
            torch.testing.assert_close(y, layer(layer(x)), rtol=1e-2, atol=1e-2)


def test_different_shapes_share_workspace(half):
    weights = [ops.prepare_weight(random_weight(*shape), half) for shape in LLAMA_3_8B.values()]
    x = [torch.randn(3, weight.in_features, device="cuda").to(half) for weight in weights]
    alone = []
    for row, weight in zip(x, weights, strict=True):
        alone.append(ops.linear(row, weight))
        torch.cuda.synchronize()
    for _ in range(20):
        together = [ops.linear(row, weight) for row, weight in zip(x, weights, strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_release_frees_memory():
    layer = QuantLinear.from_packed(random_weight(4096, 4096))
    x = torch.randn(2, 4096, device="cuda", dtype=torch.bfloat16)
    want = layer(x)
    layer.prepare(torch.bfloat16, release=True)
    assert torch.equal(layer(x), want)
    assert layer.extra_repr().endswith("kernel=w4a16")


@pytest.mark.parametrize("shape", LLAMA_3_8B)
@pytest.mark.parametrize("name", ["w8a8", "w8a8-fp8", "w8a16-sym", "w8a16-asym-g32"])
def test_llama_shapes_in_8_bits(assert_close, tolerance, poison, half, shape, name):
    N, K = LLAMA_3_8B[shape]
    scheme = Scheme.parse(name)
    generator = torch.Generator("cuda").manual_seed(N)
    weight_NK = torch.randn(N, K, device="cuda", generator=generator)
    packed = with_activation(round_to_nearest(weight_NK, scheme.weight), scheme, None)
    weight = ops.prepare_weight(packed, half)
    rows = ("sm90_w8a8", "triton_w8a8") if scheme.activation else ("w8a16",)
    assert weight.kernel in rows
    dense_NK = packed.dequantize(torch.float64)
    for M in (1, 16, 17, 64, 129, 257, 600, MAX_FUSED_ROWS + 1):
        x = torch.randn(M, K, device="cuda").to(half)
        got = ops.linear(x, weight)
        want = x.double()
        if scheme.activation:
            codes, scales = ops.quantize_input(x, scheme.activation)
            want = codes.double() * scales.double()
        assert_close(f"{name} {shape} M={M}", want @ dense_NK.t(), got, tolerance(half))
        assert torch.equal(got, ops.linear(x, weight)), "equal inputs, equal bits"
    assert not workspace(torch.device("cuda", 0))[1].any()


@pytest.mark.parametrize("M", [1, 64, 600])
@pytest.mark.parametrize("name", ["w8a8", "w8a8-fp8", "w8a16-sym"])
def test_8_bit_products_in_a_cuda_graph(half, name, M):
    """Products that follow each other, each started before the one before it has ended."""
    scheme = Scheme.parse(name)
    packed = with_activation(
        round_to_nearest(torch.randn(4096, 4096, device="cuda"), scheme.weight), scheme, None
    )
    weight = ops.prepare_weight(packed, half)
    x = torch.randn(M, 4096, device="cuda").to(half)

    def three():
        y = x
        for _ in range(3):
            y = ops.linear(y, weight) / 64
        return y

    three()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = three()
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(y, three())


@pytest.mark.parametrize("bits", [4, 8])
def test_fallback_keeps_the_weight_packed(assert_close, bits):
    spec = QuantSpec(bits=bits, symmetric=True, group_size=16)
    packed = PackedWeight.from_float(torch.randn(64, 64, device="cuda"), spec)
    weight = ops.prepare_weight(packed, torch.bfloat16)
    assert weight.kernel == "reference"
    x = torch.randn(3, 64, device="cuda", dtype=torch.bfloat16)
    want = x.double() @ packed.dequantize(torch.float64).t()
    assert_close("fallback", want, ops.linear(x, weight), 1e-2)


def attention_inputs(counts, lengths, H, J, D, B, dtype):
    R, X = len(counts), -(-max(lengths) // B)
    pages = torch.randn(R * X, B, 2, J, D, device="cuda").to(dtype)
    tables = torch.randperm(R * X, device="cuda").view(R, X).int()
    starts = torch.tensor([0, *counts], device="cuda").cumsum(0).int()
    q = torch.randn(sum(counts), H, D, device="cuda").to(dtype)
    return (q, *pages.unbind(2), tables, starts, torch.tensor(lengths, device="cuda").int())


@pytest.mark.parametrize("window", [None, 1024])
@pytest.mark.parametrize(
    "counts, lengths",
    [
        ([1], [8192]),
        ([1] * 64, [1 + 61 * r for r in range(64)]),
        ([512, 1, 1, 300], [512, 4000, 33, 2048]),
    ],
    ids=["one long", "64 decodes", "mixed"],
)
@pytest.mark.parametrize("H, J, D", [(32, 8, 128), (28, 4, 128), (16, 2, 256), (8, 8, 64)])
def test_attention_shapes(assert_close, tolerance, dtype, poison, H, J, D, counts, lengths, window):
    inputs = attention_inputs(counts, lengths, H, J, D, 16, dtype)
    shared = {
        "scale": D**-0.5,
        "window": window,
        "max_query_len": max(counts),
        "max_context_len": max(lengths),
    }
    got = run_attention(ops, *inputs, **shared)
    exact = [t.float() if t.is_floating_point() else t for t in inputs]
    # the other backends may round float32 to tf32
    with sdpa_kernel(SDPBackend.MATH):
        want = run_attention(attention_reference, *exact, **shared)
    assert_close("attention", want, got, tolerance(dtype))


@pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn], ids=["int8", "float8"])
@pytest.mark.parametrize("window, soft_cap", [(None, None), (1000, None), (None, 30.0)])
@pytest.mark.parametrize(
    "counts, lengths",
    [
        ([1], [8192]),
        ([1] * 100, [1 + 29 * r for r in range(100)]),
        ([4] * 20, [4 + 61 * r for r in range(20)]),
        ([512, 1, 0, 1, 300], [512, 4000, 0, 33, 2048]),
    ],
    ids=["one long", "100 decodes", "verify", "mixed"],
)
@pytest.mark.parametrize("H, J, D, B", [(32, 8, 128, 16), (28, 4, 128, 128), (8, 8, 64, 32)])
def test_attention_shapes_in_8_bits(
    assert_close, tolerance, dtype, poison, H, J, D, B, counts, lengths, window, soft_cap, codes
):
    """Pages past each context hold NaN codes or NaN scales, and differ in scale."""
    q, k, v, tables, starts, lengths_R = attention_inputs(counts, lengths, H, J, D, B, dtype)
    pages = [(x.float() * 30).to(codes) for x in (k, v)]
    P = k.shape[0]
    scales = [torch.rand(P, J, B, device="cuda").transpose(1, 2) / 30 + 0.01 for _ in range(2)]
    for r, length in enumerate(lengths):  # what no request has written
        page, used = tables[r, length // B - (length == tables.shape[1] * B)].long(), length % B
        if length < tables.shape[1] * B:
            for x in pages:
                x.view(torch.uint8)[page, used:] = 0x7F
            for x in scales:
                x[page, used:] = float("nan")
    shared = {
        "scale": D**-0.5,
        "window": window,
        "soft_cap": soft_cap,
        "k_scales": scales[0],
        "v_scales": scales[1],
        "max_query_len": max(counts),
        "max_context_len": max(lengths),
    }
    inputs = (*pages, tables, starts, lengths_R)
    got = run_attention(ops, q, *inputs, **shared)
    with sdpa_kernel(SDPBackend.MATH):
        want = run_attention(attention_reference, q.float(), *inputs, **shared)
    assert_close("attention", want, got, tolerance(dtype) + (5e-6 if soft_cap else 0))
    assert torch.equal(got, run_attention(ops, q, *inputs, **shared)), "equal inputs, equal bits"


@pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn], ids=["int8", "float8"])
@pytest.mark.parametrize("static", [False, True])
def test_captured_decode_step_with_8_bit_cache(half, codes, static):
    """Rows written in a graph, with scales of their own or one for all, are read in it."""
    R, H, J, D, B, X = 8, 8, 2, 64, 16, 64
    pages = [torch.zeros(R * X, B, J, D, device="cuda").to(codes) for _ in range(2)]
    scales = [torch.zeros(R * X, J, B, device="cuda").transpose(1, 2) for _ in range(2)]
    if static:
        scales = [torch.tensor(0.04, device="cuda").expand(R * X, B, J) for _ in range(2)]
    tables = torch.randperm(R * X, device="cuda").view(R, X).int()
    starts = torch.arange(R + 1, device="cuda").int()
    lengths = torch.ones(R, device="cuda", dtype=torch.int32)
    positions, slots = (torch.zeros(R, device="cuda", dtype=torch.int64) for _ in range(2))
    angle = torch.rand(B * X, D // 2, device="cuda") * 6
    cos_sin = torch.cat([angle.cos(), angle.sin()], dim=1)
    x = torch.randn(R, (H + 2 * J) * D, device="cuda", dtype=half)

    def step(module, pages, scales):
        q, k, v = x.view(R, -1, D).split([H, J, J], dim=1)
        cache = paged_kv(*pages, *scales, static_scales=static)
        q = module.rope_write_kv_(q, k, v, cos_sin, positions, cache, slots)
        return run_attention(
            module,
            q,
            *pages,
            tables,
            starts,
            lengths,
            scale=D**-0.5,
            window=None,
            max_query_len=1,
            max_context_len=B * X,
            k_scales=scales[0],
            v_scales=scales[1],
        )

    step(ops, pages, scales)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(ops, pages, scales)
    twin_pages = [p.clone() for p in pages]
    twin_scales = scales if static else [s.clone() for s in scales]
    for length in (1, 2, 3, 17):
        x.normal_()
        lengths.copy_(torch.arange(length, length + R))
        positions.copy_(lengths - 1)
        slots.copy_(tables.gather(1, (positions // B)[:, None])[:, 0] * B + positions % B)
        graph.replay()
        want = step(reference, twin_pages, twin_scales)
        torch.testing.assert_close(out, want, rtol=4e-2, atol=4e-2)
        assert out[0].any()


def test_captured_decode_step_reads_new_inputs(half):
    """Lengths, tables and slots change between replays; only the maxima are frozen."""
    R, H, J, D, B, X = 8, 8, 2, 64, 16, 64
    pages = torch.zeros(R * X, 2, B, J, D, device="cuda", dtype=half)
    k_pages, v_pages = pages.unbind(1)
    tables = torch.arange(R * X, device="cuda").view(R, X).int()
    starts = torch.arange(R + 1, device="cuda").int()
    lengths = torch.ones(R, device="cuda", dtype=torch.int32)
    positions, slots = (torch.zeros(R, device="cuda", dtype=torch.int64) for _ in range(2))
    angle = torch.rand(B * X, D // 2, device="cuda") * 6
    cos_sin = torch.cat([angle.cos(), angle.sin()], dim=1)
    x = torch.randn(R, (H + 2 * J) * D, device="cuda", dtype=half)
    spec = ops.NormSpec(weight_C=torch.ones(D, device="cuda", dtype=half), eps=1e-5)

    def step(module):
        q, k, v = x.view(R, -1, D).split([H, J, J], dim=1)
        q, k = module.norm(q, None, spec)[0], module.norm(k, None, spec)[0]
        q, k = module.apply_rope(q, k, cos_sin, positions)
        module.write_kv_(k, v, paged_kv(k_pages, v_pages), slots)
        out = run_attention(
            module,
            q,
            k_pages,
            v_pages,
            tables,
            starts,
            lengths,
            scale=D**-0.5,
            window=None,
            max_query_len=1,
            max_context_len=B * X,
        )
        return module.activate(out.flatten(1), ops.ActSpec(kind="silu"))

    step(ops)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(ops)
    pages.zero_()
    for length in (1, 17, 40, 900):
        x.normal_()
        pages.normal_()
        lengths.copy_(torch.arange(length, length + R))
        positions.copy_(lengths - 1)
        slots.copy_(tables.gather(1, (positions // B)[:, None])[:, 0] * B + positions % B)
        slots[3] = -1
        graph.replay()
        got, saved = out.clone(), pages.clone()
        want = step(reference)
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(saved, pages, rtol=2e-2, atol=2e-2)


def test_rounding_of_every_mantissa_under_every_maximum(half):
    """Each row has another largest mantissa, and every number that such a row may contain."""
    count = 128 if half == torch.bfloat16 else 1024
    mantissas = 1 + torch.arange(count) / count
    x = (mantissas * 2.0 ** torch.arange(-12, 1)[:, None]).flatten()
    largest = mantissas[:, None]
    x_MK = torch.where(x <= largest, x, 0)
    x_MK = torch.cat([x_MK, -x_MK, largest], 1).to(half)
    got = ops.quantize_input(x_MK.cuda(), ActivationSpec(), kernel="triton")
    want = quantize_input(x_MK, ActivationSpec(), None)
    assert torch.equal(got[0].cpu(), want[0]) and torch.equal(got[1].cpu(), want[1])
