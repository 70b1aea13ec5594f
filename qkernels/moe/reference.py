"""Plain torch references of the mixture-of-experts operations; CPUs run them.

Legend: M tokens, E experts, k experts per token, C hidden size, I inner size.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F

from qkernels.choice import FIXED_ORDER, parse_choice
from qkernels.linear.ops import linear, prepare_weight
from qkernels.linear.prepared import PreparedWeight
from qkernels.moe.adapted.reference import add_term
from qkernels.moe.adapted.weights import ExpertAdapters
from qkernels.moe.config import ExpertsPlan
from qkernels.moe.experts import (
    ExpertList,
    ExpertMatrix,
    ExpertsProblem,
    ExpertWeights,
    PreparedExperts,
    shape_of,
    spec_of,
)
from qkernels.moe.routing import GEGLU, SILU, TINY, Glu, Routes, Routing


def route(
    logits_ME: torch.Tensor,
    routing: Routing,
    correction_E: torch.Tensor | None = None,
    numbers_E: torch.Tensor | None = None,
) -> Routes:
    """Reference of ops.route."""
    scores_ME = logits_ME.float()
    if routing.scores == "softmax":
        scores_ME = scores_ME.softmax(-1)
    elif routing.scores == "sigmoid":
        scores_ME = scores_ME.sigmoid()
    elif routing.scores == "sqrtsoftplus":
        scores_ME = F.softplus(scores_ME).sqrt()
    choice_ME = scores_ME if correction_E is None else scores_ME + correction_E
    if routing.top_groups < routing.num_groups:
        choice_MGS = choice_ME.unflatten(1, (routing.num_groups, -1))
        if routing.group_score == "max":
            best_MG = choice_MGS.amax(-1)
        else:
            best_MG = choice_MGS.topk(2, -1).values.sum(-1)
        chosen = _largest(best_MG, routing.top_groups)
        keep_MG = torch.zeros_like(best_MG, dtype=torch.bool).scatter(1, chosen, True)
        choice_ME = choice_MGS.masked_fill(~keep_MG[..., None], -torch.inf).flatten(1)
    ids_Mk = _largest(choice_ME, routing.top_k)
    weights_Mk = scores_ME.gather(1, ids_Mk)
    if routing.scores == "softmax_of_chosen":
        weights_Mk = weights_Mk.softmax(-1)
    elif routing.scores == "sigmoid_of_chosen":
        weights_Mk = weights_Mk.sigmoid()
    elif routing.scores == "sparsemixer":
        weights_Mk = _sparsemixer(scores_ME, ids_Mk, routing.jitter)
    if routing.normalized:
        weights_Mk = weights_Mk / (weights_Mk.sum(-1, keepdim=True) + TINY)
    weights_Mk = weights_Mk * routing.factor
    if routing.rounded:
        weights_Mk = weights_Mk.to(logits_ME.dtype).float()
    ids_Mk = ids_Mk.to(torch.int32) if numbers_E is None else numbers_E[ids_Mk]
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
    """Reference of ops.route_tokens."""
    if fixed_order and x_MC.shape[0] > 1:
        # scores row by row, too: on a CPU a sigmoid's bits depend on its SIMD lane
        rows = [
            route_tokens(x, weight_EC, routing, bias_E, correction_E, True, numbers_E)
            for x in x_MC.split(1)
        ]
        return Routes(*(torch.cat(of_rows) for of_rows in zip(*rows, strict=True)))
    logits_ME = F.linear(x_MC.to(weight_EC.dtype), weight_EC, bias_E)
    return route(logits_ME, routing, correction_E, numbers_E)


def _sparsemixer(logits_ME: torch.Tensor, ids_Mk: torch.Tensor, jitter: float) -> torch.Tensor:
    """Return routing weights [M, k] by the sparsemixer rule of Routing.scores."""
    weights, left_ME = [], logits_ME
    for ids_M1 in ids_Mk.split(1, dim=1):
        best_M1 = logits_ME.gather(1, ids_M1)
        distance_ME = (best_M1 - logits_ME) / logits_ME.abs().maximum(best_M1)
        near_ME = left_ME.masked_fill(distance_ME > 2 * jitter, -torch.inf)
        weights.append(near_ME.softmax(-1).gather(1, ids_M1))
        left_ME = left_ME.scatter(1, ids_M1, -torch.inf)
    return torch.cat(weights, 1)


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of the largest values in the last dim, descending; ties: lowest index."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def glu(x_M2I: torch.Tensor, kind: Glu) -> torch.Tensor:
    """Return activation(gate) * up as Glu defines it, for x = [gate, up].

    Without a gate, x is up [M, I] and the result is the square of its ReLU.
    """
    if not kind.gated:
        return F.relu(x_M2I).square()
    gate, up = x_M2I.chunk(2, dim=-1)
    if kind == SILU:
        return F.silu(gate) * up
    if kind == GEGLU:
        return F.gelu(gate, approximate="tanh") * up
    if kind.limit is not None:
        up = up.clamp(-kind.limit, kind.limit)
    if kind.cut_after:
        return F.silu(gate).clamp(max=kind.limit) * up
    if kind.limit is not None:
        gate = gate.clamp(max=kind.limit)
    return (up + kind.offset) * (gate * torch.sigmoid(gate * kind.alpha))


def prepare_experts(
    weights: ExpertWeights, dtype: torch.dtype, device: torch.device
) -> PreparedExperts:
    """Prepare each expert's matrices for `linear`."""
    hidden, inner = shape_of(weights.down[0])
    return PreparedExperts(
        gate_up=_list(weights.gate_up, weights.gate_up_bias_EN, dtype, device),
        down=_list(weights.down, weights.down_bias_EN, dtype, device),
        glu=weights.glu,
        problem=ExpertsProblem(
            kernel="reference",
            kind="list",
            spec=spec_of(weights.down[0]),
            activation=getattr(weights.down[0], "activation", None),
            num_experts=len(weights.down),
            routed_experts=weights.routed_experts or len(weights.down),
            top_k=weights.top_k,
            hidden=hidden,
            inner=inner,
            gated=weights.glu.gated,
            gelu=weights.glu.gelu,
            cut_after=weights.glu.cut_after,
            dtype=dtype,
            device=device,
        ),
    )


def _list(
    matrices: tuple[ExpertMatrix, ...],
    bias_EN: torch.Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
) -> ExpertList:
    members = [
        matrix.to(device, dtype)
        if isinstance(matrix, torch.Tensor)
        else prepare_weight(matrix, dtype, device)
        for matrix in matrices
    ]
    bias_EN = None if bias_EN is None else bias_EN.to(device, dtype)
    return ExpertList(members=tuple(members), bias_EN=bias_EN)


def plan(problem: ExpertsProblem, M: int) -> ExpertsPlan:
    return ExpertsPlan(variant="reference")


def experts(
    x_MC: torch.Tensor,
    routes: Routes,
    prepared: PreparedExperts,
    plan: ExpertsPlan | None = None,
    shared_MC: torch.Tensor | None = None,
    adapters: ExpertAdapters | None = None,
) -> torch.Tensor:
    """Reference of ops.experts, one expert at a time.

    It waits for the device, so a CUDA graph cannot capture it.
    """
    if parse_choice(prepared.problem.requested).only == FIXED_ORDER and x_MC.shape[0] > 1:
        rows = [
            experts(
                x_MC[m : m + 1],
                Routes(*(each[m : m + 1] for each in routes)),
                prepared,
                adapters=adapters and replace(adapters, slots_M=adapters.slots_M[m : m + 1]),
            )
            for m in range(x_MC.shape[0])
        ]
        out_MC = torch.cat(rows)
        return out_MC if shared_MC is None else out_MC + shared_MC
    ids_Mk, weights_Mk = routes
    total_MC = torch.zeros(x_MC.shape, dtype=torch.float32, device=x_MC.device)
    for expert in ids_Mk.unique().tolist():
        if expert == prepared.problem.num_experts:  # on another rank
            continue
        token, choice = (ids_Mk == expert).nonzero(as_tuple=True)
        x, slots = x_MC[token], None if adapters is None else adapters.slots_M[token]
        product = _product(x, prepared.gate_up, expert)
        if adapters is not None:
            product = add_term(product, x, slots, expert, adapters.gate_up)
        hidden = glu(product, prepared.glu)
        out = _product(hidden, prepared.down, expert)
        if adapters is not None:
            out = add_term(out, hidden, slots, expert, adapters.down)
        out = out.float()
        total_MC.index_add_(0, token, out * weights_Mk[token, choice, None])
    out_MC = total_MC.to(x_MC.dtype)
    return out_MC if shared_MC is None else out_MC + shared_MC


def _product(x: torch.Tensor, experts: ExpertList, number: int) -> torch.Tensor:
    weight = experts.members[number]
    bias = None if experts.bias_EN is None else experts.bias_EN[number]
    if isinstance(weight, PreparedWeight):
        return linear(x, weight, bias)
    return F.linear(x, weight, bias)
