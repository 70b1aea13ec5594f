"""Norms, activation, rotary embedding, KV writes and sampling, to fuzz."""

import torch

from qkernels.attention import reference as attention_reference
from qkernels.attention import rope
from qkernels.attention import rope_write_kv as kv_cache
from qkernels.rowwise import activate, norm
from qkernels.rowwise import reference as rowwise_reference
from qkernels.rowwise.spec import ActSpec, Branch, NormSpec
from qkernels.sampling import reference as reference_sampling
from qkernels.sampling import triton_sample as sampling
from qkernels.sampling.settings import SampleSettings
from qkernels.sampling.words import SampleRow
from tests.qkernels.flat_attention import paged_kv
from tests.qkernels.fuzz.fuzzer import FuzzedOp
from tests.qkernels.fuzz.values import (
    BOOLS,
    DEVICE,
    EPS,
    FLOAT,
    PARTS,
    ROWS,
    WIDTHS,
    assert_near,
    generator,
    in_parts,
    rows,
)

KINDS = ("silu", "gelu_tanh", "gelu", "relu", "relu2")


def fuzz_norm(*, M, C, kind, reduced, parts, branch, wide, dtype, strided, seed):
    x = rows((M, C), dtype, seed, strided, 3)
    weights = "float32" if wide else dtype
    weight = rows((C,), weights, seed + 1)
    bias = rows((C,), weights, seed + 4) if kind == "layer, bias" else None
    spec = NormSpec(kind=kind.partition(",")[0], weight_C=weight, bias_C=bias, eps=1e-5)
    if reduced:
        residual = rows((M, C), dtype, seed + 2, strided)
        given = in_parts(x, parts, seed)
        of_branch = NormSpec(weight_C=rows((C,), weights, seed + 3), eps=1e-3)
        end = Branch(
            norm=of_branch if "norm" in branch else None,
            factor=0.22 if "factor" in branch else 1.0,
        )
        got, x = norm.norm(given, residual, spec, None, end)
        total = rowwise_reference.norm(given, residual, None, None, end)[1]
        if branch == "plain":
            assert torch.equal(x, total), "the sum differs from torch's"
        size = total.double().abs() + (total - residual).double().abs()
        assert_near("sum", total.double(), x, (4 * EPS[dtype] + 1e-6) * size + 1e-6)
    else:
        got, _ = norm.norm(x, None, spec)
    want, mean = x.double(), 0
    if kind != "rms":
        mean = want.mean(-1, keepdim=True)
        want = want - mean
    inverse = (want.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    want = want * inverse * weight.double()
    # what the mean loses in float32, and the bias after it
    lost = 1e-6 * (x.double().abs() + abs(mean)) * inverse * weight.double().abs()
    if bias is not None:
        want = want + bias.double()
        lost = lost + (EPS[dtype] + 1e-6) * bias.double().abs()
    assert_near("norm", want, got, (2 * EPS[dtype] + 1e-5) * want.abs() + lost + 1e-7)


def fuzz_activate(*, M, C, kind, gated, dtype, seed):
    x = rows((M, C * (1 + gated)), dtype, seed, spread=2)
    gate, up = x.double().chunk(2, dim=-1) if gated else (x.double(), torch.ones(()).double())
    spec = ActSpec(kind=kind, gated=gated)
    want = rowwise_reference.activate(gate, ActSpec(kind=kind, gated=False)) * up
    got = activate.activate(x, spec)
    bound = (2 * EPS[dtype] + 1e-5) * want.abs() + EPS[dtype] * 1e-2 * (1 + up.abs())
    if kind == "gelu":  # 1 + erf cancels below 0 in float32, in torch too
        bound = bound + 2**-23 * gate.abs() * up.abs()
    assert_near("activate", want, got, bound)


def fuzz_apply_rope(*, T, H, J, D, width, neighbours, index, dtype, seed):
    qkv = rows((T, H + 2 * J, D), dtype, seed)
    width = max(2, int(D * width) // 2 * 2)
    angle = torch.rand(500, width // 2, generator=generator(seed)) * 6
    cos_sin = torch.cat([angle.cos(), angle.sin()], dim=1).to(DEVICE)
    positions = torch.randint(0, 500, (T,), generator=generator(seed))
    positions = positions.to(DEVICE, getattr(torch, index))
    q, k = qkv[:, :H], qkv[:, H : H + J]
    for name, want, got, source in zip(
        "qk",
        attention_reference.apply_rope(q.double(), k.double(), cos_sin, positions, neighbours),
        rope.apply_rope(q, k, cos_sin, positions, neighbours),
        (q, k),
        strict=True,
    ):
        bound = EPS[dtype] * want.abs() + 1e-6 * source.double().abs().amax(-1, keepdim=True)
        assert_near(f"rope {name}", want, got, bound)


def fuzz_write_kv(*, T, J, D, B, codes, index, interleaved, dtype, seed):
    kv = rows((T, 2 * J, D), dtype, seed, spread=6)
    slots = torch.randperm(4 * T * B, generator=generator(seed))[:T]
    slots[torch.rand(T, generator=generator(seed)) < 0.2] = -1
    slots = slots.to(getattr(torch, index))
    pages = torch.ones(4 * T, 2, B, J, D).to(getattr(torch, codes or dtype))
    if not interleaved:
        pages = pages.transpose(0, 1).contiguous().transpose(0, 1)
    scales = [torch.full((4 * T, B, J), 7.0) for _ in range(2)] if codes else []
    want = [*pages.clone().unbind(1), *(each.clone() for each in scales)]
    got = [*pages.to(DEVICE).unbind(1), *(each.to(DEVICE) for each in scales)]
    kv_host = kv.cpu()
    attention_reference.write_kv_(kv_host[:, :J], kv_host[:, J:], paged_kv(*want), slots)
    kv_cache.write_kv_(kv[:, :J], kv[:, J:], paged_kv(*got), slots.to(DEVICE))
    for name, a, b in zip(("keys", "values", "k scales", "v scales"), got, want, strict=False):
        assert torch.equal(a.cpu().float(), b.float()), f"{name} differ from the reference's"


def fuzz_sample(*, S, V, temperature, top_k, top_p, min_p, spread, dtype, seed):
    logits = rows((S, V), dtype, seed) * spread
    made = [
        SampleRow(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed + i,
            position=i,
        )
        for i in range(S)
    ]
    settings = SampleSettings.of(made).to(DEVICE)
    got = sampling.sample_(logits, settings).tokens_S
    want = reference_sampling.sample_(logits, settings).tokens_S
    assert torch.equal(got, want), f"drew {got.tolist()}, the twin {want.tolist()}"


OTHERS: dict[str, FuzzedOp] = {
    "norm": FuzzedOp(
        run=fuzz_norm,
        fields={
            "M": ROWS,
            "C": WIDTHS,
            "kind": ("rms", "layer", "layer, bias"),
            "reduced": BOOLS,
            "parts": PARTS,
            "branch": ("plain", "norm", "factor", "norm, factor"),
            "wide": BOOLS,
            "dtype": FLOAT,
            "strided": BOOLS,
        },
        dynamic=("M", "strided"),
        cost=lambda *, M, C, parts, **_: M * C * (10 + parts),
    ),
    "activate": FuzzedOp(
        run=fuzz_activate,
        fields={"M": ROWS, "C": WIDTHS, "kind": KINDS, "gated": BOOLS, "dtype": FLOAT},
        dynamic=("M", "C"),
        cost=lambda *, M, C, **_: M * C * 10,
    ),
    "apply_rope": FuzzedOp(
        run=fuzz_apply_rope,
        fields={
            "T": ROWS,
            "H": (1, 3, 8, 32),
            "J": (1, 2, 8),
            "D": (16, 24, 64, 80, 128, 256),
            "width": (1, 0.5, 0.25),
            "neighbours": BOOLS,
            "index": ("int64", "int32"),
            "dtype": FLOAT,
        },
        dynamic=("T",),
        cost=lambda *, T, H, D, **_: T * H * D * 10,
    ),
    "write_kv": FuzzedOp(
        run=fuzz_write_kv,
        fields={
            "T": ROWS,
            "J": (1, 2, 8),
            "D": (16, 24, 64, 80, 128, 256),
            "B": (16, 32, 64, 128),
            "codes": ("", "int8", "float8_e4m3fn"),
            "index": ("int64", "int32"),
            "interleaved": BOOLS,
            "dtype": FLOAT,
        },
        dynamic=("T", "interleaved"),
        cost=lambda *, T, J, D, B, **_: T * J * D * B,
    ),
    "sample": FuzzedOp(
        run=fuzz_sample,
        fields={
            "S": (1, 2, 3, 17, 64),
            "V": (8, 33, 1000, 2100, 5001, 128256, 151936),
            "temperature": (0.0, 1.0, 0.3, 2.0),
            "top_k": (0, 1, 7, 50, 10**9),
            "top_p": (1.0, 0.9, 0.5, 1e-6),
            "min_p": (0.0, 0.05, 1.0),
            "spread": (3, 1, 30),
            "dtype": FLOAT,
        },
        dynamic=("S", "temperature", "top_k", "top_p", "min_p", "spread"),
        cost=lambda *, S, V, **_: S * V * 100,
    ),
}
