"""Products to fuzz."""

import random

import torch

from formats.in_memory.packed import PackedWeight
from formats.in_memory.weights import round_to_nearest, with_activation
from formats.numerics.activation import quantize_input
from formats.numerics.bits import pack
from formats.scheme import CHANNEL, QuantSpec, Scheme
from qkernels import ops
from qkernels.gpu import device
from qkernels.operands.split_k import reduced
from qkernels.tuning.op import TunedOp
from qkernels.w4a8 import triton_gemm as w4a8
from qkernels.w4a8.config import W4A8TritonConfig
from qkernels.w4a8.tuned import TUNED as W4A8
from qkernels.w8a8 import triton_gemm as w8a8
from qkernels.w8a8.config import W8A8TritonConfig
from qkernels.w8a8.tuned import TUNED as W8A8
from qkernels.wna16.layout import kernel_bits
from qkernels.wna16.sm90_gemv_imma_config import GemvImmaConfig
from qkernels.wna16.sm90_small_m_config import SmallMConfig
from qkernels.wna16.triton_config import MAX_FUSED_ROWS, TritonGemmConfig
from qkernels.wna16.tuned import TUNED as WNA16
from tests.qkernels.fuzz.fuzzer import FuzzedOp
from tests.qkernels.fuzz.values import (
    BOOLS,
    DEVICE,
    EPS,
    FLOAT,
    HALF,
    ON_GPU,
    OUTPUTS,
    ROWS,
    assert_near,
    generator,
    rows,
)
from tests.qkernels.plans import multiply

READERS = ("norm", "rope")
HOPPER = ON_GPU and device.lacks_arch(DEVICE, "sm_90") is None
LINEAR_TILES = (TritonGemmConfig, *((GemvImmaConfig, SmallMConfig) if HOPPER else ()))


def random_tile(kinds: tuple[type, ...], number: int, op: TunedOp, problem: dict) -> object | None:
    """Return a config: None for tile 0 (the default), otherwise any that a table may contain."""
    rng = random.Random(number)
    while number:
        kind = rng.choice(kinds)
        tile = kind(
            **{name: rng.choice(options) for name, options in op.configs[kind].options.items()}
        )
        if op.fault(tile, problem) is None:
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
    stored = kernel_bits(bits)
    weight = ops.prepare_weight(packed, x.dtype, kernel=f"w{stored}a16")
    offset = rows((N,), dtype, seed) if bias else None
    problem = {"M": M, "N": N, "K": K, "group": spec.group_length(K), "bits": stored}
    chosen = random_tile(LINEAR_TILES, tile, WNA16, problem)
    if chosen is None:
        got = ops.linear(x, weight, offset)
    else:
        try:
            got = multiply(x, weight, offset, tile=chosen)
        except Exception as error:
            if needs_too_much(error):
                return
            raise
    weight_NK = packed.dequantize(torch.float64)
    want, magnitude = x.double() @ weight_NK.t(), x.double().abs() @ weight_NK.abs().t()
    if bias:
        want, magnitude = want + offset.double(), magnitude + offset.double().abs()
    rounded_weight = chosen is None and M > MAX_FUSED_ROWS
    slack = EPS[dtype] if rounded_weight else 2**-14
    assert_near("linear", want, got, EPS[dtype] * want.abs() + slack * magnitude)
    if M <= MAX_FUSED_ROWS:
        for consumer in READERS:
            got = reduced(ops.linear(x, weight, offset, ops.plan_linear(weight, M, consumer)))
            bound = EPS[dtype] * want.abs() + slack * magnitude
            assert_near(f"linear for {consumer}", want, got, bound)
    again = ops.linear(x, weight, offset)
    assert torch.equal(again, ops.linear(x, weight, offset)), "equal inputs, other bits"


SCHEMES = ("w8a8", "w8a8-static", "w8a8-fp8", "w8a8-fp8-static")


def fuzz_w8a8(*, M, N, K, scheme, dtype, bias, spread, tile, seed):
    parsed = Scheme.parse(scheme)
    # of another seed than x: the sum of x's squares is more than float16 holds
    weight_NK = torch.randn(N, K, generator=generator(seed + 2))
    static = 0.03 if "static" in scheme else None
    packed = with_activation(round_to_nearest(weight_NK, parsed.weight), parsed, static)
    weight = ops.prepare_weight(packed.to(DEVICE), getattr(torch, dtype), kernel="triton_w8a8")
    x = rows((M, K), dtype, seed, spread=spread)
    offset = rows((N,), dtype, seed) if bias else None
    codes, scales = quantize_input(x.cpu(), packed.activation, packed.input_scale)
    problem = {"M": M, "N": N, "K": K, "integers": "fp8" not in scheme}
    chosen = random_tile((W8A8TritonConfig,), tile, W8A8, problem)
    got = product_of_codes(w8a8, chosen, x, (codes, scales), weight, offset)
    if got is None:
        return
    x_MK, w_NK = codes.double() * scales.double(), packed.dequantize(torch.float64)
    want, magnitude = x_MK @ w_NK.t(), x_MK.abs() @ w_NK.abs().t()
    if bias:
        want = want + offset.double().cpu()
    bound = EPS[dtype] * want.abs() + (2**-18 if "fp8" in scheme else 2**-20) * magnitude
    if "fp8" in scheme and ON_GPU:
        bound += cut_off(x_MK, w_NK)
    assert_near(scheme, want, got, bound)


def product_of_codes(module, config, x, rounded, weight, offset):
    """With a config of x's codes, with none of x; None: the config needs too much of the GPU."""
    if config is None:
        return ops.linear(x, weight, offset)
    codes, scales = rounded
    scales_M1 = scales.expand(x.shape[0], 1).contiguous().to(DEVICE)
    try:
        return module.linear_codes(codes.to(DEVICE), scales_M1, weight, offset, config=config)
    except Exception as error:
        if needs_too_much(error):
            return None
        raise


def fuzz_w4a8(*, M, N, groups, group, floats, dtype, bias, spread, tile, seed):
    """Groups whose scales differ by powers of two."""
    G, K = (1, 32 * groups) if group == CHANNEL else (groups, groups * group)
    scheme = Scheme.parse("w4a8-fp8" if floats else "w4a8", group)
    weight_NK = torch.randn(N, K, generator=generator(seed + 2))
    weight_NK *= 2.0 ** (torch.arange(K) // (K // G) % 4)
    packed = with_activation(round_to_nearest(weight_NK, scheme.weight), scheme, None)
    weight = ops.prepare_weight(packed.to(DEVICE), getattr(torch, dtype), kernel="triton_w4a8")
    x = rows((M, K), dtype, seed, spread=spread)
    offset = rows((N,), dtype, seed) if bias else None
    rounded = quantize_input(x.cpu(), packed.activation, None)
    problem = {"M": M, "N": N, "K": K, "group": K // G, "integers": not floats}
    chosen = random_tile((W4A8TritonConfig,), tile, W4A8, problem)
    got = product_of_codes(w4a8, chosen, x, rounded, weight, offset)
    if got is None:
        return
    x_MK, w_NK = rounded[0].double() * rounded[1].double(), packed.dequantize(torch.float64)
    want, magnitude = x_MK @ w_NK.t(), x_MK.abs() @ w_NK.abs().t()
    if bias:
        want = want + offset.double().cpu()
    bound = EPS[dtype] * want.abs() + 2**-19 * magnitude
    if floats and ON_GPU:
        bound += cut_off(x_MK, w_NK)
    assert_near(str(scheme), want, got, bound)


def cut_off(x_MK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    """The most that float8 tensor cores cut off the sums x w: [M, N]. Integers are summed exactly.

    One instruction adds 32 products to a sum, all of them with the bits from the largest one's
    first to its 14th. The sum is emptied every 128 inputs, up to 64 rows every 256.
    """
    x_MK, w_NK = x_MK.float().to(DEVICE), w_NK.float().to(DEVICE)
    cut = torch.zeros(x_MK.shape[0], w_NK.shape[0], device=DEVICE)
    for first in range(0, x_MK.shape[1], 32):
        x, w = x_MK[:, first : first + 32], w_NK[:, first : first + 32]
        if first % 256 == 0:
            total = torch.zeros_like(cut)
        # column by column, because all products together do not fit
        largest = total.abs()
        for i in range(x.shape[1]):
            largest = torch.maximum(largest, (x[:, i, None] * w[None, :, i]).abs())
        cut += 33 * 2**-13 * largest
        total += x @ w.t()
    return cut.double().cpu()


PRODUCTS: dict[str, FuzzedOp] = {
    "w4a8": FuzzedOp(
        run=fuzz_w4a8,
        fields={
            "M": ROWS,
            "N": OUTPUTS,
            "groups": (1, 2, 3, 5, 8, 17, 32),
            "group": (32, 64, 128, 256, 96, CHANNEL),
            "floats": BOOLS,
            "dtype": FLOAT,
            "bias": BOOLS,
            "spread": (0, 3),
            "tile": (0, 0, *range(1, 200)),
        },
        dynamic=("M", "N", "groups", "bias", "spread"),
        cost=lambda *, M, N, group, groups, **_: M * N * groups * max(group, 96),
    ),
    "linear": FuzzedOp(
        run=fuzz_linear,
        fields={
            "M": ROWS,
            "N": OUTPUTS,
            "groups": (1, 2, 3, 5, 8, 17, 32),
            "group": (32, 64, 128, 256, 96, 224, CHANNEL),
            "bits": (4, 8, 4, 8, 2, 3, 6),
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
            "scheme": SCHEMES,
            "dtype": FLOAT,
            "bias": BOOLS,
            "spread": (0, 3),
            "tile": (0, 0, *range(1, 200)),
        },
        dynamic=("M", "N", "K", "bias", "spread"),
        cost=lambda *, M, N, K, **_: M * N * K,
    ),
}
