"""What every card is asked to compile: calls of the public operations, by name and group.

A call launches what the card would run: its default config, the kernels that make the operand, the
reduction. `quick`: compiled in every run of the tests; the others behind --exhaustive.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from formats.fp8 import Fp8Weight
from formats.packed import PackedWeight
from formats.scheme import ActivationSpec, QuantSpec, Scheme
from formats.weights import with_activation
from qkernels import ops
from qkernels.operands.limbs import LimbForm
from qkernels.operands.split_k import Consumer, SplitKPartials, split_heads
from qkernels.sampling.settings import SampleRow, SampleSettings
from tests.qkernels.compile.cards import empty

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT8, FP8 = torch.int8, torch.float8_e4m3fn
QKV, O, GATE_UP, DOWN = (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`least`: the first architecture that has what it takes."""

    group: str
    run: Callable[[], object]
    quick: tuple[str, ...] = ()  # cards that compile it in every run
    least: int = 80


def weight_of(scheme: Scheme, N: int, K: int) -> PackedWeight | Fp8Weight:
    """A weight of zeros: only its shapes and types count."""
    spec, activation = scheme.weight, scheme.activation
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
    weight = ops.prepare_weight(weight_of(Scheme.parse(scheme), N, K), dtype, kernel=kernel)
    plan = ops.plan_linear(weight, M, consumer, fused=False)
    ops.linear(empty(M, K, dtype=dtype), weight, empty(N, dtype=dtype) if bias else None, plan)


def attention(
    counts: list[int],
    context: int = 8192,
    D: int = 128,
    group: int = 4,
    dtype: torch.dtype = BF16,
    pages: torch.dtype | None = None,
    page: int = 16,
    window: int | None = None,
    soft_cap: float | None = None,
    limbs: LimbForm | None = None,
    static: bool = False,
) -> None:
    R, J = len(counts), 8
    P = R * context // page
    k_pages, v_pages = (empty(P, page, J, D, dtype=pages or dtype) for _ in range(2))
    scales = {}
    if pages is not None:
        one = torch.ones(()).expand(P, page, J) if static else torch.ones(P, J, page).mT
        scales = {"k_scales_PBJ": one, "v_scales_PBJ": one}
    ops.paged_attention(
        empty(sum(counts), J * group, D, dtype=dtype),
        k_pages,
        v_pages,
        torch.zeros(R, context // page, dtype=torch.int32),
        torch.tensor([0, *counts]).cumsum(0).int(),
        torch.full((R,), context, dtype=torch.int32),
        scale=D**-0.5,
        window=window,
        soft_cap=soft_cap,
        max_query_len=max(counts),
        max_context_len=context,
        limbs=limbs,
        **scales,
    )


def kv_write(
    tokens: int = 1,
    D: int = 128,
    pages: torch.dtype | None = None,
    rotate: bool = True,
    norm: bool = False,
    splits: int = 0,
) -> None:
    H, J, B, P = 32, 8, 16, 64
    k_pages, v_pages = (empty(P, B, J, D, dtype=pages or BF16) for _ in range(2))
    slots = torch.arange(tokens)
    scales = [] if pages is None else [torch.ones(P, B, J) for _ in range(2)]
    heads = empty(tokens, (H + 2 * J) * D)
    if splits:
        parts = empty(splits, tokens, (H + 2 * J) * D, dtype=FP32)
        heads = SplitKPartials(parts=parts, dtype=BF16)
    q, k, v = split_heads(heads, (H, J, J), D)
    if not rotate:
        ops.write_kv_(k, v, k_pages, v_pages, slots, *scales)
        return
    norms = {"q_norm_D": empty(D), "k_norm_D": empty(D), "eps": 1e-5} if norm else {}
    cos_sin = empty(64, D, dtype=FP32)
    ops.rope_write_kv_(
        q, k, v, cos_sin, slots, k_pages, v_pages, slots, *scales, **norms, inputs_ready=True
    )


def norm(C: int, splits: int = 0, rounding: ActivationSpec | None = None, M: int = 1) -> None:
    x = empty(M, C)
    if splits:
        x = SplitKPartials(parts=empty(splits, M, C, dtype=FP32), dtype=BF16)
    inputs = x, empty(M, C), empty(C), 1e-5
    if rounding is None:
        ops.add_rms_norm(*inputs)
    else:
        ops.add_rms_norm_quantize(*inputs, rounding, None)


def limbs(op: str, form: LimbForm, M: int = 4, K: int = 4096) -> None:
    inputs = {
        "to_limbs": (empty(M, K),),
        "add_rms_norm_limbs": (empty(M, K), empty(M, K), empty(K), 1e-5),
        "silu_and_mul_limbs": (empty(M, 2 * K),),
    }
    getattr(ops, op)(*inputs[op], form)


def sample() -> None:
    rows = [SampleRow(temperature=0.7, top_k=50, top_p=0.9, num_logprobs=3)] * 2
    ops.sample_(empty(2, 128256), SampleSettings.of(rows))


ALL = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
SM90 = ("sm_90",)
SMALL = ("sm_89", "sm_120")  # cards with 99 KB of shared memory
INTEGERS = ActivationSpec()
FLOATS = ActivationSpec(type="float")


def _linear_cases() -> dict[str, Case]:
    """W4A16 and W8A16: each variant at each of its shapes of config."""
    quick = {
        ("w4a16-sym", 1, O): SM90,
        ("w4a16-sym", 16, GATE_UP): ALL,
        ("w4a16-sym", 64, GATE_UP): ("sm_80", *SM90, "sm_120"),
        ("w4a16-asym", 256, O): (*SMALL, *SM90),
        ("w4a16-sym", 512, QKV): SM90,
        ("w8a16-sym", 256, O): SM90,
    }
    shapes = [(M, O) for M in (1, 4, 8, 32, 64, 128, 256)] + [(1, GATE_UP), (4, GATE_UP)]
    shapes += [(M, GATE_UP) for M in (8, 16, 64, 128)] + [(M, QKV) for M in (8, 64, 512, 1024)]
    shapes += [(M, DOWN) for M in (5, 16, 32, 64, 256, 512)]
    cases = {}
    for scheme in ("w4a16-sym", "w4a16-asym", "w8a16-sym", "w8a16-asym"):
        for M, (N, K) in shapes:
            cases[f"{scheme} M={M} {N}x{K}"] = Case(
                group="wna16",
                run=lambda M=M, shape=(N, K), scheme=scheme: linear(M, shape, scheme),
                quick=quick.get((scheme, M, (N, K)), ()),
            )
    for name, arguments in {
        "group 32": (64, O, "w4a16-sym-g32"),
        "group 32, 8 bits": (16, O, "w8a16-sym-g32"),
        "groups of 256 in float16": (512, DOWN, "w4a16-sym-g256", FP16),
        "float16 asymmetric, limbs": (2, GATE_UP, "w4a16-asym", FP16),
        "float16 asymmetric, split": (5, DOWN, "w4a16-asym", FP16, True),
        "8 bits, float16 asymmetric": (256, O, "w8a16-asym", FP16, True),
        "for a norm": (32, O, "w4a16-sym", BF16, False, "norm"),
        "for a rotation, 64 rows": (64, QKV, "w4a16-asym", BF16, True, "rope"),
    }.items():
        cases[f"W4A16 {name}"] = Case(
            group="wna16",
            run=lambda arguments=arguments: linear(*arguments),
            quick=SM90 if name in ("for a norm", "float16 asymmetric, split") else (),
        )
    cases["W4A16 dequantized"] = Case(
        group="wna16",
        run=lambda: linear(2048, (128, 128), "w4a16-sym"),
        quick=("sm_80",),
    )
    return cases


def _w8a8_cases() -> dict[str, Case]:
    cases = {}
    quick = {
        ("w8a8", 1): ALL,
        ("w8a8", 256): SM90,
        ("w8a8", 1024): ALL,
        ("w8a8-fp8", 64): (*SM90, "sm_89"),
        ("w8a8-fp8-block", 4096): SM90,
    }
    shapes = [(1, O), (16, GATE_UP), (64, QKV), (128, DOWN), (128, O), (256, QKV), (1024, QKV)]
    for scheme in ("w8a8", "w8a8-fp8", "w8a8-fp8-block"):
        for M, (N, K) in [*shapes, (4096, O)]:
            cases[f"{scheme} M={M} {N}x{K}"] = Case(
                group="w8a8",
                run=lambda M=M, shape=(N, K), scheme=scheme: linear(M, shape, scheme, bias=True),
                quick=quick.get((scheme, M), ()),
                least=80 if scheme == "w8a8" else 89,
            )
    return cases


def _attention_cases() -> dict[str, Case]:
    many = [1] * 256
    form = LimbForm(bits=4, with_sums=True)
    calls = {
        "decode, split": (ALL, lambda: attention([1])),
        "decode, many": ((), lambda: attention(many, 512)),
        "decode to limbs": (SM90, lambda: attention([1], limbs=form)),
        "decode, int8": (("sm_80", *SM90), lambda: attention([1] * 64, 1024, pages=INT8)),
        "decode, int8, split, window": ((), lambda: attention([1], pages=INT8, window=5000)),
        "decode, int8, head 64": ((), lambda: attention([1] * 64, 1024, D=64, pages=INT8)),
        "chunk": (ALL, lambda: attention([2048, 2048])),
        "chunk, page 128": ((), lambda: attention([2048, 2048], page=128)),
        "chunk, head 256, window": ((), lambda: attention([2048], D=256, group=2, window=1024)),
        "chunk, head 80, float16, split": (
            (),
            lambda: attention([128], 32768, D=80, group=7, page=64, dtype=FP16),
        ),
        "chunk, window, soft cap": ((), lambda: attention([2048], window=1000, soft_cap=30.0)),
        "chunk, int8": (SM90, lambda: attention([2048], pages=INT8)),
        "chunk, int8, head 256": ((), lambda: attention([2048], D=256, group=2, pages=INT8)),
        "chunk, int8, one scale": (
            (),
            lambda: attention([128], 32768, D=80, group=7, pages=INT8, static=True, dtype=FP16),
        ),
        "chunk, float32": ((), lambda: attention([2048], dtype=FP32)),
        "kv write": ((), lambda: kv_write(rotate=False)),
        "kv write, int8": ((), lambda: kv_write(pages=INT8, rotate=False)),
        "rope and kv write": (("sm_80",), kv_write),
        "rope and kv write, int8, norms": ((), lambda: kv_write(pages=INT8, norm=True)),
        "rope of split-K sums and kv write, int8, norms": (
            SM90,
            lambda: kv_write(40, pages=INT8, norm=True, splits=5),
        ),
        "rope of most split-K sums and kv write": ((), lambda: kv_write(splits=16)),
        "rope and kv write, int8, widest": ((), lambda: kv_write(D=1024, pages=INT8)),
    }
    cases = {
        name: Case(group="attention", run=run, quick=quick) for name, (quick, run) in calls.items()
    }
    floats = {
        "decode, float8, soft cap": lambda: attention([1] * 64, 1024, pages=FP8, soft_cap=30.0),
        "chunk, float8, head 256": lambda: attention([2048], D=256, group=2, pages=FP8),
        "chunk, float8, window, soft cap": lambda: attention(
            [2048], pages=FP8, window=1000, soft_cap=30.0
        ),
        "rope and kv write, float8": lambda: kv_write(pages=FP8),
    }
    return cases | {
        name: Case(
            group="attention",
            run=run,
            least=89,
            quick=SM90 if name == "chunk, float8, window, soft cap" else (),
        )
        for name, run in floats.items()
    }


def _rowwise_cases() -> dict[str, Case]:
    def rounded(C: int, spec: ActivationSpec = INTEGERS, dtype: torch.dtype = BF16) -> None:
        ops.quantize_input(empty(1, C, dtype=dtype), spec)

    calls = {
        "quantize": (("sm_120",), lambda: rounded(4096)),
        "quantize, widest": ((), lambda: rounded(2**15)),
        "norm": (("sm_89", *SM90), lambda: norm(4096)),
        "norm of split-K sums": ((), lambda: norm(4096, 7)),
        "norm of split-K sums, widest": (SM90, lambda: norm(8192, 4)),
        "norm of most split-K sums": ((), lambda: norm(2048, 16)),
        "norm and quantize": ((), lambda: norm(2**13, rounding=INTEGERS)),
        "norm and quantize, widest": (SM90, lambda: norm(2**14, rounding=INTEGERS)),
        "norm of split-K sums and quantize": ((), lambda: norm(2**12, 7, INTEGERS)),
        "silu": ((), lambda: ops.silu_and_mul(empty(1, 28672))),
        "silu and quantize, few rows": (
            SM90,
            lambda: ops.silu_and_mul_quantize(empty(1, 28672), INTEGERS, None),
        ),
        "silu and quantize": (
            (),
            lambda: ops.silu_and_mul_quantize(empty(1000, 28672), INTEGERS, None),
        ),
        "silu and quantize, widest": (
            ("sm_80",),
            lambda: ops.silu_and_mul_quantize(empty(1, 2**16), INTEGERS, None),
        ),
        "sampling": (("sm_80", "sm_90"), sample),
    }
    for form in (LimbForm(bits=4), LimbForm(bits=8, with_sums=True)):
        for op in ("to_limbs", "add_rms_norm_limbs", "silu_and_mul_limbs"):
            quick = SM90 if op == "add_rms_norm_limbs" and form.with_sums else ()
            calls[f"{op}, {form.bits} bits"] = quick, lambda op=op, form=form: limbs(op, form)
    cases = {
        name: Case(group="rowwise", run=run, quick=quick) for name, (quick, run) in calls.items()
    }
    cases["quantize to float8"] = Case(
        group="rowwise", run=lambda: rounded(2**14, FLOATS), least=89
    )
    return cases


CASES: dict[str, Case] = (
    _linear_cases() | _w8a8_cases() | _attention_cases() | _rowwise_cases()
)
