"""The torch twins against float64, and against transformers where they copy its arithmetic."""

import pytest
import torch

from formats.in_memory.packed import PackedWeight
from formats.scheme import QuantSpec
from qkernels import ops
from qkernels.attention import reference as attention_reference
from qkernels.errors import KernelError
from qkernels.linear import dense
from qkernels.linear import reference as linear_reference
from qkernels.rowwise import reference as rowwise_reference
from qkernels.rowwise.spec import ActSpec, NormSpec
from tests.qkernels.flat_attention import paged_kv, run_attention

HALF = torch.bfloat16
ACTIVATIONS = {  # transformers' name -> ours
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_linear_equals_float64(assert_close, bits, symmetric):
    spec = QuantSpec(bits=bits, symmetric=symmetric, group_size=32)
    packed = PackedWeight.from_float(randn(64, 96), spec)
    x, bias = randn(2, 3, 96, seed=1), randn(64)
    want = x.double() @ packed.dequantize(torch.float64).t() + bias.double()
    for module in (linear_reference, dense):
        weight = module.prepare_weight(packed, torch.float32)
        assert_close(module.__name__, want, ops.linear(x, weight, bias), 1e-6)


def test_rms_norm_rounding_equals_transformers():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    norm = llama.LlamaRMSNorm(96, eps=1e-5).to(HALF)
    norm.weight.data = randn(96, dtype=HALF)
    x, residual = randn(5, 96, dtype=HALF), randn(5, 96, dtype=HALF, seed=1)
    spec = NormSpec(weight_C=norm.weight, eps=1e-5)
    assert torch.equal(rowwise_reference.norm(x, None, spec)[0], norm(x))
    got, total = rowwise_reference.norm(x, residual, spec)
    assert torch.equal(total, x + residual)
    assert torch.equal(got, norm(x + residual))


def test_layer_norm_rounding_equals_transformers():
    cohere = pytest.importorskip("transformers.models.cohere.modeling_cohere")
    norm = cohere.CohereLayerNorm(96, eps=1e-5).to(HALF)
    norm.weight.data = randn(96, dtype=HALF)
    x, residual = 3 * randn(5, 96, dtype=HALF) + 2, randn(5, 96, dtype=HALF, seed=1)
    spec = NormSpec(kind="layer", weight_C=norm.weight, eps=1e-5)
    assert torch.equal(rowwise_reference.norm(x, None, spec)[0], norm(x))
    got, total = rowwise_reference.norm(x, residual, spec)
    assert torch.equal(total, x + residual) and torch.equal(got, norm(x + residual))


def test_layer_norm_with_bias_equals_torch():
    norm = torch.nn.LayerNorm(96).to(HALF)
    norm.weight.data, norm.bias.data = randn(96, dtype=HALF), randn(96, dtype=HALF, seed=2)
    x = 3 * randn(50, 96, dtype=HALF) + 2
    spec = NormSpec(kind="layer", weight_C=norm.weight, bias_C=norm.bias, eps=norm.eps)
    got, want = rowwise_reference.norm(x, None, spec)[0].float(), norm(x).float()
    # torch computes a shift of x first: a last bit in few places
    assert (got != want).float().mean() < 0.01
    assert (got - want).abs().max() <= torch.finfo(HALF).eps * want.abs().max()


def test_rms_norm(assert_close):
    x, weight = randn(5, 3, 40), randn(40, seed=1)
    x64 = x.double()
    want = x64 / (x64.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
    got, _ = rowwise_reference.norm(x, None, NormSpec(weight_C=weight, eps=1e-3))
    assert_close("rms norm", want, got, 1e-6)


@pytest.mark.parametrize("gated", [True, False])
def test_activations_equal_transformers(assert_close, gated):
    activations = pytest.importorskip("transformers.activations").ACT2FN
    x = randn(7, 40) * 4
    for name, kind in ACTIVATIONS.items():
        gate, up = (x[:, :20], x[:, 20:]) if gated else (x, 1)
        want = activations[name](gate.double()) * up
        got = rowwise_reference.activate(x, ActSpec(kind=kind, gated=gated))
        assert_close(name, want, got, 1e-6)


@pytest.mark.parametrize("limit", [0.0, -1.0, float("inf"), float("nan")])
def test_invalid_activation_limit_is_refused(limit):
    with pytest.raises(KernelError, match="activate limit: expected a number above 0"):
        ops.activate(randn(2, 8), ActSpec(kind="silu", limit=limit))


def test_rope_equals_transformers():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    q, k = randn(6, 4, 32), randn(6, 2, 32, seed=1)
    positions = torch.tensor([3, 0, 11, 11, 5, 19])
    angle = torch.arange(20)[:, None] / 10 ** torch.linspace(0, 4, 16)
    cos_sin = torch.cat([angle.cos(), angle.sin()], dim=1)
    cos, sin = (table[positions].repeat(1, 2)[None] for table in (angle.cos(), angle.sin()))
    want = llama.apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    got = attention_reference.apply_rope(q, k, cos_sin, positions)
    for a, b in zip(want, got, strict=True):
        assert torch.equal(a[0].transpose(0, 1), b)


def test_partial_rope_keeps_other_channels():
    q, k = randn(3, 2, 24), randn(3, 1, 24, seed=1)
    angle = torch.rand(5, 4)
    cos_sin = torch.cat([angle.cos(), angle.sin()], dim=1)
    positions = torch.tensor([0, 4, 2])
    got = attention_reference.apply_rope(q, k, cos_sin, positions)
    want = attention_reference.apply_rope(q[..., :8], k[..., :8], cos_sin, positions)
    for a, x, b in zip(want, (q, k), got, strict=True):
        assert torch.equal(b[..., :8], a)
        assert torch.equal(b[..., 8:], x[..., 8:])


@pytest.mark.parametrize("slots", [[5, -1, 0, -1, 31], [-1, -1, -1, -1, -1], [-1, 0, 1, 2, -1]])
def test_padding_tokens_are_not_written(slots):
    k, v = randn(5, 2, 8), randn(5, 2, 8, seed=1)
    pages = randn(2, 2, 16, 2, 8, seed=2)
    want = pages.clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            want[slot // 16, 0, slot % 16], want[slot // 16, 1, slot % 16] = k[token], v[token]
    # pages inside a larger tensor: not one flat run of slots
    attention_reference.write_kv_(k, v, paged_kv(*pages.unbind(1)), torch.tensor(slots))
    assert torch.equal(pages, want)


def attention_case(counts, lengths, H, J, D, B, seed=0):
    """Pages with NaN wherever no request has a key; the last entries of block tables are stale."""
    R, X = len(counts), max(1, -(-max(lengths) // B))
    generator = torch.Generator().manual_seed(seed)
    tables = torch.randperm(R * X + 1, generator=generator)[: R * X].view(R, X).int()
    pages = torch.full((R * X + 1, B, 2, J, D), float("nan"))
    kv = [torch.randn(length, 2, J, D, generator=generator) for length in lengths]
    for r, length in enumerate(lengths):
        t = torch.arange(length)
        pages[tables[r, t // B].long(), t % B] = kv[r]
        tables[r, -(-length // B) :] = -7
    q = torch.randn(sum(counts), H, D, generator=generator)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    inputs = (q, *pages.unbind(2), tables, starts, torch.tensor(lengths).int())
    return kv, inputs


def exact(kv, q, count, length, window):
    out = torch.zeros(q.shape, dtype=torch.float64)
    for i in range(count):
        last = length - count + i + 1
        first = 0 if window is None else max(0, last - window)
        for head in range(q.shape[1]):
            keys, values = kv[first:last, :, head // (q.shape[1] // kv.shape[2])].double().unbind(1)
            if last > 0:
                weights = (keys @ q[i, head].double() * q.shape[2] ** -0.5).softmax(0)
                out[i, head] = weights @ values
    return out


@pytest.mark.parametrize("window", [None, 1, 6, 17])
@pytest.mark.parametrize(
    "counts, lengths",
    [
        ([1, 1, 1, 1], [1, 40, 16, 17]),
        ([5, 40, 1, 2], [5, 40, 9, 33]),
        ([0, 1, 3, 1], [7, 0, 3, 20]),
        ([4], [2]),
    ],
    ids=["decodes", "chunks", "padding", "rows before the context"],
)
def test_paged_attention(assert_close, monkeypatch, counts, lengths, window):
    # a few keys at a time, so that several batches of decodes are needed
    monkeypatch.setattr(attention_reference, "GATHER_ELEMENTS", 2 * 8 * 45)
    kv, inputs = attention_case(counts, lengths, 4, 2, 8, 16)
    q, starts = inputs[0], inputs[4].tolist()
    got = run_attention(
        attention_reference,
        *inputs,
        scale=8**-0.5,
        window=window,
        max_query_len=max(counts),
        max_context_len=max(1, *lengths),
    )
    want = [
        exact(kv[r], q[starts[r] : starts[r + 1]], counts[r], lengths[r], window)
        for r in range(len(counts))
    ]
    assert_close("paged_attention", torch.cat(want), got, 1e-6)


def test_paged_attention_in_16_bits_computes_in_float32(assert_close):
    kv, inputs = attention_case([1, 7], [30, 20], 2, 1, 8, 16)
    shared = {"scale": 0.3, "window": None, "max_query_len": 7, "max_context_len": 30}
    half = [t.to(HALF) if t.is_floating_point() else t for t in inputs]
    got = run_attention(attention_reference, *half, **shared)
    want = run_attention(
        attention_reference,
        *(t.float() if t.is_floating_point() else t for t in half),
        **shared,
    )
    assert torch.equal(got, want.to(HALF))


@pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("counts", [[1, 1], [7, 3]], ids=["decodes", "chunks"])
def test_paged_attention_with_codes(assert_close, codes, soft_cap, counts):
    """Codes written by write_kv_ give what their products with the scales give."""
    (keys, values), lengths = randn(2, 40, 2, 16) * 3, [40, 23]
    pages = [torch.zeros(4, 16, 2, 16).to(codes) for _ in range(2)]
    scales = [torch.full((4, 16, 2), float("nan")) for _ in range(2)]
    tables = torch.tensor([[3, 1, 0]] * 2, dtype=torch.int32)
    slots = tables[0].long().repeat_interleave(16)[:40] * 16 + torch.arange(40) % 16
    attention_reference.write_kv_(keys, values, paged_kv(*pages, *scales), slots)
    restored = [
        (p.float() * s[..., None]).flatten(0, 1)[slots] for p, s in zip(pages, scales, strict=True)
    ]
    largest = 127 if codes is torch.int8 else 448
    assert_close("scales", keys.abs().amax(-1) / largest, scales[0].flatten(0, 1)[slots], 1e-6)
    step = 0.51 / 127 if codes is torch.int8 else 0.51 / 14
    for x, y in zip((keys, values), restored, strict=True):
        assert ((x - y).abs() <= step * x.abs().amax(-1, keepdim=True)).all()
    q = randn(sum(counts), 4, 16, seed=2)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    got = run_attention(
        attention_reference,
        q,
        *pages,
        tables,
        starts,
        torch.tensor(lengths).int(),
        scale=0.25,
        window=None,
        max_query_len=max(counts),
        max_context_len=40,
        soft_cap=soft_cap,
        k_scales=scales[0],
        v_scales=scales[1],
    )
    k, v = (x.double().repeat_interleave(2, 1) for x in restored)
    for r, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        for i in range(count):
            row = int(starts[r]) + i
            last = length - count + i + 1
            scores = torch.einsum("hd,lhd->hl", q[row].double(), k[:last]) * 0.25
            if soft_cap is not None:
                scores = soft_cap * (scores / soft_cap).tanh()
            want = torch.einsum("hl,lhd->hd", scores.softmax(-1), v[:last])
            assert_close(f"row {row}", want, got[row], 1e-6)


def test_rope_and_write_equals_separate_operations():
    q, k, v = randn(3, 4, 16), randn(3, 2, 16, seed=1), randn(3, 2, 16, seed=2)
    norms, angle = randn(2, 16, seed=3), torch.rand(9, 8)
    cos_sin, positions = torch.cat([angle.cos(), angle.sin()], 1), torch.tensor([8, 0, 3])
    slots = torch.tensor([5, -1, 20])
    pages = [torch.zeros(2, 16, 2, 16) for _ in range(4)]
    got = attention_reference.rope_write_kv_(
        q,
        k,
        v,
        cos_sin,
        positions,
        paged_kv(*pages[:2]),
        slots,
        q_norm_D=norms[0],
        k_norm_D=norms[1],
        eps=1e-3,
    )
    specs = [NormSpec(weight_C=norm, eps=1e-3) for norm in norms]
    normed = [rowwise_reference.normalized(x, s) for x, s in zip((q, k), specs, strict=True)]
    want, keys = attention_reference.apply_rope(*normed, cos_sin, positions)
    attention_reference.write_kv_(keys, v, paged_kv(*pages[2:]), slots)
    assert torch.equal(got, want) and torch.equal(pages[0], pages[2])
    assert pages[0].any() and torch.equal(pages[1], pages[3])


@pytest.mark.parametrize("window", [None, 9])
def test_attention_with_bidirectional_image_rows(assert_close, window):
    """An image of rows 3 to 10, of which each sees all, and text."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(20, 4, 16, generator=generator)
    k_pages, v_pages = torch.randn(2, 3, 16, 2, 16, generator=generator)
    position = torch.arange(12, 32)
    last_keys = torch.where((position >= 15) & (position <= 22), 22, position)
    tables, starts = torch.tensor([[2, 0]]).int(), torch.tensor([0, 20]).int()
    steps = tables, starts, torch.tensor([32]).int()
    options = {"scale": 0.25, "window": window, "max_query_len": 20, "max_context_len": 32}
    arguments = (ops, q, k_pages, v_pages, *steps)
    got = run_attention(*arguments, **options, last_keys=last_keys, kernel="fixed_order")
    want = run_attention(*arguments, **options, last_keys=last_keys)
    assert_close("out", want, got, 1e-6)
    causal = run_attention(*arguments, **options, kernel="fixed_order")
    changed = last_keys > position
    assert torch.equal(got[~changed], causal[~changed])
    assert (got[changed] != causal[changed]).any((1, 2)).all()
