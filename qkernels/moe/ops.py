"""Mixture-of-experts operations: each checks its arguments, then runs a kernel.

Legend: see qkernels/ops.py; E experts, k experts per token.
"""

import functools
from dataclasses import replace

import torch

from qkernels import dispatch
from qkernels.checks import check_float, check_tensor, expect_ndim
from qkernels.errors import KernelError
from qkernels.moe.adapted.weights import ExpertAdapters
from qkernels.moe.config import ExpertsPlan
from qkernels.moe.experts import ExpertsProblem, ExpertWeights, PreparedExperts, shape_of, spec_of
from qkernels.moe.routing import Routes, Routing
from qkernels.moe.rows import EXPERTS, ROUTE, ROUTE_TOKENS
from qkernels.moe.stack import products_fault, stack_fault
from qkernels.operands.split_k import LinearOutput
from qkernels.problem import FLOAT_DTYPES, Problem
from qkernels.tuning import table as tuning_table


def route(
    logits_ME: torch.Tensor,
    routing: Routing,
    correction_E: torch.Tensor | None = None,
    numbers_E: torch.Tensor | None = None,
) -> Routes:
    """Choose the experts of each token and their routing weights, from router logits [M, E].

    `correction_E`, float32, is added to the scores for the choice only. `numbers_E`, int32, maps
    the chosen experts to other ids: to those of a rank that holds some of the experts.
    """
    check_float("route logits", logits_ME)
    check_tensor("route logits", logits_ME, (None, routing.num_experts), FLOAT_DTYPES, logits_ME)
    if correction_E is not None:
        check_tensor(
            "route correction",
            correction_E,
            (routing.num_experts,),
            (torch.float32,),
            logits_ME,
        )
    _check_numbers(numbers_E, routing, logits_ME)
    run = dispatch.implementation(ROUTE, device=logits_ME.device.type, dtype=logits_ME.dtype)
    return run(logits_ME, routing, correction_E, numbers_E)


def _check_numbers(numbers_E: torch.Tensor | None, routing: Routing, x: torch.Tensor) -> None:
    if numbers_E is not None:
        check_tensor("route numbers", numbers_E, (routing.num_experts,), (torch.int32,), x)


def route_tokens(
    x_MC: torch.Tensor,
    weight_EC: torch.Tensor,
    routing: Routing,
    bias_E: torch.Tensor | None = None,
    correction_E: torch.Tensor | None = None,
    fixed_order: bool = False,
    numbers_E: torch.Tensor | None = None,
) -> Routes:
    """Run `route` on the router's logits x W^T + bias, computed in the weight's dtype.

    With `fixed_order`, a token's bits do not depend on the other tokens.
    """
    check_float("route_tokens x", x_MC)
    E, C = routing.num_experts, expect_ndim("route_tokens x", x_MC, 2)[1]
    check_tensor("route_tokens weight", weight_EC, (E, C), FLOAT_DTYPES, x_MC)
    if bias_E is not None:
        check_tensor("route_tokens bias", bias_E, (E,), (weight_EC.dtype,), x_MC)
    if correction_E is not None:
        check_tensor("route_tokens correction", correction_E, (E,), (torch.float32,), x_MC)
    _check_numbers(numbers_E, routing, x_MC)
    run = dispatch.implementation(ROUTE_TOKENS, device=x_MC.device.type, dtype=x_MC.dtype)
    return run(x_MC.contiguous(), weight_EC, routing, bias_E, correction_E, fixed_order, numbers_E)


def prepare_experts(
    weights: ExpertWeights,
    dtype: torch.dtype,
    device: torch.device | str,
    kernel: str | None = None,
) -> PreparedExperts:
    """Make one kernel's copy of a layer's experts. `weights` is not changed.

    `dtype` is the dtype of the activations. Raises KernelError if `kernel`, requested by name,
    cannot run.
    """
    device = torch.device(device)
    if dtype not in FLOAT_DTYPES:
        raise KernelError(
            "activations", f"expected float32, float16 or bfloat16, found {dtype}", "convert x"
        )
    hidden, inner = shape_of(weights.down[0])
    _check_shapes(weights, hidden, inner)
    fault = stack_fault(weights.gate_up) or stack_fault(weights.down) or products_fault(weights)
    first = weights.down[0]
    problem = Problem(
        device=device.type,
        dtype=dtype,
        requested=kernel,
        spec=spec_of(first),
        activation=getattr(first, "activation", None),
        out_features=hidden,
        in_features=inner,
        alike=fault,
        gated=weights.glu.gated,
        gelu=weights.glu.gelu,
        cut_after=weights.glu.cut_after,
    )
    row = dispatch.choose(EXPERTS, problem)
    prepared = dispatch.module_of(EXPERTS, row.name).prepare_experts(weights, dtype, device)
    return replace(prepared, problem=replace(prepared.problem, requested=kernel))


def _check_shapes(weights: ExpertWeights, hidden: int, inner: int) -> None:
    count, outputs = len(weights.down), weights.glu.outputs(inner)
    for name, matrices, shape in (
        ("gate_up", weights.gate_up, (outputs, hidden)),
        ("down", weights.down, (hidden, inner)),
    ):
        found = {shape_of(matrix) for matrix in matrices}
        if len(matrices) != count or found != {shape}:
            raise KernelError(
                f"experts {name}",
                f"expected {count} of {list(shape)}, found {sorted(found)}",
                "pass one matrix of this shape per expert",
            )
    for name, bias, width in (
        ("gate_up bias", weights.gate_up_bias_EN, outputs),
        ("down bias", weights.down_bias_EN, hidden),
    ):
        if bias is not None and bias.shape != (count, width):
            raise KernelError(
                f"experts {name}",
                f"expected {[count, width]}, found {list(bias.shape)}",
                "pass one row per expert",
            )


@functools.lru_cache(maxsize=2**14)
def _plan(problem: ExpertsProblem, M: int, tuned: int) -> ExpertsPlan:
    return dispatch.module_of(EXPERTS, problem.kernel).plan(problem, M)


def plan_experts(prepared: PreparedExperts, M: int) -> ExpertsPlan:
    """Return the cached plan of `experts` for M >= 1 tokens."""
    return _plan(prepared.problem, M, tuning_table.num_changes())


def experts(
    x_MC: torch.Tensor,
    routes: Routes,
    prepared: PreparedExperts,
    plan: ExpertsPlan | None = None,
    shared_MC: torch.Tensor | None = None,
    adapters: ExpertAdapters | None = None,
) -> LinearOutput:
    """Return the weighted sum over each token's experts, plus `shared_MC` if given: [M, C].

    An expert computes down(glu(gate_up(x))); the sum is weighted by `routes.weights_Mk`. Experts
    on other ranks (ExpertWeights.routed_experts) add nothing and cost nothing. With a plan whose
    output is "parts", the result is partial sums for the next norm. `adapters` adds the LoRA
    adapters of the tokens to both products, in portable kernels and without a plan.
    """
    problem = prepared.problem
    check_tensor("experts x", x_MC, (None, problem.hidden), (problem.dtype,), x_MC)
    M = x_MC.shape[0]
    check_tensor("experts ids", routes.ids_Mk, (M, problem.top_k), (torch.int32,), x_MC)
    check_tensor(
        "experts shares", routes.weights_Mk, tuple(routes.ids_Mk.shape), (torch.float32,), x_MC
    )
    if shared_MC is not None:
        check_tensor("experts shared", shared_MC, (M, problem.hidden), (problem.dtype,), x_MC)
    if adapters is not None:
        _check_adapters(adapters, problem, M, x_MC)
    if M == 0:
        return torch.empty_like(x_MC)
    if adapters is None:
        plan = plan or plan_experts(prepared, M)
    module = dispatch.module_of(EXPERTS, problem.kernel)
    return module.experts(x_MC.contiguous(), routes, prepared, plan, shared_MC, adapters)


def _check_adapters(
    adapters: ExpertAdapters, problem: ExpertsProblem, M: int, x_MC: torch.Tensor
) -> None:
    check_tensor("experts adapters slots", adapters.slots_M, (M,), (torch.int32,), x_MC)
    E, outputs = problem.num_experts, problem.inner * (2 if problem.gated else 1)
    for name, lora, N, K in (
        ("gate_up", adapters.gate_up, outputs, problem.hidden),
        ("down", adapters.down, problem.hidden, problem.inner),
    ):
        slices = 2 if name == "gate_up" and problem.gated else 1
        a_shape = (None, None, E, slices, K)
        check_tensor(f"experts adapters {name} A", lora.a_LRESK, a_shape, (problem.dtype,), x_MC)
        b_shape = (lora.num_slots, lora.max_rank, E, N)
        check_tensor(f"experts adapters {name} B", lora.b_LREN, b_shape, (problem.dtype,), x_MC)
