"""The problems that `qserve bench kernels` measures: one row of a table for each operation.

Shapes are Llama-3-8B's. Baselines run in the same process, on the same values: the bf16 product
reads the dequantized weight, since a GPU that is short of power multiplies other values faster
(4096 rows of gate_up: 1366 us on these, 1188 us on small normal ones).
"""

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from formats.packed import PackedWeight
from formats.scheme import CHANNEL, ActivationSpec, QuantSpec, Scheme
from formats.weights import with_activation
from qkernels import ops
from qkernels.bench import CEILINGS, Call, Case, Result, copies_needed, measure
from qkernels.errors import KernelError

LINEAR_SHAPES = {  # [N, K]
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
}
LINEAR_M = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
GROUP = 128

# keys of each request, query rows of each request
ATTENTION_SHAPES = {
    "1024x1": (1024, 1),
    "2048x1": (2048, 1),
    "4096x1": (4096, 1),
    "32768x1": (32768, 1),
    "8192x2048": (8192, 2048),
    "4096x512": (4096, 512),
}
QUERY_HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16

NORM_SHAPES = {"4096": 4096}
SILU_SHAPES = {"14336": 14336}
ELEMENTWISE_M = (1, 32, 256, 4096)

INT8 = ActivationSpec()  # a scale for each token

Baselines = frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchedOp:
    """`cases` yields the cases of one shape for several m, given the baselines asked for."""

    cases: Callable[[str, tuple[int, ...], Baselines], Iterator[Case]]
    shapes: dict[str, object]
    default_m: dict[str, tuple[int, ...]]  # shape -> m
    baselines: tuple[str, ...]


def random_weight(
    N: int, K: int, seed: int, bits: int = 4, group_size: int = GROUP
) -> PackedWeight:
    generator = torch.Generator("cuda").manual_seed(seed)
    spec = QuantSpec(bits=bits, symmetric=True, group_size=group_size)
    G = spec.num_groups(K)
    words = torch.randint(
        -(2**31), 2**31, (N, K * bits // 32), dtype=torch.int32, device="cuda", generator=generator
    )
    scales = (torch.rand(N, G, device="cuda", generator=generator) + 0.5) / 512
    zeros = torch.full((N, G), spec.symmetric_zero, dtype=torch.uint8, device="cuda")
    return PackedWeight(
        words_NW=words, scales_NG=scales.half(), zeros_NG=zeros, spec=spec, in_features=K
    )


def _w4a16(shape: str, ms: tuple[int, ...], baselines: Baselines) -> Iterator[Case]:
    yield from _weight_only(4, shape, ms, baselines)


def _w8a16(shape: str, ms: tuple[int, ...], baselines: Baselines) -> Iterator[Case]:
    yield from _weight_only(8, shape, ms, baselines - {"int_mm"})


def _weight_only(
    bits: int, shape: str, ms: tuple[int, ...], baselines: Baselines
) -> Iterator[Case]:
    N, K = LINEAR_SHAPES[shape]
    num_bytes = N * K * bits // 8
    packed = [random_weight(N, K, seed=i, bits=bits) for i in range(copies_needed(num_bytes))]
    weight_NK = packed[0].dequantize(torch.float64)
    weights = [ops.prepare_weight(each, torch.bfloat16) for each in packed]
    dense = int8 = rivals = ()
    if "cublas" in baselines:
        dense = [each.dequantize(torch.bfloat16) for each in packed[: copies_needed(2 * N * K)]]
    if "int_mm" in baselines:
        int8 = [each.codes().to(torch.int8) for each in packed[: copies_needed(N * K)]]
    if "gemlite" in baselines:
        rivals = [_gemlite_linear(each) for each in packed]
    for m in ms:
        x = torch.randn(m, K, device="cuda", dtype=torch.bfloat16)
        others: dict[str, list[Call]] = {}
        if dense:
            others["cublas"] = [lambda x=x, w=w: functional.linear(x, w) for w in dense]
        if int8 and m > 16:  # fewer rows are more than torch._int_mm takes
            codes = torch.randint(-127, 128, (m, K), dtype=torch.int8, device="cuda")
            others["int_mm"] = [lambda c=codes, w=w: torch._int_mm(c, w.t()) for w in int8]
        if rivals:
            others["gemlite"] = [lambda x=x, f=f: f(x) for f in rivals]
        yield Case(
            op=f"w{bits}a16",
            shape=shape,
            m=m,
            num_bytes=num_bytes + 2 * N * K // GROUP + 2 * m * (N + K),
            operations=2 * m * N * K,
            calls=[lambda x=x, w=w: ops.linear(x, w) for w in weights],
            want=x.double() @ weight_NK.t(),
            allowed_error=5e-3,
            baselines=others,
        )


def _w8a8(shape: str, ms: tuple[int, ...], baselines: Baselines) -> Iterator[Case]:
    """Rounding x to int8 included; the baselines get it as they need it."""
    N, K = LINEAR_SHAPES[shape]
    packed = [
        with_activation(
            random_weight(N, K, i, bits=8, group_size=CHANNEL), Scheme.parse("w8a8"), None
        )
        for i in range(copies_needed(N * K))
    ]
    weight_NK = packed[0].dequantize(torch.float64)
    weights = [ops.prepare_weight(each, torch.bfloat16) for each in packed]
    dense = []
    if "cublas" in baselines:
        dense = [each.dequantize(torch.bfloat16) for each in packed[: copies_needed(2 * N * K)]]
    for m in ms:
        x = torch.randn(m, K, device="cuda", dtype=torch.bfloat16)
        codes, scales = ops.quantize_input(x, packed[0].activation)
        others: dict[str, list[Call]] = {}
        if "codes" in baselines:  # ours, of an input that is rounded already
            others["codes"] = [
                lambda c=codes, s=scales, w=w: ops.linear_codes(c, s, w) for w in weights
            ]
        if dense:
            others["cublas"] = [lambda x=x, w=w: functional.linear(x, w) for w in dense]
        if "int_mm" in baselines and m > 16:  # fewer rows are more than torch._int_mm takes
            others["int_mm"] = [
                lambda c=codes, w=w: torch._int_mm(c, w.tensors["codes"].t()) for w in weights
            ]
        yield Case(
            op="w8a8",
            shape=shape,
            m=m,
            num_bytes=N * K + 4 * N + 2 * m * (N + K),
            operations=2 * m * N * K,
            operation_rate=2,
            calls=[lambda x=x, w=w: ops.linear(x, w) for w in weights],
            want=(codes.double() * scales.double()) @ weight_NK.t(),
            allowed_error=5e-3,
            baselines=others,
        )


def _gemlite_linear(packed: PackedWeight) -> Callable[[torch.Tensor], torch.Tensor]:
    from gemlite.helper import A16Wn

    return A16Wn(device="cuda", dtype=torch.bfloat16).from_weights(
        packed.codes(), packed.scales_NG, packed.zeros_NG, packed.spec.bits, GROUP
    )


def _paged_attention(shape: str, ms: tuple[int, ...], baselines: Baselines) -> Iterator[Case]:
    """m requests; their pages lie anywhere in a pool that no cache holds."""
    context, rows = ATTENTION_SHAPES[shape]
    H, J, D = QUERY_HEADS, KV_HEADS, HEAD_DIM
    X = context // PAGE
    for m in ms:
        copies = copies_needed(4 * m * context * J * D)
        pages = copies * m * X
        k_pages, v_pages = (
            torch.randn(pages, PAGE, J, D, device="cuda", dtype=torch.bfloat16) for _ in range(2)
        )
        tables = torch.randperm(pages, device="cuda").view(copies, m, X).int()
        starts = (torch.arange(m + 1, device="cuda") * rows).int()
        lengths = torch.full((m,), context, device="cuda", dtype=torch.int32)
        q = torch.randn(m * rows, H, D, device="cuda", dtype=torch.bfloat16)

        def call(table, q=q, k=k_pages, v=v_pages, starts=starts, lengths=lengths):
            return ops.paged_attention(
                q,
                k,
                v,
                table,
                starts,
                lengths,
                scale=HEAD_DIM**-0.5,
                window=None,
                max_query_len=rows,
                max_context_len=context,
            )

        def dense(pages, table=tables[0], m=m):
            return pages[table].view(m, context, J, D).transpose(1, 2)

        def attend(q, k, v, m=m, mask=None):
            mask = torch.ones(rows, context, dtype=torch.bool, device="cuda").tril(context - rows)
            return functional.scaled_dot_product_attention(
                q.view(m, rows, H, D).transpose(1, 2),
                k,
                v,
                attn_mask=None if rows == 1 else mask,
                enable_gqa=True,
            )

        k, v = dense(k_pages), dense(v_pages)
        # float32 and one request at a time: the scores of a chunk are large
        want = torch.cat(
            [
                attend(
                    q[i * rows : (i + 1) * rows].float(), k[i, None].float(), v[i, None].float(), 1
                )
                for i in range(m)
            ]
        )
        others: dict[str, list[Call]] = {}
        if "sdpa" in baselines and rows == 1:
            # contiguous keys, no pages: what torch has; cold where the keys exceed the cache
            others["sdpa"] = [lambda q=q, k=k, v=v, f=attend, m=m: f(q, k, v, m)] * 2
        seen = rows * context - rows * (rows - 1) // 2  # pairs of a query and a key
        yield Case(
            op="paged_attention",
            shape=shape,
            m=m,
            num_bytes=4 * m * context * J * D + 4 * m * rows * H * D,
            operations=4 * m * seen * H * D,
            calls=[lambda t=t, f=call: f(t) for t in tables],
            want=want.transpose(1, 2).reshape(m * rows, H, D),
            allowed_error=1e-2,
            baselines=others,
        )


def _add_rms_norm(shape: str, ms: tuple[int, ...], baselines: Baselines) -> Iterator[Case]:
    yield from _norm("add_rms_norm", shape, ms, baselines)


def _rms_norm(shape: str, ms: tuple[int, ...], baselines: Baselines) -> Iterator[Case]:
    yield from _norm("rms_norm", shape, ms, baselines)


def _norm(op: str, shape: str, ms: tuple[int, ...], baselines: Baselines) -> Iterator[Case]:
    C = NORM_SHAPES[shape]
    added = op == "add_rms_norm"
    weight = torch.rand(C, device="cuda", dtype=torch.bfloat16) + 0.5
    for m in ms:
        num_bytes = 2 * m * C * (4 if added else 2)
        x, y = torch.randn(2, copies_needed(num_bytes), m, C, device="cuda", dtype=torch.bfloat16)
        total = (x[0] + y[0] if added else x[0]).double()
        want = total * (total.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
        if added:
            calls = [
                lambda a=a, b=b: ops.add_rms_norm(a, b, weight, 1e-5)[0]
                for a, b in zip(x, y, strict=True)
            ]
        else:
            calls = [lambda a=a: ops.rms_norm(a, weight, 1e-5) for a in x]
        others: dict[str, list[Call]] = {}
        if "torch" in baselines:
            others["torch"] = [
                lambda a=a, b=b: functional.rms_norm(a + b if added else a, (C,), weight, 1e-5)
                for a, b in zip(x, y, strict=True)
            ]
        yield Case(
            op=op,
            shape=shape,
            m=m,
            num_bytes=num_bytes,
            operations=4 * m * C,
            calls=calls,
            want=want,
            allowed_error=5e-3,
            baselines=others,
        )


def _silu_and_mul(shape: str, ms: tuple[int, ...], baselines: Baselines) -> Iterator[Case]:
    width = SILU_SHAPES[shape]
    for m in ms:
        num_bytes = 6 * m * width
        x = torch.randn(copies_needed(num_bytes), m, 2 * width, device="cuda", dtype=torch.bfloat16)
        gate, up = x[0].double().chunk(2, dim=-1)
        others: dict[str, list[Call]] = {}
        if "torch" in baselines:
            others["torch"] = [
                lambda a=a: functional.silu(a[..., :width]) * a[..., width:] for a in x
            ]
        yield Case(
            op="silu_and_mul",
            shape=shape,
            m=m,
            num_bytes=num_bytes,
            operations=5 * m * width,
            calls=[lambda a=a: ops.silu_and_mul(a) for a in x],
            want=functional.silu(gate) * up,
            allowed_error=5e-3,
            baselines=others,
        )


def _silu_and_mul_quantize(shape: str, ms: tuple[int, ...], baselines: Baselines) -> Iterator[Case]:
    width = SILU_SHAPES[shape]
    for m in ms:
        num_bytes = 5 * m * width
        x = torch.randn(copies_needed(num_bytes), m, 2 * width, device="cuda", dtype=torch.bfloat16)
        yield _quantized_case(
            "silu_and_mul_quantize",
            shape,
            m,
            num_bytes,
            [lambda a=a: ops.silu_and_mul_quantize(a, INT8) for a in x],
            [lambda a=a: ops.quantize_input(ops.silu_and_mul(a), INT8) for a in x],
            baselines,
        )


def _add_rms_norm_quantize(shape: str, ms: tuple[int, ...], baselines: Baselines) -> Iterator[Case]:
    C = NORM_SHAPES[shape]
    weight = torch.rand(C, device="cuda", dtype=torch.bfloat16) + 0.5
    for m in ms:
        num_bytes = 7 * m * C
        x, y = torch.randn(2, copies_needed(num_bytes), m, C, device="cuda", dtype=torch.bfloat16)
        pairs = list(zip(x, y, strict=True))
        yield _quantized_case(
            "add_rms_norm_quantize",
            shape,
            m,
            num_bytes,
            [
                lambda a=a, b=b: ops.add_rms_norm_quantize(a, b, weight, 1e-5, INT8)
                for a, b in pairs
            ],
            [
                lambda a=a, b=b: ops.quantize_input(ops.add_rms_norm(a, b, weight, 1e-5)[0], INT8)
                for a, b in pairs
            ],
            baselines,
        )


def _quantized_case(
    op: str,
    shape: str,
    m: int,
    num_bytes: int,
    fused: list[Call],
    apart: list[Call],
    baselines: Baselines,
) -> Case:
    """Checked, and timed, against the two operations in turn."""

    def decoded(result: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return result[0].float() * result[1]

    return Case(
        op=op,
        shape=shape,
        m=m,
        num_bytes=num_bytes,
        operations=8 * m * int(shape),
        calls=fused,
        values=decoded,
        want=decoded(apart[0]()),
        allowed_error=5e-3,
        baselines={"apart": apart} if "apart" in baselines else {},
    )


OPS: dict[str, BenchedOp] = {
    "w4a16": BenchedOp(
        cases=_w4a16,
        shapes=LINEAR_SHAPES,
        default_m=dict.fromkeys(LINEAR_SHAPES, LINEAR_M),
        baselines=("cublas", "int_mm", "gemlite"),
    ),
    "w8a16": BenchedOp(
        cases=_w8a16,
        shapes=LINEAR_SHAPES,
        default_m=dict.fromkeys(LINEAR_SHAPES, LINEAR_M),
        baselines=("cublas", "gemlite"),
    ),
    "w8a8": BenchedOp(
        cases=_w8a8,
        shapes=LINEAR_SHAPES,
        default_m=dict.fromkeys(LINEAR_SHAPES, LINEAR_M),
        baselines=("codes", "cublas", "int_mm"),
    ),
    "paged_attention": BenchedOp(
        cases=_paged_attention,
        shapes=ATTENTION_SHAPES,
        default_m={
            "1024x1": (32, 128),
            "2048x1": (1,),
            "4096x1": (8, 32, 128),
            "32768x1": (1,),
            "8192x2048": (1,),
            "4096x512": (4,),
        },
        baselines=("sdpa",),
    ),
    "rms_norm": BenchedOp(
        cases=_rms_norm,
        shapes=NORM_SHAPES,
        default_m=dict.fromkeys(NORM_SHAPES, ELEMENTWISE_M),
        baselines=("torch",),
    ),
    "add_rms_norm": BenchedOp(
        cases=_add_rms_norm,
        shapes=NORM_SHAPES,
        default_m=dict.fromkeys(NORM_SHAPES, ELEMENTWISE_M),
        baselines=("torch",),
    ),
    "silu_and_mul": BenchedOp(
        cases=_silu_and_mul,
        shapes=SILU_SHAPES,
        default_m=dict.fromkeys(SILU_SHAPES, ELEMENTWISE_M),
        baselines=("torch",),
    ),
    "add_rms_norm_quantize": BenchedOp(
        cases=_add_rms_norm_quantize,
        shapes=NORM_SHAPES,
        default_m=dict.fromkeys(NORM_SHAPES, ELEMENTWISE_M),
        baselines=("apart",),
    ),
    "silu_and_mul_quantize": BenchedOp(
        cases=_silu_and_mul_quantize,
        shapes=SILU_SHAPES,
        default_m=dict.fromkeys(SILU_SHAPES, ELEMENTWISE_M),
        baselines=("apart",),
    ),
}

# Baselines that need a package: used only where it is installed, unless asked for by name.
NEEDS = {"gemlite": "gemlite"}


def available_baselines(names: tuple[str, ...]) -> Baselines:
    return frozenset(
        name for name in names if name not in NEEDS or importlib.util.find_spec(NEEDS[name])
    )


def select(
    op: str | None, shape: str | None, m: str | None, baseline: str | None
) -> list[tuple[BenchedOp, str, tuple[int, ...], Baselines]]:
    """What to measure. Each argument is a comma-separated list; None: all.

    Raises KernelError for a name that nothing has.
    """
    ops_asked = _names("--op", op, OPS)
    known_shapes = dict.fromkeys(s for name in ops_asked for s in OPS[name].shapes)
    shapes = _names("--shape", shape, known_shapes)
    known = dict.fromkeys(b for name in ops_asked for b in OPS[name].baselines)
    asked = _names("--baseline", baseline, (*known, "none")) if baseline else None
    try:
        ms = tuple(int(text) for text in m.split(",")) if m else None
    except ValueError:
        raise KernelError("--m", f"expected numbers such as 1,16,64, found {m!r}") from None
    if ms and min(ms) < 1:
        raise KernelError("--m", f"expected numbers from 1 on, found {min(ms)}")
    chosen = []
    for name in ops_asked:
        benched = OPS[name]
        if asked is None:
            baselines = available_baselines(benched.baselines)
        else:
            baselines = frozenset(asked) & frozenset(benched.baselines)
        for each in benched.shapes:
            if each in shapes:
                chosen.append((benched, each, ms or benched.default_m[each], baselines))
    return chosen


def _names(flag: str, text: str | None, known: Iterable[str]) -> tuple[str, ...]:
    names = tuple(text.split(",")) if text else tuple(known)
    for name in names:
        if name not in known:
            raise KernelError(flag, f"{name!r} is unknown", f"known: {', '.join(known)}")
    return names


def run(
    *,
    op: str | None = None,
    shape: str | None = None,
    m: str | None = None,
    baseline: str | None = None,
    show: Callable[[Result], None],
) -> list[Result]:
    """Measure and show each result as it comes. Raises KernelError without a GPU."""
    chosen = select(op, shape, m, baseline)
    if not torch.cuda.is_available():
        raise KernelError("bench kernels", "measures a GPU; torch sees none here")
    ceiling = CEILINGS.get(torch.cuda.get_device_name())
    results = []
    with torch.inference_mode():
        for benched, each, ms, baselines in chosen:
            for case in benched.cases(each, ms, baselines):
                results.append(measure(case, ceiling))
                show(results[-1])
    return results


def versions() -> str:
    """The line that every table of times starts with."""
    triton = importlib.metadata.version("triton")
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton}, bf16"
