"""Choice of experts in Triton, from router logits or from the hidden states that produce them.

Legend: M tokens, E experts, k experts per token, C hidden size.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from qkernels.gpu.config import ceil_div, power_of_two
from qkernels.gpu.launch import launch, launches_nothing, on_device
from qkernels.gpu.pdl import pdl_launch_and_wait, pdl_options
from qkernels.gpu.workspace import WORKSPACE_COUNTERS, workspace
from qkernels.linear.ops import fixed_order_linear
from qkernels.moe.routing import Routes, Routing
from qkernels.problem import HALF_DTYPES

# With more tokens, cuBLAS computes the logits: here the blocks of every token read the whole
# weight, from the L2.
ROUTER_MOST_TOKENS = 32
ROUTER_BLOCKS = 64  # approximate blocks per token; more weights per block would add latency
ROUTER_BLOCK = 4096  # weights that a block loads before the previous kernel has ended


def route(
    logits_ME: torch.Tensor,
    routing: Routing,
    correction_E: torch.Tensor | None = None,
    numbers_E: torch.Tensor | None = None,
) -> Routes:
    """Implement ops.route. Ties go to the lowest expert."""
    M, E = logits_ME.shape
    k = routing.top_k
    logits_ME = logits_ME.contiguous()
    ids_Mk = _new_ids(M, k, logits_ME.device)
    weights_Mk = torch.empty((M, k), dtype=torch.float32, device=logits_ME.device)
    if M == 0:
        return Routes(ids_Mk, weights_Mk)
    with on_device(logits_ME):
        launch(
            _route,
            (M,),
            logits_ME,
            correction_E,
            numbers_E,
            ids_Mk,
            weights_Mk,
            E,
            routing.factor,
            RULE=rule_of(routing),
            num_warps=1,
            **pdl_options(logits_ME, M),
        )
    return Routes(ids_Mk, weights_Mk)


def route_tokens(
    x_MC: torch.Tensor,
    weight_EC: torch.Tensor,
    routing: Routing,
    bias_E: torch.Tensor | None = None,
    correction_E: torch.Tensor | None = None,
    fixed_order: bool = False,
    numbers_E: torch.Tensor | None = None,
) -> Routes:
    """Implement ops.route_tokens. The last block of a token to end chooses its experts."""
    (M, C), E, k = x_MC.shape, routing.num_experts, routing.top_k
    device = x_MC.device
    if fixed_order and weight_EC.dtype in HALF_DTYPES:
        logits_ME = fixed_order_linear(x_MC.to(weight_EC.dtype), weight_EC, bias_E)
        return route(logits_ME, routing, correction_E, numbers_E)
    if fixed_order and M > WORKSPACE_COUNTERS:
        parts = [
            route_tokens(x, weight_EC, routing, bias_E, correction_E, fixed_order, numbers_E)
            for x in x_MC.split(WORKSPACE_COUNTERS)
        ]
        return Routes(*(torch.cat(of_parts) for of_parts in zip(*parts, strict=True)))
    if M == 0 or (M > ROUTER_MOST_TOKENS and not fixed_order):
        logits_ME = torch.nn.functional.linear(x_MC.to(weight_EC.dtype), weight_EC, bias_E)
        return route(logits_ME, routing, correction_E, numbers_E)
    logits_ME = torch.empty((M, E), dtype=weight_EC.dtype, device=device)
    ids_Mk = _new_ids(M, k, device)
    weights_Mk = torch.empty((M, k), dtype=torch.float32, device=device)
    _, counters = workspace(device)
    block_e = power_of_two(ceil_div(E, ROUTER_BLOCKS))
    with on_device(x_MC):
        launch(
            _route_tokens,
            (ceil_div(E, block_e), M),
            x_MC,
            weight_EC,
            bias_E,
            correction_E,
            numbers_E,
            logits_ME,
            ids_Mk,
            weights_Mk,
            counters,
            E,
            C,
            routing.factor,
            RULE=rule_of(routing),
            BE=block_e,
            BC=min(ROUTER_BLOCK // block_e, power_of_two(C)),
            num_warps=4,
            **pdl_options(x_MC, M),
        )
    return Routes(ids_Mk, weights_Mk)


def _new_ids(tokens: int, choices: int, device: torch.device) -> torch.Tensor:
    """Allocate ids of the chosen experts; filled with 0 while launches are only recorded.

    Experts in plain torch read the ids even then.
    """
    new = torch.zeros if launches_nothing() else torch.empty
    return new((tokens, choices), dtype=torch.int32, device=device)


@triton.jit
def _route_tokens(
    x_ptr,  # [M, C]
    weight_ptr,  # [E, C]
    bias_ptr,  # [E] or None
    correction_ptr,  # [E] or None
    numbers_ptr,  # [E] or None
    logits_ptr,  # [M, E]
    ids_ptr,  # [M, k]
    weights_ptr,  # [M, k]
    counters_ptr,  # zero, one for each token
    E,
    C,
    factor,
    RULE: tl.constexpr,
    BE: tl.constexpr,
    BC: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute logits of BE experts, rounded to their dtype. The last block then chooses experts."""
    block, token = tl.program_id(0), tl.program_id(1)
    e = block * BE + tl.arange(0, BE)
    c = tl.arange(0, BC)
    weight_ptrs = weight_ptr + e.to(tl.int64)[:, None] * C + c[None, :]
    inside = (e < E)[:, None] & (c < C)[None, :]
    # load the first weights before the previous kernel has ended
    weight = tl.load(weight_ptrs, mask=inside, other=0.0)
    if PDL:
        pdl_launch_and_wait()
    x_ptrs = x_ptr + token.to(tl.int64) * C + c
    sums = tl.zeros((BE, BC), tl.float32)
    for start in tl.range(0, C, BC):
        x = tl.load(x_ptrs + start, mask=start + c < C, other=0.0).to(tl.float32)
        sums += weight.to(tl.float32) * x[None, :]
        inside = (e < E)[:, None] & (start + BC + c < C)[None, :]
        weight = tl.load(weight_ptrs + start + BC, mask=inside, other=0.0)
    logits = tl.sum(sums, 1)
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    logits_ptrs = logits_ptr + token.to(tl.int64) * E + e
    tl.store(logits_ptrs, logits.to(logits_ptr.dtype.element_ty), mask=e < E)
    # every thread's logits are stored before one thread increments the counter
    tl.debug_barrier()
    counter_ptr = counters_ptr + token
    if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.debug_barrier()
        # with more experts, the comparison of all pairs would not fit into registers
        BY_RANK: tl.constexpr = RULE.padded_groups * RULE.in_group <= 128
        choose_experts(
            logits_ptr,
            correction_ptr,
            numbers_ptr,
            ids_ptr,
            weights_ptr,
            token,
            E,
            factor,
            RULE,
            BY_RANK,
        )
        tl.store(counter_ptr, 0)


@triton.jit
def _first_largest(values, order, NONE: tl.constexpr):
    """Return the lowest number in `order` among the entries with the largest value."""
    best = tl.max(values)
    return tl.min(tl.where(values == best, order, NONE))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """Compile-time constants of the choice."""

    scores: str
    normalized: bool
    rounded: bool
    top_k: int
    slots: int  # power of two, at least top_k
    groups: int
    padded_groups: int
    in_group: int  # power of two, at least the number of experts in a group
    top_groups: int
    by_two: bool
    jitter: float


def rule_of(routing: Routing) -> RoutingRule:
    """Return the routing rule as the kernel's constant, with sizes padded to powers of two."""
    E, G = routing.num_experts, routing.num_groups
    return RoutingRule(
        scores=routing.scores,
        normalized=routing.normalized,
        rounded=routing.rounded,
        top_k=routing.top_k,
        slots=power_of_two(routing.top_k),
        groups=G,
        padded_groups=power_of_two(G),
        in_group=power_of_two(E // G),
        top_groups=routing.top_groups,
        by_two=routing.group_score == "top2",
        jitter=routing.jitter,
    )


@triton.jit
def _route(
    logits_ptr,  # [M, E]
    correction_ptr,  # [E] or None
    numbers_ptr,  # [E] or None
    ids_ptr,  # [M, k]
    weights_ptr,  # [M, k]
    E,
    factor,
    RULE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        pdl_launch_and_wait()
    choose_experts(
        logits_ptr,
        correction_ptr,
        numbers_ptr,
        ids_ptr,
        weights_ptr,
        tl.program_id(0),
        E,
        factor,
        RULE,
        False,
    )


@triton.jit
def _one_by_one(choice, scores, mask, e, j, TOP_K: tl.constexpr):
    """Return (ids, routing weights) [SLOTS] of the TOP_K largest; ties go to the lowest id."""
    NONE: tl.constexpr = 1 << 30
    ids = tl.zeros_like(j)
    weights = tl.full(j.shape, -float("inf"), tl.float32)
    left = mask
    for i in tl.static_range(TOP_K):
        # only among experts not chosen yet, so that one is found even if all scores are NaN or -inf
        best_score = tl.max(tl.where(left, choice, -float("inf")))
        candidates = left & (choice >= best_score)
        chosen = tl.min(tl.where(candidates, e, NONE))
        chosen = tl.where(chosen == NONE, tl.min(tl.where(left, e, NONE)), chosen)
        weight = tl.sum(tl.where(e == chosen, tl.where(mask, scores, 0.0), 0.0))
        ids = tl.where(j == i, chosen, ids)
        weights = tl.where(j == i, weight, weights)
        left = left & (e != chosen)
    return ids, weights


@triton.jit
def _first_ranks(choice, scores, mask, e, j, TOP_K: tl.constexpr):
    """Choose as `_one_by_one` does, in parallel: an expert's rank is the count of those before it.

    `_one_by_one` needs four reductions for each choice, and each waits for all warps of the block.
    """
    SIZE: tl.constexpr = choice.shape[0] * choice.shape[1]
    # NaN sorts last, like -inf
    key = tl.where(choice > -float("inf"), choice, -float("inf")).reshape(SIZE)
    inside = mask.reshape(SIZE)
    i = tl.arange(0, SIZE)
    ahead = (key[:, None] > key[None, :]) | (
        (key[:, None] == key[None, :]) & (i[:, None] < i[None, :])
    )
    rank = tl.sum((ahead & inside[:, None]).to(tl.int32), 0)
    chosen = (rank[None, :] == j[:, None]) & inside[None, :]
    ids = tl.sum(tl.where(chosen, e.reshape(SIZE)[None, :], 0), 1)
    weights = tl.sum(tl.where(chosen, scores.reshape(SIZE)[None, :], 0.0), 1)
    return ids, tl.where(j < TOP_K, weights, -float("inf"))


@triton.jit
def _sqrt_softplus(x):
    """Return sqrt(log(1 + exp(x))). Small exponentials use a series: 1 + u would round them off."""
    u = tl.exp(tl.minimum(x, 20.0))
    series = u * (1 - u * (1 / 2 - u * (1 / 3 - u / 4)))
    y = tl.where(x > 20.0, x, tl.where(u < 0.03, series, tl.log(1 + u)))
    return tl.sqrt(y)


@triton.jit
def _sparsemixer(logits, ids, chosen_logits, mask, e, j, RULE: tl.constexpr):
    """Return routing weights [SLOTS].

    Each is the softmax of a chosen logit over the logits near it, of experts not yet chosen.
    """
    TOP_K: tl.constexpr = RULE.top_k
    REACH: tl.constexpr = 2 * RULE.jitter
    weights = tl.zeros_like(chosen_logits)
    left = mask
    for i in tl.static_range(TOP_K):
        best = tl.sum(tl.where(j == i, chosen_logits, 0.0))
        distance = (best - logits) / tl.maximum(tl.abs(logits), best)
        near = left & ~(distance > REACH)
        total = tl.sum(tl.where(near, tl.exp(logits - best), 0.0))
        weights = tl.where(j == i, 1 / total, weights)
        left = left & (e != tl.sum(tl.where(j == i, ids, 0)))
    return weights


@triton.jit
def choose_experts(
    logits_ptr,
    correction_ptr,
    numbers_ptr,
    ids_ptr,
    weights_ptr,
    token,
    E,
    factor,
    RULE: tl.constexpr,
    BY_RANK: tl.constexpr,
):
    """Choose a token's experts. Store their ids and routing weights."""
    NONE: tl.constexpr = 1 << 30
    SLOTS: tl.constexpr = RULE.slots
    TOP_K: tl.constexpr = RULE.top_k
    TOP_GROUPS: tl.constexpr = RULE.top_groups
    token = token.to(tl.int64)
    size = E // RULE.groups
    g, s = tl.arange(0, RULE.padded_groups), tl.arange(0, RULE.in_group)
    e = g[:, None] * size + s[None, :]
    mask = (g[:, None] < RULE.groups) & (s[None, :] < size)
    # .cg: other blocks of the same kernel may have written these
    logits_ptrs = logits_ptr + token * E + e
    logits = tl.load(logits_ptrs, mask=mask, other=-float("inf"), cache_modifier=".cg")
    logits = logits.to(tl.float32)
    if RULE.scores == "softmax":
        exps = tl.exp(logits - tl.max(logits))
        # multiply instead of dividing: with `_first_ranks` each thread may compute all scores
        scores = exps * (1 / tl.sum(exps))
    elif RULE.scores == "sigmoid":
        scores = 1 / (1 + tl.exp(-logits))
    elif RULE.scores == "sqrtsoftplus":
        scores = _sqrt_softplus(logits)
    else:
        scores = logits
    choice = scores
    if correction_ptr is not None:
        choice += tl.load(correction_ptr + e, mask=mask, other=0.0)
    choice = tl.where(mask, choice, -float("inf"))
    if RULE.groups > TOP_GROUPS:
        best = tl.max(choice, 1)
        if RULE.by_two:
            # if several scores equal the largest, leave out only one of them
            at = tl.min(tl.where(choice == best[:, None], s[None, :], NONE), 1)
            best += tl.max(tl.where(s[None, :] == at[:, None], -float("inf"), choice), 1)
        best = tl.where(g < RULE.groups, best, -float("inf"))
        kept = g < 0
        for _ in tl.static_range(TOP_GROUPS):
            chosen = _first_largest(best, g, NONE)
            kept |= g == chosen
            best = tl.where(g == chosen, -float("inf"), best)
        choice = tl.where(kept[:, None], choice, -float("inf"))
    j = tl.arange(0, SLOTS)
    if BY_RANK:
        ids, weights = _first_ranks(choice, scores, mask, e, j, TOP_K)
    else:
        ids, weights = _one_by_one(choice, scores, mask, e, j, TOP_K)
    if RULE.scores == "softmax_of_chosen":
        exps = tl.exp(weights - tl.max(weights))
        weights = exps / tl.sum(exps)
    elif RULE.scores == "sigmoid_of_chosen":
        weights = 1 / (1 + tl.exp(-weights))
    elif RULE.scores == "sparsemixer":
        weights = _sparsemixer(logits, ids, weights, mask, e, j, RULE)
    weights = tl.where(j < TOP_K, weights, 0.0)
    if RULE.normalized:
        weights = weights / (tl.sum(weights) + 1e-20)
    weights = weights * factor
    if RULE.rounded:
        weights = weights.to(logits_ptr.dtype.element_ty).to(tl.float32)
    if numbers_ptr is not None:
        ids = tl.load(numbers_ptr + ids, mask=j < TOP_K, other=0)
    tl.store(ids_ptr + token * TOP_K + j, ids, mask=j < TOP_K)
    tl.store(weights_ptr + token * TOP_K + j, weights, mask=j < TOP_K)
