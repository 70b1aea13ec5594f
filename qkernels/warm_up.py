"""Row and request counts that a warm-up must run once to launch every compiled kernel.

They follow from the plans and configs of the operations; nothing is launched here. Legend: M rows
of x, R requests, T tokens of a step.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping

from qkernels.attention.config import DECODE_MAX_ROWS, default_attention_config, prefill_split
from qkernels.attention.config import PREFILL_ROWS as PREFILL_TILE_ROWS
from qkernels.collective.config import FEW_ROWS, TILE_BYTES, Limits
from qkernels.gpu.config import ceil_div, power_of_two
from qkernels.gpu.pdl import PDL_MAX_ROWS
from qkernels.linear.ops import plan_linear
from qkernels.linear.plan import GemmPlan
from qkernels.linear.prepared import PreparedWeight
from qkernels.moe.config import sort_chunk
from qkernels.moe.experts import ExpertsProblem, PreparedExperts
from qkernels.moe.ops import plan_experts
from qkernels.moe.variants import Layer, adapted_plan, layer_of
from qkernels.operands.limbs import LimbForm, limb_tiles
from qkernels.operands.split_k import Consumer
from qkernels.rowwise.quantize import WIDE_ROWS_LAUNCH_FIRST

Weights = PreparedWeight | PreparedExperts
# A plan is made for every M up to EVERY_ROW. Beyond it plans depend on whole tiles: one M in
# ROWS_APART is planned, and if two neighbors differ, the M between them by bisection.
EVERY_ROW = 1024
ROWS_APART = 32


def row_boundaries(
    weights: Iterable[tuple[Weights, Consumer | None]],
    max_rows: int,
    sm_count: int,
    *,
    adapted: Mapping[tuple[int, int], tuple[int, ...]] | None = None,
) -> list[int]:
    """Return values of M up to `max_rows` that together launch every kernel of the layers.

    `adapted` is for a step with LoRA adapters: (inputs, outputs) of each linear with adapters to
    the `adapted` argument of plan_linear. The other linears of such a step take tensors, too.
    """
    found = {1, max_rows}
    found |= {PDL_MAX_ROWS + 1, WIDE_ROWS_LAUNCH_FIRST + 1, 2 * sm_count + 1}
    plans = {(weight.problem, consumer): weight for weight, consumer in weights}
    for (_, consumer), weight in plans.items():
        options = {}
        if adapted is not None and isinstance(weight, PreparedWeight):
            sizes = adapted.get((weight.in_features, weight.out_features))
            options = {"fused": sizes is not None, "adapted": sizes}
        found |= set(plan_boundaries(weight, max_rows, consumer, **options))
    return sorted(M for M in found if max_rows >= M)


def sum_boundaries(of: Limits, channels: int, item_bytes: int) -> list[int]:
    """Return the M from which a sum over ranks runs another kernel, or no longer uses PDL."""
    row = channels * item_bytes
    marks = PDL_MAX_ROWS * TILE_BYTES, of.one_shot, of.two_shot
    return sorted({1, FEW_ROWS + 1, of.rows + 1, *(mark // row + 1 for mark in marks)})


def plan_boundaries(
    weight: Weights, max_rows: int, consumer: Consumer | None = None, **options: object
) -> list[int]:
    """Return the smallest M, up to `max_rows`, of every distinct compiled kernel of a product.

    `options` are arguments of plan_linear.
    """
    if isinstance(weight, PreparedExperts):
        return _first_of_each_range(max_rows, lambda M: experts_compiled(weight, M))

    def compiled_for(M: int) -> object:
        return compiled(plan_linear(weight, M, consumer, **options), M)

    return _first_of_each_range(max_rows, compiled_for)


def compiled(plan: GemmPlan, M: int) -> object:
    """Return a key of the machine code that runs M rows. Equal keys share a kernel."""
    config = getattr(plan.config, "compiled", plan.config)
    tiles = limb_tiles(M) if isinstance(plan.operand, LimbForm) else 0
    tail = None if plan.tail is None else compiled(plan.tail, M - plan.rows)
    return plan.variant, config, plan.operand, tiles, plan.output, plan.adds_adapters, tail


def experts_compiled(experts: PreparedExperts, M: int) -> object:
    """Return a key of the machine code that runs M tokens through experts, as in `compiled`."""
    plan = plan_experts(experts, M)
    pairs = M * experts.problem.top_k
    if plan.variant == "sorted":
        return plan, sort_chunk(pairs)
    # a block that scans all (token, expert) pairs is sized for them; one token needs no expert list
    return plan, power_of_two(pairs), M == 1


def adapted_expert_boundaries(problems: Iterable[ExpertsProblem], max_rows: int) -> list[int]:
    """Return the smallest M, up to `max_rows`, of every kernel of experts with LoRA adapters."""
    found: set[int] = set()
    for problem in {each for each in problems if each.kernel == "triton"}:
        layer, k = layer_of(problem), problem.top_k

        def key(M: int, layer: Layer = layer, k: int = k) -> object:
            plan = adapted_plan(layer, M)
            is_sorted = plan.variant == "sorted"
            return plan, sort_chunk(M * k) if is_sorted else power_of_two(M * k)

        found |= set(_first_of_each_range(max_rows, key))
    return sorted(found)


def decode_boundaries(
    *,
    max_requests: int,
    max_tokens: int,
    max_context_len: int,
    page_size: int,
    heads_per_kv_head: int,
    **fixed: object,
) -> list[tuple[int, int, int]]:
    """Return (requests, tokens per request, keys) that together launch every decode kernel.

    Decode kernels also take chunks of a few tokens. `fixed` holds the other arguments of
    default_attention_config.
    """
    lengths = sorted({*_powers(page_size, max_context_len), max_context_len})
    counts = _powers(1, DECODE_MAX_ROWS // heads_per_kv_head)
    cases = [
        (R, count, keys)
        for count in counts
        for R in range(1, min(max_requests, max_tokens // count) + 1)
        for keys in lengths
    ]

    def config(case: tuple[int, int, int]) -> object:
        R, count, keys = case
        return default_attention_config(
            num_requests=R,
            max_query_len=count,
            max_context_len=keys,
            heads_per_kv_head=heads_per_kv_head,
            **fixed,
        )

    return _first_of_each(cases, config)


def prefill_boundaries(
    *,
    max_tokens: int,
    max_context_len: int,
    num_kv_heads: int,
    heads_per_kv_head: int,
    window: int | None,
    sm_count: int,
) -> list[tuple[int, int]]:
    """Return (tokens of one request, keys) that together launch every prefill kernel."""
    least = DECODE_MAX_ROWS // heads_per_kv_head + 1
    tokens = [T for T in sorted({least, *_powers(least, max_tokens), max_tokens}) if least <= T]
    lengths = sorted({*_powers(least, max_context_len), max_context_len})
    cases = [(T, keys) for T in tokens for keys in lengths if min(keys, max_tokens) >= T]

    def split(case: tuple[int, int]) -> int:
        T, keys = case
        tiles = max(1, ceil_div(T * heads_per_kv_head, PREFILL_TILE_ROWS)) * num_kv_heads
        return prefill_split(tiles, min(keys, window or keys), sm_count)

    return _first_of_each(cases, split)


def _powers(least: int, most: int) -> Iterator[int]:
    """Yield `least` and its doubles up to `most`."""
    while least <= most:
        yield least
        least *= 2


def _first_of_each_range(most: int, key: Callable[[int], object]) -> list[int]:
    """Return for every key the first number in 1..most that has it.

    A plan costs 0.1 ms, so beyond EVERY_ROW a range whose two ends share a key is assumed to have
    that key throughout.
    """
    found = {M: key(M) for M in range(1, min(most, EVERY_ROW) + 1)}

    def between(low: int, high: int) -> None:
        if high - low < 2 or found[low] == found[high]:
            return
        middle = (low + high) // 2
        found[middle] = key(middle)
        between(low, middle)
        between(middle, high)

    marks = [*range(EVERY_ROW, most, ROWS_APART), most]
    for low, high in itertools.pairwise(marks):
        found[high] = key(high)
        between(low, high)
    return _first_of_each(sorted(found), found.__getitem__)


def _first_of_each(cases: Iterable, key: Callable[[object], object]) -> list:
    """Return the first case of every key."""
    first: dict[object, object] = {}
    for case in cases:
        first.setdefault(key(case), case)
    return list(first.values())
