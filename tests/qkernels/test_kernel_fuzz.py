"""Every kernel against its reference twin, on problems drawn from a seed for as long as is given.

    pytest tests/qkernels/test_kernel_fuzz.py --fuzz-seconds 60 --fuzz-seed 7

A failure is made small and printed as the argument of --fuzz-replay, which runs it alone. Without a
GPU, TRITON_INTERPRET=1 runs small problems in the interpreter.
"""

import json
import random
import time
from collections import Counter

import pytest
import torch

from formats.activation import quantize_input
from formats.bits import pack
from formats.packed import PackedWeight
from formats.scheme import CHANNEL, ActivationSpec, QuantSpec, Scheme
from formats.weights import round_to_nearest, with_activation
from qkernels import (
    elementwise,
    kv_cache,
    launch,
    ops,
    paged_attention,
    reference,
    reference_sampling,
    sampling,
    tile_table,
    w4a16,
    w8a8,
)
from qkernels.bench.tune import OPTIONS
from qkernels.int8_tiles import Int8Tile
from qkernels.sample_settings import SampleRow, SampleSettings
from qkernels.tiles import LINEAR_MAX_ROWS, LinearDigitsTile, LinearRingTile, LinearTile
from tests.qkernels import fuzz
from tests.qkernels.fuzz import FuzzedOp

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
# the interpreter has no bfloat16 arithmetic, and does about 10^7 products a second
HALF = ("float16", "bfloat16") if ON_GPU else ("float16",)
FLOAT = (*HALF, "float32")
MAX_COST = 10**10 if ON_GPU else 10**6
REPEATS = 4 if ON_GPU else 0  # compiling takes seconds there, a run microseconds
SHRINK_SECONDS = 30
HOPPER = ON_GPU and launch.lacks_gluon(DEVICE) is None
LINEAR_TILES = (LinearTile, *((LinearDigitsTile, LinearRingTile) if HOPPER else ()))

EPS = {name: torch.finfo(getattr(torch, name)).eps for name in ("float16", "bfloat16", "float32")}
ROWS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 63, 64, 65, 118, 130, 257, 600, 1025)
OUTPUTS = (8, 16, 24, 64, 72, 128, 136, 200, 1000, 4096)
WIDTHS = (8, 64, 24, 200, 1000, 1025, 4096, 5120, 14336)
BOOLS = (False, True)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows(shape, dtype: str, seed: int, strided: bool = False, spread: float = 0) -> torch.Tensor:
    """Random values, each row of its own size; strided: every second column of a wider tensor."""
    made = torch.randn(*shape[:-1], shape[-1] * (1 + strided), generator=generator(seed))
    made = made * 2 ** (torch.rand(*shape[:-1], 1, generator=generator(seed + 1)) * spread)
    return made.to(DEVICE, getattr(torch, dtype))[..., :: 1 + strided]


def assert_near(name: str, want: torch.Tensor, got: torch.Tensor, bound: torch.Tensor) -> None:
    """Element by element, in float64."""
    assert got.shape == want.shape, f"{name}: shape {list(got.shape)}, not {list(want.shape)}"
    off = (got.double().cpu() - want.double().cpu()).abs() / bound.double().cpu().clamp(min=1e-30)
    worst = float(off.nan_to_num(torch.inf).max()) if off.numel() else 0
    assert worst <= 1, f"{name}: an element is off by {worst:.3g} times what is allowed"


def random_tile(kinds: tuple[type, ...], number: int, op: str, problem: dict) -> object | None:
    """Tile 0 is the choice of tiles.py (None); the others any that could stand in a table."""
    rng = random.Random(number)
    while number:
        kind = rng.choice(kinds)
        tile = kind(**{name: rng.choice(options) for name, options in OPTIONS[kind].items()})
        if tile_table.OPS[op].fault(tile, problem) is None:
            return tile
    return None


def needs_too_much(error: Exception) -> bool:
    """A random tile may be larger than the GPU's shared memory or registers."""
    return type(error).__name__ in ("OutOfResources", "PTXASError")


def fuzz_linear(
    *, M, N, group, groups, bits, symmetric, dtype, bias, strided, ordered, spread, tile, seed
):
    K = 96 * groups if group == CHANNEL else group * groups
    spec = QuantSpec(bits=bits, symmetric=symmetric, group_size=group)
    G = spec.num_groups(K)
    codes = torch.randint(0, 2**bits, (N, K), dtype=torch.uint8, generator=generator(seed))
    scales = 2 ** (torch.rand(N, G, generator=generator(seed)) * spread - 8)
    scales *= torch.randint(0, 2, (N, G), generator=generator(seed)) * 2 - 1
    zeros = torch.full((N, G), spec.symmetric_zero, dtype=torch.uint8)
    if not symmetric:
        zeros = torch.randint(0, 2**bits, (N, G), dtype=torch.uint8, generator=generator(seed))
    packed = PackedWeight(
        words_NW=pack(codes, bits),
        scales_NG=scales.half(),
        zeros_NG=zeros,
        spec=spec,
        in_features=K,
        input_order=torch.randperm(K, generator=generator(seed)) if ordered else None,
    ).to(DEVICE)
    x = rows((M, K), dtype, seed, strided)
    kernel = f"triton_w{bits}a16" if bits in (4, 8) else "reference"
    weight = ops.prepare_weight(packed, x.dtype, kernel=kernel)
    offset = rows((N,), dtype, seed) if bias else None
    chosen = None
    if kernel != "reference":
        problem = {"M": M, "N": N, "K": K, "group": spec.group_length(K), "bits": bits}
        chosen = random_tile(LINEAR_TILES, tile, "w4a16", problem)
    if chosen is None:
        got = ops.linear(x, weight, offset)
    else:
        sorted_x = x if weight.input_order is None else x.index_select(-1, weight.input_order)
        try:
            got = w4a16.linear(sorted_x, weight, offset, tile=chosen)
        except Exception as error:
            if needs_too_much(error):
                return
            raise
    weight_NK = packed.dequantize(torch.float64)
    want, magnitude = x.double() @ weight_NK.t(), x.double().abs() @ weight_NK.abs().t()
    if bias:
        want, magnitude = want + offset.double(), magnitude + offset.double().abs()
    rounded_weight = chosen is None and (M > LINEAR_MAX_ROWS or kernel == "reference")
    slack = EPS[dtype] if rounded_weight else 2**-14
    assert_near("linear", want, got, EPS[dtype] * want.abs() + slack * magnitude)
    again = ops.linear(x, weight, offset)
    assert torch.equal(again, ops.linear(x, weight, offset)), "equal inputs, other bits"


PRODUCTS = ("w8a8", "w8a8-static", "w8a8-fp8", "w8a8-fp8-static")


def fuzz_w8a8(*, M, N, K, scheme, dtype, bias, spread, tile, seed):
    parsed = Scheme.parse(scheme)
    weight_NK = torch.randn(N, K, generator=generator(seed))
    static = 0.03 if "static" in scheme else None
    packed = with_activation(round_to_nearest(weight_NK, parsed.weight), parsed, static)
    weight = ops.prepare_weight(packed.to(DEVICE), getattr(torch, dtype), kernel="triton_w8a8")
    x = rows((M, K), dtype, seed, spread=spread)
    offset = rows((N,), dtype, seed) if bias else None
    codes, scales = quantize_input(x.cpu(), packed.activation, packed.input_scale)
    problem = {"M": M, "N": N, "K": K, "integers": "fp8" not in scheme}
    chosen = random_tile((Int8Tile,), tile, "w8a8", problem)
    if chosen is None:
        got = ops.linear(x, weight, offset)
    else:
        scales_M1 = scales.expand(M, 1).contiguous().to(DEVICE)
        try:
            got = w8a8.linear_codes(codes.to(DEVICE), scales_M1, weight, offset, tile=chosen)
        except Exception as error:
            if needs_too_much(error):
                return
            raise
    x_MK, w_NK = codes.double() * scales.double(), packed.dequantize(torch.float64)
    want, magnitude = x_MK @ w_NK.t(), x_MK.abs() @ w_NK.abs().t()
    if bias:
        want = want + offset.double().cpu()
    # integers are summed exactly; a tensor core keeps 14 bits of a float8 sum of 128
    slack = 2**-20 if "fp8" not in scheme else 2**-12 if ON_GPU else 2**-18
    assert_near(scheme, want, got, EPS[dtype] * want.abs() + slack * magnitude)


def activation_of(kind: str) -> tuple[ActivationSpec, torch.Tensor | None]:
    number = "float" if "float8" in kind else "int"
    if "static" not in kind:
        return ActivationSpec(type=number), None
    return ActivationSpec(type=number, dynamic=False, per="tensor"), torch.tensor(0.05)


ACTIVATIONS = ("int8", "int8 static", "float8", "float8 static")


def fuzz_quantize_input(*, M, C, activation, dtype, strided, spread, seed):
    spec, scale = activation_of(activation)
    x = rows((M, C), dtype, seed, strided, spread)
    on_device = None if scale is None else scale.to(DEVICE)
    codes, scales = ops.quantize_input(x, spec, on_device, kernel="triton")
    want_codes, want_scales = quantize_input(x.cpu(), spec, scale)
    assert torch.equal(scales.cpu(), want_scales), "scales differ from the reference's"
    same = codes.cpu().view(torch.uint8) == want_codes.view(torch.uint8)
    assert same.all(), f"{int((~same).sum())} codes differ from the reference's"


def fuzz_fused_quantize(*, op, M, C, activation, dtype, spread, seed):
    spec, scale = activation_of(activation)
    scale = None if scale is None else scale.to(DEVICE)
    if op == "silu_and_mul_quantize":
        inputs = (rows((M, 2 * C), dtype, seed, spread=spread),)
    else:
        inputs = (rows((M, C), dtype, seed, spread=spread), rows((C,), dtype, seed + 2), 1e-5)
        if op == "add_rms_norm_quantize":
            inputs = (inputs[0], rows((M, C), dtype, seed + 3, spread=2), *inputs[1:])
    codes, scales, *total = getattr(ops, op)(*inputs, spec, scale, kernel="triton")
    want_codes, want_scales, *want_total = getattr(reference, op)(*inputs, spec, scale)
    if total:
        assert torch.equal(total[0], want_total[0]), "the sum differs from the reference's"
    # another order of the sum of squares, or another exp, may move a value by one rounding
    eps = EPS[dtype]
    torch.testing.assert_close(scales, want_scales, rtol=max(4 * eps, 1e-5), atol=0)
    got, want = codes.float() * scales, want_codes.float() * want_scales
    step = scales if spec.type == "int" else want.abs() / 8 + scales * 2**-9
    assert_near(op, want, got, step * 1.001 + 4 * eps * want.abs())


def fuzz_rms_norm(*, M, C, added, dtype, strided, seed):
    x, weight = rows((M, C), dtype, seed, strided, 3), rows((C,), dtype, seed + 1)
    if added:
        residual = rows((M, C), dtype, seed + 2, strided)
        got, total = elementwise.add_rms_norm(x, residual, weight, 1e-5)
        assert torch.equal(total, x + residual), "the sum differs from torch's"
        x = total
    else:
        got = elementwise.rms_norm(x, weight, 1e-5)
    want = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    want = want * weight.double()
    assert_near("rms_norm", want, got, (2 * EPS[dtype] + 1e-5) * want.abs() + 1e-7)


def fuzz_silu_and_mul(*, M, C, dtype, seed):
    x = rows((M, 2 * C), dtype, seed, spread=2)
    gate, up = x.double().chunk(2, dim=-1)
    want = torch.nn.functional.silu(gate) * up
    bound = (2 * EPS[dtype] + 1e-5) * want.abs() + EPS[dtype] * 1e-2
    assert_near("silu_and_mul", want, elementwise.silu_and_mul(x), bound)


def fuzz_apply_rope(*, T, H, J, D, width, index, dtype, seed):
    qkv = rows((T, H + 2 * J, D), dtype, seed)
    width = max(2, int(D * width) // 2 * 2)
    angle = torch.rand(500, width // 2, generator=generator(seed)) * 6
    cos_sin = torch.cat([angle.cos(), angle.sin()], dim=1).to(DEVICE)
    positions = torch.randint(0, 500, (T,), generator=generator(seed))
    positions = positions.to(DEVICE, getattr(torch, index))
    q, k = qkv[:, :H], qkv[:, H : H + J]
    for name, want, got, source in zip(
        "qk",
        reference.apply_rope(q.double(), k.double(), cos_sin, positions),
        elementwise.apply_rope(q, k, cos_sin, positions),
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
    reference.write_kv_(kv_host[:, :J], kv_host[:, J:], *want[:2], slots, *want[2:])
    kv_cache.write_kv_(kv[:, :J], kv[:, J:], *got[:2], slots.to(DEVICE), *got[2:])
    for name, a, b in zip(("keys", "values", "k scales", "v scales"), got, want, strict=False):
        assert torch.equal(a.cpu().float(), b.float()), f"{name} differ from the reference's"


def fuzz_paged_attention(
    *,
    R,
    max_count,
    max_length,
    J,
    group,
    D,
    B,
    window,
    soft_cap,
    codes,
    interleaved,
    dtype,
    seed,
):
    rng = random.Random(seed)
    lengths = [rng.choice((0, 1, B, rng.randint(1, max_length))) for _ in range(R)]
    counts = [min(length, rng.choice((0, 1, 1, max_count))) for length in lengths]
    lengths[0], counts[0] = max_length, min(max_count, max_length)
    X, H, T = -(-max(lengths) // B), J * group, sum(counts)
    # what belongs to nobody holds NaN: reading it shows
    pages = torch.full((R * X + 2, B, 2, J, D), float("nan"))
    tables = torch.randperm(R * X + 2, generator=generator(seed))[: R * X].view(R, X).int()
    for r, length in enumerate(lengths):
        t = torch.arange(length)
        kv = torch.randn(length, 2, J, D, generator=generator(seed + r))
        pages[tables[r, t // B].long(), t % B] = kv
        tables[r, -(-length // B) :] = -7  # stale
    scales = {}
    if codes:  # of size 1 after the scale, which is NaN where nothing was written
        step = {"int8": 40, "float8_e4m3fn": 8}[codes]
        written = torch.where(pages.isnan().any((2, 4)), torch.nan, 1 / step).to(DEVICE)
        scales = {"k_scales_PBJ": written.clone(), "v_scales_PBJ": written}
        pages = (pages.nan_to_num(1) * step).clamp(-128, 127)
        pages = pages.round() if codes == "int8" else pages
    pages = pages.to(getattr(torch, codes or dtype)).to(DEVICE)
    k_pages, v_pages = pages.unbind(2)
    if not interleaved:
        k_pages, v_pages = k_pages.contiguous(), v_pages.contiguous()
    q = rows((T, H + 2, D), dtype, seed)[:, :H]
    starts = torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE)
    shared = {
        "scale": D**-0.5,
        "window": window,
        "max_query_len": max(counts),
        "max_context_len": max(lengths),
        "soft_cap": soft_cap,
        **scales,
    }
    arguments = (tables.to(DEVICE), starts, torch.tensor(lengths, dtype=torch.int32, device=DEVICE))
    got = paged_attention.paged_attention(q, k_pages, v_pages, *arguments, **shared)
    twin = (q, k_pages, v_pages) if codes else (q, k_pages.float(), v_pages.float())
    want = reference.paged_attention(q.float(), *twin[1:], *arguments, **shared)
    # the kernel rounds probabilities to the pages' dtype; values are of size 1
    bound = EPS[dtype] * want.abs() + (2 * EPS[dtype] if dtype != "float32" else 1e-5)
    assert_near("paged_attention", want, got, bound)


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


OPS: dict[str, FuzzedOp] = {
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
    "linear": FuzzedOp(
        run=fuzz_linear,
        fields={
            "M": ROWS,
            "N": OUTPUTS,
            "groups": (1, 2, 3, 5, 8, 17, 32),
            "group": (32, 64, 128, 256, 96, 224, CHANNEL),
            "bits": (4, 8, 4, 8, 2, 3),
            "symmetric": (True, False),
            "dtype": HALF,
            "bias": BOOLS,
            "strided": BOOLS,
            "ordered": (False, False, True),
            "spread": (0, 8),
            "tile": (0, 0, *range(1, 200)),
        },
        dynamic=("M", "N", "groups", "bias", "strided", "ordered", "spread"),
        cost=lambda *, M, N, group, groups, **_: M * N * groups * max(group, 96),
    ),
    "w8a8": FuzzedOp(
        run=fuzz_w8a8,
        fields={
            "M": ROWS,
            "N": OUTPUTS,
            "K": (32, 96, 128, 416, 1056, 4096, 14336),
            "scheme": PRODUCTS,
            "dtype": FLOAT,
            "bias": BOOLS,
            "spread": (0, 3),
            "tile": (0, 0, *range(1, 200)),
        },
        dynamic=("M", "N", "K", "bias", "spread"),
        cost=lambda *, M, N, K, **_: M * N * K,
    ),
    "quantize_input": FuzzedOp(
        run=fuzz_quantize_input,
        fields={
            "M": ROWS,
            "C": (*WIDTHS, 32768),
            "activation": ACTIVATIONS,
            "dtype": FLOAT,
            "strided": BOOLS,
            "spread": (0, 4, 12),
        },
        dynamic=("M", "strided", "spread"),
        cost=lambda *, M, C, **_: M * C * 10,
    ),
    "fused_quantize": FuzzedOp(
        run=fuzz_fused_quantize,
        fields={
            "op": ("rms_norm_quantize", "add_rms_norm_quantize", "silu_and_mul_quantize"),
            "M": ROWS,
            "C": WIDTHS,
            "activation": ACTIVATIONS,
            "dtype": FLOAT,
            "spread": (0, 4),
        },
        dynamic=("M", "spread"),
        cost=lambda *, M, C, **_: M * C * 10,
    ),
    "rms_norm": FuzzedOp(
        run=fuzz_rms_norm,
        fields={"M": ROWS, "C": WIDTHS, "added": BOOLS, "dtype": FLOAT, "strided": BOOLS},
        dynamic=("M", "strided"),
        cost=lambda *, M, C, **_: M * C * 10,
    ),
    "silu_and_mul": FuzzedOp(
        run=fuzz_silu_and_mul,
        fields={"M": ROWS, "C": WIDTHS, "dtype": FLOAT},
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
    "paged_attention": FuzzedOp(
        run=fuzz_paged_attention,
        fields={
            "R": (1, 2, 3, 7, 20),
            "max_count": (1, 2, 17, 64, 70, 200),
            "max_length": (1, 15, 16, 17, 64, 129, 500, 1100, 4000),
            "J": (1, 2, 8),
            "group": (1, 2, 3, 4, 7, 16),
            "D": (16, 32, 64, 80, 128, 256),
            "B": (16, 32, 64, 128),
            "window": (None, 1, 7, 64, 100, 1000),
            "soft_cap": (None, None, 5.0),
            "codes": ("", "", "int8", "float8_e4m3fn"),
            "interleaved": BOOLS,
            "dtype": FLOAT,
        },
        dynamic=("R", "max_count", "max_length", "interleaved"),
        cost=lambda *, R, max_count, max_length, J, group, D, **_: (
            R * max_count * max_length * J * group * D
        ),
    ),
}


def test_fuzz(request):
    option = request.config.getoption
    seed, replay = option("--fuzz-seed"), option("--fuzz-replay")
    if replay is not None:
        problem = json.loads(replay)
        OPS[problem.pop("op")].run(**problem)
        return
    end = time.monotonic() + option("--fuzz-seconds")
    done: Counter[str] = Counter()
    for name, problem in fuzz.problems(OPS, seed, MAX_COST, REPEATS):
        error = fuzz.failure(OPS[name], problem)
        if error is not None:
            small = fuzz.shrink(OPS[name], problem, SHRINK_SECONDS)
            pytest.fail(
                f"seed {seed}, problem {sum(done.values())}: {type(error).__name__}: {error}\n"
                f"drawn: {problem}\nreplay with\n"
                f"  --fuzz-replay '{fuzz.replay_text(name, small)}'\n"
                f"which says: {fuzz.failure(OPS[name], small)}"
            )
        done[name] += 1
        if time.monotonic() > end:
            break
    print(f"seed {seed}: {dict(done)}")
