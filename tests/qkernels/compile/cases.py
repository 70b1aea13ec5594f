"""What every card is asked to compile: calls of the public operations, by name.

A call launches what the card would run: its default config, the kernels that make the operand, the
reduction.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from formats.gguf.block_types import BY_NAME
from formats.in_memory.fp4 import SCALE_DTYPES, Fp4Weight
from formats.in_memory.fp8 import Fp8Weight
from formats.in_memory.k_weight import KWeight
from formats.in_memory.packed import PackedWeight
from formats.in_memory.weights import with_activation
from formats.scheme import BLOCK_TYPES, FP4_TYPES, ActivationSpec, Scheme, block_scheme
from qkernels import ops
from qkernels.attention.cache import INT4_PAGES
from qkernels.linear.prepared import PreparedWeight
from qkernels.operands.codes import InputRounding
from qkernels.operands.forms import InputForm
from qkernels.operands.limbs import LIMBS_MAX_ROWS, LimbForm
from qkernels.operands.split_k import Consumer, SplitKPartials
from qkernels.rowwise.spec import PLAIN, ActKind
from qkernels.sampling.settings import SampleSettings
from qkernels.sampling.words import SampleRow
from tests.qkernels.compile import collective_cases as ranks
from tests.qkernels.compile import moe_cases as moe
from tests.qkernels.compile.attention_cases import attention, kv_write
from tests.qkernels.compile.cards import empty
from tests.qkernels.compile.delta_net_cases import delta_net
from tests.qkernels.compile.draft_cases import draft_input, drafts
from tests.qkernels.compile.latent_cases import heads_product, latent_attention
from tests.qkernels.compile.lora_cases import adapted_product, lora
from tests.qkernels.compile.mamba2_cases import mamba2, short_conv

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT8, FP8 = torch.int8, torch.float8_e4m3fn
INTEGERS, FLOATS = ActivationSpec(), ActivationSpec(type="float")
ROUNDED = InputRounding(INTEGERS, None)
ADAPTED = (  # scheme, M, linear, outputs of those beside each other, K, consumer
    ("w4a16-sym", 1, "qkv", (4096, 1024, 1024), 4096, "rope"),
    ("w4a16-asym", 2, "down", (4096,), 14336, "norm"),
    ("w4a16-sym", 4, "gate_up", (14336, 14336), 4096, None),
    ("w8a16-sym", 3, "o", (4096,), 4096, "norm"),
    ("w4a16-sym", 8, "qkv", (4096, 1024, 1024), 4096, "rope"),
    ("w4a16-asym", 16, "down", (4096,), 14336, "norm"),
    ("w4a16-sym", 32, "gate_up", (14336, 14336), 4096, None),
    ("w4a16-sym", 32, "o", (4096,), 4096, "norm"),
    ("w4a16-sym", 64, "qkv", (4096, 1024, 1024), 4096, "rope"),
    ("w4a16-asym", 64, "gate_up", (14336, 14336), 4096, None),
)
QKV, OUT, GATE_UP, DOWN = (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`product`: the instruction that one of its kernels multiplies with on sm_90."""

    run: Callable[[], object]
    quick: tuple[str, ...] = ()  # cards that compile it in every run of the tests
    product: Literal["mma", "wgmma"] | None = None
    least: int = 80  # the first architecture that has what it takes


def weight_of(scheme: Scheme, N: int, K: int) -> PackedWeight | Fp8Weight | Fp4Weight | KWeight:
    """A weight of zeros: only its shapes and types count."""
    spec, activation = scheme.weight, scheme.activation
    if spec.type in FP4_TYPES:
        scales = torch.zeros(N, spec.num_groups(K), dtype=torch.uint8)
        return Fp4Weight(
            bytes_NB=torch.zeros(N, K // 2, dtype=torch.uint8),
            scales_NG=scales.view(SCALE_DTYPES[spec.type]),
            global_scale=torch.ones(()) if spec.type == "nvfp4" else None,
            spec=spec,
        )
    if spec.type in BLOCK_TYPES:
        row_bytes = BY_NAME[spec.type.upper()].row_bytes(K)
        return KWeight(bytes_NX=torch.zeros(N, row_bytes, dtype=torch.uint8), spec=spec)
    if spec.type == "float":
        codes = torch.zeros(N, K, dtype=torch.uint8).view(FP8)
        block = spec.group_size if spec.rows > 1 else None
        rows, columns = (N, 1) if block is None else (math.ceil(N / spec.rows), K // block)
        weight = Fp8Weight(codes_NK=codes, scales_RC=torch.ones(rows, columns), spec=spec)
    else:
        G = spec.num_groups(K)
        weight = PackedWeight(
            words_NW=torch.zeros(N, K * spec.bits // 32, dtype=torch.int32),
            scales_NG=torch.ones(N, G, dtype=FP16),
            zeros_NG=torch.full((N, G), spec.symmetric_zero, dtype=torch.uint8),
            spec=spec,
            in_features=K,
        )
    return with_activation(weight, scheme, None) if activation is not None else weight


@functools.lru_cache(maxsize=4)
def prepared(
    scheme: str, shape: tuple[int, int], dtype: torch.dtype, kernel: str | None = None
) -> PreparedWeight:
    found = block_scheme(scheme) if scheme in BLOCK_TYPES else Scheme.parse(scheme)
    return ops.prepare_weight(weight_of(found, *shape), dtype, kernel=kernel)


def linear(
    M: int,
    shape: tuple[int, int],
    scheme: str,
    dtype: torch.dtype = BF16,
    bias: bool = False,
    consumer: Consumer | None = None,
    kernel: str | None = None,
) -> None:
    N, K = shape
    weight = prepared(scheme, shape, dtype, kernel)
    plan = ops.plan_linear(weight, M, consumer, fused=False)
    ops.linear(empty(M, K, dtype=dtype), weight, empty(N, dtype=dtype) if bias else None, plan)


def float_linear(M: int, shape: tuple[int, int]) -> None:
    from qkernels.linear import triton_float

    N, K = shape
    triton_float.multiply(empty(M, K), empty(N, K), empty(N))


def adapted(scheme: str, M: int, sizes: tuple[int, ...], K: int, consumer: Consumer | None) -> None:
    adapted_product(prepared(scheme, (sum(sizes), K), BF16), M, sizes, consumer)


def norm(
    C: int,
    splits: int = 0,
    rounding: ActivationSpec | None = None,
    M: int = 1,
    branch: ops.Branch = PLAIN,
    weighted: bool = True,
    dtype: torch.dtype = BF16,
) -> None:
    x = empty(M, C)
    if splits:
        x = SplitKPartials(parts=empty(splits, M, C, dtype=FP32), dtype=BF16)
    spec = ops.NormSpec(weight_C=empty(C, dtype=dtype), eps=1e-5) if weighted else None
    form = None if rounding is None else InputRounding(rounding, None)
    ops.norm(x, empty(M, C), spec, form, branch)


def layer_norm(C: int, form: InputForm = None, M: int = 1) -> None:
    spec = ops.NormSpec(kind="layer", weight_C=empty(C), bias_C=empty(C), eps=1e-5)
    ops.norm(empty(M, C), empty(M, C), spec, form)


def norm_behind(C: int, dtype: torch.dtype = BF16) -> ops.Branch:
    """A norm of what is added."""
    return ops.Branch(norm=ops.NormSpec(weight_C=empty(C, dtype=dtype), eps=1e-5))


def norm_to_limbs(
    form: LimbForm, M: int = 4, K: int = 4096, splits: int = 0, branch: ops.Branch = PLAIN
) -> None:
    x = empty(M, K)
    if splits:
        x = SplitKPartials(parts=empty(splits, M, K, dtype=FP32), dtype=BF16)
    ops.norm(x, empty(M, K), ops.NormSpec(weight_C=empty(K), eps=1e-5), form, branch)


def activate(kind: ActKind, M: int, width: int, form: InputForm = None, gated: bool = True) -> None:
    ops.activate(empty(M, width), ops.ActSpec(kind=kind, gated=gated), form)


def quantize(C: int, spec: ActivationSpec = INTEGERS) -> None:
    ops.quantize_input(empty(1, C), spec)


def sample() -> None:
    rows = [SampleRow(temperature=0.7, top_k=50, top_p=0.9, num_logprobs=3)] * 2
    ops.sample_(empty(2, 128256), SampleSettings.of(rows))


SM90 = ("sm_90",)
SM80 = ("sm_80",)
SYMMETRIC, ASYMMETRIC = LimbForm(bits=4), LimbForm(bits=8, with_sums=True)

# each shape of config that a variant has; the first ones for every scheme
WNA16_SHAPES = (
    *((1, OUT), (4, GATE_UP), (16, GATE_UP), (64, OUT), (64, GATE_UP), (256, OUT)),
    *((512, QKV), (1024, QKV)),
)
W4A16_SHAPES = (
    *WNA16_SHAPES,
    *((4, OUT), (8, OUT), (32, OUT), (128, OUT), (1, GATE_UP), (8, GATE_UP), (128, GATE_UP)),
    *((8, QKV), (64, QKV), (5, DOWN), (16, DOWN), (32, DOWN), (64, DOWN), (256, DOWN), (512, DOWN)),
)
W8A8_SHAPES = (
    *((1, OUT), (16, GATE_UP), (64, QKV), (128, DOWN), (128, OUT), (256, QKV), (1024, QKV)),
    (4096, OUT),
)
W4A8_SHAPES = (
    *((1, OUT), (16, GATE_UP), (32, QKV), (64, QKV), (64, GATE_UP), (128, DOWN), (256, QKV)),
    (4096, OUT),
)
SCHEMES = {
    "w4a16": ("w4a16-sym", W4A16_SHAPES),
    "w4a16-asym": ("w4a16-asym", WNA16_SHAPES),
    "w8a16": ("w8a16-sym", WNA16_SHAPES),
    "w8a16-asym": ("w8a16-asym", WNA16_SHAPES),
    "w8a8": ("w8a8", W8A8_SHAPES),
    "w8a8-fp8": ("w8a8-fp8", W8A8_SHAPES),
    "w8a8-fp8-block": ("w8a8-fp8-block", W8A8_SHAPES),
    "w4a8": ("w4a8", W4A8_SHAPES),
    "w4a8-fp8": ("w4a8-fp8", W4A8_SHAPES),
    "w4a8-channel": ("w4a8-channel", W4A8_SHAPES),
}
QUICK_PRODUCTS = {
    ("w4a16", 16, GATE_UP): ("sm_80", "sm_90"),
    ("w4a16", 64, GATE_UP): SM90,
    ("w4a16-asym", 256, OUT): ("sm_90", "sm_120"),
    ("w8a8", 1024, QKV): SM90,
    ("w8a8-fp8", 64, QKV): ("sm_89", "sm_90"),
    ("w4a8", 16, GATE_UP): ("sm_80", "sm_90"),
    ("w4a8-fp8", 256, QKV): SM90,
}


def _products() -> dict[str, Case]:
    return {
        f"{name} M={M} {shape[0]}x{shape[1]}": Case(
            run=lambda M=M, shape=shape, scheme=scheme, bias="w8a8" in name: linear(
                M, shape, scheme, bias=bias
            ),
            quick=QUICK_PRODUCTS.get((name, M, shape), ()),
            product="mma" if M <= LIMBS_MAX_ROWS and "a16" in name else "wgmma",
            least=89 if "fp8" in name else 80,
        )
        for name, (scheme, shapes) in SCHEMES.items()
        for M, shape in shapes
    }


MORE_PRODUCTS = {
    "w4a8 group 32": Case(run=lambda: linear(256, OUT, "w4a8-g32"), product="wgmma"),
    "w4a8 group 32, few rows": Case(run=lambda: linear(16, DOWN, "w4a8-g32"), product="wgmma"),
    "w4a8-fp8 group 64": Case(
        run=lambda: linear(128, OUT, "w4a8-fp8-g64", FP16, True), product="wgmma", least=89
    ),
    "w4a8 group 256, float16": Case(
        run=lambda: linear(64, QKV, "w4a8-g256", FP16, True), product="wgmma"
    ),
    "w4a16 group 32": Case(run=lambda: linear(64, OUT, "w4a16-sym-g32"), product="wgmma"),
    "w8a16 group 32": Case(run=lambda: linear(16, OUT, "w8a16-sym-g32"), product="wgmma"),
    "w4a16 group 256, float16": Case(
        run=lambda: linear(512, DOWN, "w4a16-sym-g256", FP16), product="wgmma"
    ),
    "w4a16 float16 asymmetric, limbs": Case(
        run=lambda: linear(2, GATE_UP, "w4a16-asym", FP16), quick=SM90, product="mma"
    ),
    "w4a16 float16 asymmetric, split": Case(
        run=lambda: linear(5, DOWN, "w4a16-asym", FP16, True), product="wgmma"
    ),
    "w8a16 float16 asymmetric": Case(
        run=lambda: linear(256, OUT, "w8a16-asym", FP16, True), product="wgmma"
    ),
    "w4a16 for a norm": Case(
        run=lambda: linear(32, OUT, "w4a16-sym", consumer="norm"), quick=SM90, product="wgmma"
    ),
    "w4a16 for a rotation": Case(
        run=lambda: linear(64, QKV, "w4a16-asym", bias=True, consumer="rope"), product="wgmma"
    ),
    **{
        f"w4a16 fixed order {name} M={M}": Case(
            run=functools.partial(linear, M, shape, scheme, bias=True, kernel="fixed_order"),
            quick=SM90 if (M, name) == (512, "o") else (),
            product="wgmma",
        )
        for M, name, shape, scheme in (
            (1, "qkv", QKV, "w4a16-sym"),
            (64, "down", DOWN, "w4a16-asym"),
            (128, "qkv", QKV, "w4a16-sym"),
            (512, "o", OUT, "w4a16-sym"),
            (1024, "down", DOWN, "w4a16-asym"),
            (4096, "qkv", QKV, "w4a16-sym"),
        )
    },
    **{
        f"float fixed order M={M}": Case(
            run=functools.partial(float_linear, M, OUT),
            quick=SM80 if M == 8 else (),
            product="wgmma",
        )
        for M in (1, 8, 64, 300, 4096)
    },
    **{
        f"{name} M={M} {shape[0]}x{shape[1]}": Case(
            run=functools.partial(linear, M, shape, name),
            quick=quick,
            product="wgmma" if M <= 1024 else None,
        )
        for name, M, shape, quick in (
            ("q4_k", 1, OUT, ()),
            ("q4_k", 16, OUT, SM90),
            ("q4_k", 32, QKV, ()),
            ("q4_k", 64, OUT, ()),
            ("q4_k", 64, GATE_UP, ()),
            ("q4_k", 512, OUT, ()),
            ("q4_1", 16, OUT, SM80),
            ("q4_1", 64, OUT, ()),
            ("q5_k", 16, OUT, ()),
            ("q6_k", 64, OUT, ()),
            ("q6_k", 2048, OUT, ()),
        )
    },
    **{
        f"{kind} M={M} {shape[0]}x{shape[1]}": Case(
            run=functools.partial(linear, M, shape, f"w4a16-{kind}", dtype),
            quick=quick,
            product="wgmma" if M <= 1024 else None,
        )
        for kind, M, shape, dtype, quick in (
            ("mxfp4", 1, OUT, BF16, ()),
            ("mxfp4", 16, OUT, BF16, SM90),
            ("mxfp4", 32, QKV, FP16, ()),
            ("mxfp4", 64, GATE_UP, BF16, ()),
            ("mxfp4", 512, (2880, 2880), BF16, ()),
            ("mxfp4", 2048, OUT, BF16, ()),
            ("nvfp4", 8, OUT, FP16, ()),
            ("nvfp4", 16, OUT, BF16, SM80),
            ("nvfp4", 64, OUT, BF16, ()),
            ("nvfp4", 64, GATE_UP, BF16, ()),
            ("nvfp4", 512, OUT, BF16, ()),
        )
    },
    "q4_k for a norm": Case(run=lambda: linear(32, OUT, "q4_k", consumer="norm"), product="wgmma"),
    "w4a16 dequantized": Case(run=lambda: linear(2048, (128, 128), "w4a16-sym"), quick=SM80),
}
ATTENTION = {
    "decode, split": Case(
        run=lambda: attention([1]), quick=("sm_89", "sm_90", "sm_100"), product="mma"
    ),
    "decode, many": Case(run=lambda: attention([1] * 256, 512), product="mma"),
    "decode to limbs": Case(
        run=lambda: attention([1], limbs=LimbForm(bits=4, with_sums=True)), product="mma"
    ),
    "decode, int8": Case(
        run=lambda: attention([1] * 64, 1024, pages=INT8), quick=SM80, product="mma"
    ),
    "decode, int8, split, window": Case(
        run=lambda: attention([1], pages=INT8, window=5000), product="mma"
    ),
    "decode, int8, head 64": Case(
        run=lambda: attention([1] * 64, 1024, D=64, pages=INT8), product="mma"
    ),
    "decode, int4": Case(
        run=lambda: attention([1] * 64, 4096, pages=INT4_PAGES),
        quick=("sm_80", "sm_90"),
        product="mma",
    ),
    "decode, int4, split, window": Case(
        run=lambda: attention([1], pages=INT4_PAGES, window=5000), product="mma"
    ),
    "decode, int4, head 64, soft cap": Case(
        run=lambda: attention([1] * 64, 1024, D=64, pages=INT4_PAGES, soft_cap=30.0),
        product="mma",
    ),
    "decode, int4, head 256, sinks": Case(
        run=lambda: attention([1] * 16, D=256, group=8, pages=INT4_PAGES, sinks=True),
        product="mma",
    ),
    "decode, float8, soft cap": Case(
        run=lambda: attention([1] * 64, 1024, pages=FP8, soft_cap=30.0), product="mma", least=89
    ),
    "chunk": Case(
        run=lambda: attention([2048, 2048]),
        quick=SM90,
        product="wgmma",
    ),
    "chunk, page 128": Case(run=lambda: attention([2048, 2048], page=128), product="wgmma"),
    "chunk, head 256, window": Case(
        run=lambda: attention([2048], D=256, group=2, window=1024), product="wgmma"
    ),
    "chunk, head 80, float16, split": Case(
        run=lambda: attention([128], 32768, D=80, group=7, page=64, dtype=FP16), product="wgmma"
    ),
    "chunk, window, soft cap": Case(
        run=lambda: attention([2048], window=1000, soft_cap=30.0), product="wgmma"
    ),
    "decode, head 256, window, soft cap": Case(
        run=lambda: attention([1] * 32, 4096, D=256, group=2, window=1000, soft_cap=50.0),
        product="mma",
    ),
    "chunk, head 256, window, soft cap": Case(
        run=lambda: attention([2048], D=256, group=2, window=1000, soft_cap=50.0),
        product="wgmma",
    ),
    "chunk, int4": Case(
        run=lambda: attention([2048], pages=INT4_PAGES), quick=SM90, product="wgmma"
    ),
    "chunk, int4, head 64, float16": Case(
        run=lambda: attention([2048], D=64, pages=INT4_PAGES, dtype=FP16), product="wgmma"
    ),
    "chunk, int4, head 256, window": Case(
        run=lambda: attention([2048], D=256, group=2, pages=INT4_PAGES, window=1000), product="mma"
    ),
    "chunk, int4, head 64, float32": Case(
        run=lambda: attention([2048], D=64, pages=INT4_PAGES, dtype=FP32)
    ),
    "chunk, int8": Case(run=lambda: attention([2048], pages=INT8), product="wgmma"),
    "chunk, int8, head 256": Case(
        run=lambda: attention([2048], D=256, group=2, pages=INT8), product="wgmma"
    ),
    "chunk, int8, one scale": Case(
        run=lambda: attention([128], 32768, D=80, group=7, pages=INT8, static=True, dtype=FP16),
        product="wgmma",
    ),
    "chunk, float8, head 256": Case(
        run=lambda: attention([2048], D=256, group=2, pages=FP8), product="wgmma", least=89
    ),
    "chunk, float8, window, soft cap": Case(
        run=lambda: attention([2048], pages=FP8, window=1000, soft_cap=30.0),
        product="wgmma",
        least=89,
    ),
    "chunk, float32": Case(run=lambda: attention([2048], dtype=FP32)),
    "kv write": Case(run=lambda: kv_write(rotate=False)),
    "kv write, int8": Case(run=lambda: kv_write(pages=INT8, rotate=False)),
    "rope and kv write": Case(run=kv_write, quick=("sm_80", "sm_89", "sm_120")),
    "rope and kv write, int8, norms": Case(run=lambda: kv_write(pages=INT8, norm=True)),
    "rope and kv write, int8, widest": Case(run=lambda: kv_write(D=1024, pages=INT8)),
    "rope and kv write, float8": Case(run=lambda: kv_write(pages=FP8), least=89),
    "rope and kv write, int4": Case(run=lambda: kv_write(pages=INT4_PAGES), quick=SM90),
    "rope of split-K sums and kv write, int4, head 256, norms": Case(
        run=lambda: kv_write(40, D=256, pages=INT4_PAGES, norm=True, splits=5)
    ),
    "kv write, int4, head 32": Case(run=lambda: kv_write(D=32, pages=INT4_PAGES, rotate=False)),
    "rope of split-K sums and kv write, int8, norms": Case(
        run=lambda: kv_write(40, pages=INT8, norm=True, splits=5), quick=SM90
    ),
    "rope of most split-K sums and kv write": Case(run=lambda: kv_write(splits=16)),
    "rope of neighbours and kv write": Case(run=lambda: kv_write(interleaved=True)),
    "rope of split-K sums and kv write, head 256, float32 norms": Case(
        run=lambda: kv_write(40, D=256, norm=True, splits=5, norm_dtype=FP32)
    ),
}
ROWWISE = {
    "quantize": Case(run=lambda: quantize(4096), quick=("sm_120",)),
    "quantize, widest": Case(run=lambda: quantize(2**15)),
    "quantize to float8": Case(run=lambda: quantize(2**14, FLOATS), least=89),
    "norm": Case(run=lambda: norm(4096), quick=("sm_89", "sm_100")),
    "norm of split-K sums": Case(run=lambda: norm(4096, 7)),
    "norm of split-K sums, widest": Case(run=lambda: norm(8192, 4), quick=SM90),
    "norm of most split-K sums": Case(run=lambda: norm(2048, 16)),
    "norm and quantize": Case(run=lambda: norm(2**13, rounding=INTEGERS)),
    "norm and quantize, widest": Case(run=lambda: norm(2**14, rounding=INTEGERS)),
    "norm of split-K sums and quantize": Case(run=lambda: norm(2**12, 7, INTEGERS)),
    "norm of a norm": Case(run=lambda: norm(4096, 7, branch=norm_behind(4096))),
    "norm of a norm, widest, float32": Case(
        run=lambda: norm(8192, 4, branch=norm_behind(8192, FP32), dtype=FP32)
    ),
    "sum of a norm": Case(run=lambda: norm(4096, branch=norm_behind(4096), weighted=False)),
    "norm of a product": Case(run=lambda: norm(4096, 7, branch=ops.Branch(factor=0.22))),
    "norm of a norm and quantize, widest": Case(
        run=lambda: norm(2**14, rounding=INTEGERS, branch=norm_behind(2**14))
    ),
    "norm of a norm to limbs": Case(run=lambda: norm_to_limbs(SYMMETRIC, branch=norm_behind(4096))),
    "gelu": Case(run=lambda: activate("gelu_tanh", 1, 28672)),
    "gelu and quantize": Case(run=lambda: activate("gelu_tanh", 1000, 28672, ROUNDED)),
    "gelu to limbs": Case(run=lambda: activate("gelu_tanh", 4, 8192, SYMMETRIC)),
    "silu": Case(run=lambda: activate("silu", 1, 28672)),
    "silu and quantize": Case(run=lambda: activate("silu", 1000, 28672, ROUNDED)),
    "silu and quantize, few rows": Case(run=lambda: activate("silu", 1, 28672, ROUNDED)),
    "silu and quantize, widest": Case(
        run=lambda: activate("silu", 1, 2**16, ROUNDED), quick=("sm_80", "sm_120")
    ),
    "limbs": Case(run=lambda: ops.to_limbs(empty(4, 4096), SYMMETRIC)),
    "limbs, asymmetric": Case(run=lambda: ops.to_limbs(empty(4, 4096), ASYMMETRIC)),
    "norm to limbs": Case(run=lambda: norm_to_limbs(SYMMETRIC)),
    "norm of parts to limbs": Case(run=lambda: norm_to_limbs(SYMMETRIC, K=2048, splits=16)),
    "norm of parts to limbs, wide": Case(run=lambda: norm_to_limbs(SYMMETRIC, splits=16)),
    "norm to limbs, asymmetric": Case(run=lambda: norm_to_limbs(ASYMMETRIC)),
    "silu to limbs": Case(run=lambda: activate("silu", 4, 8192, SYMMETRIC)),
    "silu to limbs, asymmetric": Case(run=lambda: activate("silu", 4, 8192, ASYMMETRIC)),
    "layer norm": Case(run=lambda: layer_norm(4096), quick=SM90),
    "layer norm and quantize": Case(run=lambda: layer_norm(4096, ROUNDED)),
    "layer norm to limbs": Case(run=lambda: layer_norm(4096, SYMMETRIC)),
    "relu, not gated": Case(run=lambda: activate("relu", 1, 16384, gated=False), quick=SM90),
    "gelu by erf and quantize": Case(
        run=lambda: activate("gelu", 1000, 16384, ROUNDED, gated=False)
    ),
    "relu to limbs": Case(run=lambda: activate("relu", 4, 4096, SYMMETRIC, gated=False)),
    "sampling": Case(run=sample, quick=SM90),
}
EXPERTS = {
    "experts w4a16 M=1": Case(
        run=lambda: moe.experts(1, moe.QWEN3_30B, "w4a16-sym"), quick=SM90, product="wgmma"
    ),
    "experts w4a16 M=16": Case(
        run=lambda: moe.experts(16, moe.MIXTRAL, "w4a16-asym"), product="wgmma"
    ),
    "experts w4a16 M=2": Case(
        run=lambda: moe.experts(2, moe.MIXTRAL, "w4a16-asym"), product="wgmma"
    ),
    "experts w4a16 M=8": Case(
        run=lambda: moe.experts(8, moe.MIXTRAL, "w4a16-sym"), quick=SM90, product="wgmma"
    ),
    "experts w4a16 M=32": Case(
        run=lambda: moe.experts(32, moe.QWEN3_30B, "w4a16-sym"), product="wgmma"
    ),
    "experts w4a16 M=64": Case(
        run=lambda: moe.experts(64, moe.QWEN3_30B, "w4a16-sym"), product="wgmma"
    ),
    "experts w4a16 M=128": Case(
        run=lambda: moe.experts(128, moe.MIXTRAL, "w4a16-asym"), quick=SM90, product="wgmma"
    ),
    "experts w4a16 M=4096": Case(
        run=lambda: moe.experts(4096, moe.MIXTRAL, "w4a16-sym"), product="wgmma"
    ),
    "experts without a gate, w4a16 M=8": Case(
        run=lambda: moe.experts(8, moe.NEMOTRON_3_NANO, "w4a16-sym-g64"), product="wgmma"
    ),
    "few experts with GELU": Case(
        run=lambda: moe.experts(8, moe.GEMMA_4, "w4a16-sym-g64"), product="wgmma"
    ),
    "experts without a gate, bf16 M=512": Case(
        run=lambda: moe.experts(512, moe.NEMOTRON_3_NANO, None), product="wgmma"
    ),
    "experts w8a16 M=16": Case(
        run=lambda: moe.experts(16, moe.GPT_OSS, "w8a16-sym-g32"), product="wgmma"
    ),
    **{
        f"experts {kind} M={M}": Case(
            run=functools.partial(moe.experts, M, shape, f"w4a16-{kind}"),
            quick=quick,
            product="wgmma",
        )
        for kind, M, shape, quick in (
            ("mxfp4", 1, moe.GPT_OSS, SM90),
            ("mxfp4", 16, moe.GPT_OSS, ()),
            ("mxfp4", 64, moe.GPT_OSS, ()),
            ("mxfp4", 1024, moe.GPT_OSS, SM80),
            ("nvfp4", 4, moe.QWEN3_30B, ()),
            ("nvfp4", 512, moe.QWEN3_30B, ()),
        )
    },
    "experts w8a8 M=8": Case(run=lambda: moe.experts(8, moe.QWEN3_30B, "w8a8"), product="wgmma"),
    "experts w8a8 M=512": Case(run=lambda: moe.experts(512, moe.MIXTRAL, "w8a8"), product="wgmma"),
    "experts w8a8-fp8 M=1": Case(
        run=lambda: moe.experts(1, moe.QWEN3_30B, "w8a8-fp8"), product="wgmma", least=89
    ),
    "experts w8a8-fp8-block M=512": Case(
        run=lambda: moe.experts(512, moe.QWEN3_30B, "w8a8-fp8-block"),
        product="wgmma",
        least=89,
    ),
    "wanted experts and pairs": Case(run=lambda: moe.wanted(128, moe.QWEN3_30B)),
    "experts bf16 M=4": Case(run=lambda: moe.experts(4, moe.QWEN3_30B, None), product="wgmma"),
    "experts bf16 M=1024": Case(run=lambda: moe.experts(1024, moe.GPT_OSS, None), product="wgmma"),
    "delta net, 8 requests of one token": Case(run=lambda: delta_net(8, 1)),
    "delta net, verifications": Case(run=lambda: delta_net(8, 4, most_rows=4)),
    "delta net, a prompt": Case(run=lambda: delta_net(1, 200), quick=SM90, product="wgmma"),
    "delta net, heads of 256": Case(run=lambda: delta_net(1, 200, K=256), product="mma"),
    "delta net, prompts in float16": Case(run=lambda: delta_net(3, 100, FP16), product="mma"),
    "delta net, prompts in float32": Case(run=lambda: delta_net(3, 100, FP32)),
    "delta net, fixed order": Case(run=lambda: delta_net(1, 200, kernel="fixed_order")),
    "delta net, fixed order, verifications": Case(
        run=lambda: delta_net(8, 4, most_rows=4, kernel="fixed_order")
    ),
    "mamba2, fixed order": Case(run=lambda: mamba2(1, 200, kernel="fixed_order")),
    "mamba2, fixed order, verifications": Case(
        run=lambda: mamba2(8, 4, most_rows=4, kernel="fixed_order")
    ),
    "mamba2, 8 requests of one token": Case(run=lambda: mamba2(8, 1)),
    "mamba2, verifications": Case(run=lambda: mamba2(8, 4, most_rows=4)),
    "mamba2, a prompt": Case(run=lambda: mamba2(1, 200), quick=SM90, product="wgmma"),
    "mamba2, states of 256": Case(run=lambda: mamba2(1, 200, N=256)),
    "mamba2, prompts in float16": Case(run=lambda: mamba2(3, 100, FP16)),
    "mamba2, prompts in float32": Case(run=lambda: mamba2(3, 100, FP32)),
    "short convolution": Case(run=lambda: [short_conv(8, 1), short_conv(1, 200)]),
    "latent attention, decode": Case(
        run=lambda: latent_attention([1], 16), quick=SM90, product="mma"
    ),
    "latent attention, decode of 20 heads": Case(
        run=lambda: latent_attention([1] * 8, 20), quick=SM90, product="mma"
    ),
    "latent attention, decode of 128 rows": Case(
        run=lambda: latent_attention([1] * 128, 128), product="mma"
    ),
    "latent attention, a prompt": Case(
        run=lambda: latent_attention([500], 16), quick=SM90, product="mma"
    ),
    "latent attention, 20 heads in float16": Case(
        run=lambda: latent_attention([1, 40], 20, dtype=FP16), product="mma"
    ),
    "fixed order, decode": Case(
        run=lambda: attention([1], kernel="fixed_order"), quick=SM90, product="mma"
    ),
    "fixed order, decode of many": Case(
        run=lambda: attention([1] * 64, D=80, group=7, window=1000, kernel="fixed_order"),
        product="mma",
    ),
    "fixed order, verify": Case(
        run=lambda: attention([4] * 2, 1024, D=64, soft_cap=30.0, kernel="fixed_order"),
        product="mma",
    ),
    "chunk, sinks": Case(
        run=lambda: attention([2048], D=64, group=8, window=128, sinks=True), product="wgmma"
    ),
    "fixed order, decode with sinks": Case(
        run=lambda: attention([1], D=64, group=8, sinks=True, kernel="fixed_order"), product="mma"
    ),
    "fixed order, chunk with sinks": Case(
        run=lambda: attention([2048], D=64, group=8, sinks=True, kernel="fixed_order"),
        product="wgmma",
    ),
    "fixed order, chunk": Case(
        run=lambda: attention([2048], kernel="fixed_order"), quick=SM90, product="wgmma"
    ),
    "fixed order, chunk with images": Case(
        run=lambda: attention(
            [2048], D=256, group=2, window=1024, images=True, kernel="fixed_order"
        )
    ),
    "fixed order, chunk in a window": Case(
        run=lambda: attention([2048], window=1000, soft_cap=30.0, kernel="fixed_order"),
        product="wgmma",
    ),
    "decode, head 512": Case(run=lambda: attention([1] * 16, 4096, D=512, group=8), product="mma"),
    "chunk, head 512": Case(
        run=lambda: attention([2048], 4096, D=512, group=8), quick=SM90, product="mma"
    ),
    "chunk, head 512, int8": Case(
        run=lambda: attention([2048], 4096, D=512, group=8, pages=INT8), product="mma"
    ),
    "decode, ALiBi": Case(
        run=lambda: attention([1] * 64, 2048, group=1, alibi=True), product="mma"
    ),
    "chunk, ALiBi": Case(
        run=lambda: attention([2048], group=1, alibi=True), quick=SM90, product="wgmma"
    ),
    "decode, chunked attention": Case(
        run=lambda: attention([1] * 64, 16384, group=5, chunk_size=8192), product="mma"
    ),
    "chunk, chunked attention": Case(
        run=lambda: attention([2048], 16384, group=5, chunk_size=8192), product="wgmma"
    ),
    "fixed order over 8 bits, decode": Case(
        run=lambda: attention([1], pages=torch.int8, kernel="fixed_order"),
        quick=SM90,
        product="mma",
    ),
    "fixed order over 8 bits, chunk": Case(
        run=lambda: attention([2048], pages=torch.float8_e4m3fn, kernel="fixed_order"), least=89
    ),
    "fixed order over 8 bits, chunk in a window": Case(
        run=lambda: attention(
            [2048], pages=torch.int8, window=1000, soft_cap=30.0, kernel="fixed_order"
        )
    ),
    "latent attention in fixed order, decode": Case(
        run=lambda: latent_attention([1], 16, kernel="fixed_order"), quick=SM90, product="mma"
    ),
    "latent attention in fixed order, decode of 128 rows": Case(
        run=lambda: latent_attention([1] * 128, 128, kernel="fixed_order"), product="mma"
    ),
    "latent attention in fixed order, a prompt": Case(
        run=lambda: latent_attention([500], 16, kernel="fixed_order"), product="mma"
    ),
    "latent attention in fixed order, 8 bits": Case(
        run=lambda: latent_attention([1, 40], 20, codes=INT8, kernel="fixed_order"), product="mma"
    ),
    "heads' products, 1 row": Case(run=lambda: heads_product(1), product="mma"),
    "heads' products, 500 rows": Case(run=lambda: heads_product(500)),
    "latent attention in float32": Case(run=lambda: latent_attention([1, 40], 16, dtype=FP32)),
    "lora qkv T=1": Case(run=lambda: lora(1, 4096, (4096, 1024, 1024)), quick=SM90, product="mma"),
    "lora qkv fixed order T=1": Case(
        run=lambda: lora(1, 4096, (4096, 1024, 1024), kernel="fixed_order"), product="mma"
    ),
    "lora gate_up fixed order T=2048": Case(
        run=lambda: lora(2048, 4096, (14336, 14336), rank=64, kernel="fixed_order"), product="mma"
    ),
    "lora down T=32": Case(run=lambda: lora(32, 14336, (4096,), slots=64, parts=4), product="mma"),
    "lora gate_up T=2048": Case(
        run=lambda: lora(2048, 4096, (14336, 14336), rank=64), product="wgmma"
    ),
    **{
        f"{scheme} of adapters M={M}{' split' if consumer else ''} {name}": Case(
            run=functools.partial(adapted, scheme, M, sizes, K, consumer),
            quick=SM90 if M in (1, 16) else (),
            product="mma" if M <= 4 else "wgmma",
        )
        for scheme, M, name, sizes, K, consumer in ADAPTED
    },
    "drafts of 1": Case(run=lambda: drafts(1, 3), quick=SM90),
    "drafts of 64, by chance": Case(run=lambda: drafts(64, 5, "by chance")),
    "drafts of 8, known": Case(run=lambda: drafts(8, 128, "known")),
    "draft input": Case(run=lambda: draft_input(64, 4096)),
    "draft input as limbs": Case(run=lambda: draft_input(1, 4096, SYMMETRIC), quick=SM90),
    "draft input as limbs, asymmetric": Case(run=lambda: draft_input(4, 5120, ASYMMETRIC)),
    "route": Case(run=lambda: moe.route(moe.Routing(num_experts=128, top_k=8))),
    "route in groups": Case(run=lambda: moe.route(moe.IN_GROUPS), quick=SM90),
}
RANKS = {
    "all-reduce of 2, one shot": Case(run=lambda: ranks.all_reduce(2, "one_shot")),
    "all-reduce of 8, one shot": Case(
        run=lambda: ranks.all_reduce(8, "one_shot"), quick=("sm_80", "sm_100")
    ),
    "all-reduce of 8, one shot, float32": Case(run=lambda: ranks.all_reduce(8, "one_shot", FP32)),
    "all-reduce of 2, two shots": Case(run=lambda: ranks.all_reduce(2, "two_shot")),
    "all-reduce of 8, two shots": Case(run=lambda: ranks.all_reduce(8, "two_shot"), quick=SM90),
    "norm over 2 ranks": Case(run=lambda: ranks.norm(2)),
    "norm over 2 ranks, more rows": Case(run=lambda: ranks.norm(2, M=8)),
    "norm over 2 ranks, widest": Case(run=lambda: ranks.norm(2, M=8, C=2**14)),
    "norm of split-K sums over 2 ranks": Case(run=lambda: ranks.norm(2, M=8, splits=4)),
    "norm of split-K sums over 4 ranks": Case(run=lambda: ranks.norm(4, M=8, splits=7)),
    "norm over 8 ranks": Case(run=lambda: ranks.norm(8)),
    "norm of split-K sums over 8 ranks": Case(
        run=lambda: ranks.norm(8, M=8, splits=4), quick=("sm_80", "sm_100")
    ),
    "norm of split-K sums over 4 ranks, widest": Case(
        run=lambda: ranks.norm(4, M=8, C=2**14, splits=4)
    ),
    "norm of a norm over 2 ranks and quantize": Case(
        run=lambda: ranks.norm(2, M=8, form=INTEGERS, branch=True), quick=SM90
    ),
    "norm over 2 ranks and quantize to float8": Case(
        run=lambda: ranks.norm(2, form=FLOATS), least=89
    ),
    "norm over 2 ranks to limbs": Case(run=lambda: ranks.norm(2, form=SYMMETRIC)),
    "norm of split-K sums over 8 ranks to limbs, asymmetric": Case(
        run=lambda: ranks.norm(8, M=4, splits=2, form=ASYMMETRIC)
    ),
}
CASES: dict[str, Case] = _products() | MORE_PRODUCTS | ATTENTION | ROWWISE | EXPERTS | RANKS
