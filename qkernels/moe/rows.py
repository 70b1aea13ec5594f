"""Dispatch table of the mixture-of-experts operations."""

import torch

from qkernels.choice import FIXED_ORDER, parse_choice
from qkernels.dispatch import Kernel, Operation, reference, triton_or_reference
from qkernels.gpu import device as gpu_device
from qkernels.moe.config import fits
from qkernels.moe.variants import NAMES, ON_REQUEST, VARIANTS, Layer
from qkernels.problem import (
    HALF_DTYPES,
    QUANTIZE_MAX_INPUTS,
    Problem,
    has_float8_products,
    needs_triton,
    needs_triton_on_gpu,
    refuses_activation,
)
from qkernels.w4a8 import layout as w4a8
from qkernels.wna16.layout import kernel_spec, refuses_stack


def triton_experts(problem: Problem) -> str | None:
    """Return why Triton cannot run the experts; None: it can.

    `in_features` is the inner size, `out_features` the hidden size.
    """
    reason = needs_triton(problem)
    if reason is not None:
        return reason
    if problem.alike is not None:
        return problem.alike
    if problem.dtype not in HALF_DTYPES:
        return f"takes float16 and bfloat16, not {problem.dtype}"
    hidden, inner = problem.out_features, problem.in_features
    reason = fits(hidden, inner, problem.gated)
    if reason is not None:
        return reason
    spec, activation = problem.spec, problem.activation
    if spec is None:
        return None
    if activation is None:
        return refuses_stack(spec, (hidden, inner))
    if spec.bits == 4:
        return _refuses_w4a8(problem)
    if spec.bits != 8 or not spec.symmetric or spec.type != activation.type:
        return (
            "takes symmetric int8 or float8 on both sides, or symmetric 4-bit weights, not"
            f" {spec} and {activation}"
        )
    if spec.type == "float" and not has_float8_products():
        return "this GPU has no float8 products"
    if activation.per == "group":
        if (spec.group_size, activation.group_size) != (128, 128) or hidden % 128 or inner % 128:
            return "takes float8 in blocks of 128 inputs, of sizes divisible by 128"
        return None
    if spec.num_groups(inner) != 1 or spec.num_groups(hidden) != 1:
        return "takes a scale for each output, or float8 in blocks"
    return None


def _refuses_w4a8(problem: Problem) -> str | None:
    spec, activation = problem.spec, problem.activation
    if spec.type != "int" or not spec.symmetric:
        return f"takes symmetric 4-bit integer weights with 8-bit inputs, not {spec}"
    reason = refuses_activation(activation)
    if reason is not None:
        return reason
    for size in (problem.out_features, problem.in_features):
        group = spec.group_length(size)
        if group % w4a8.MIN_K_STEP or size % group:
            return f"takes groups divisible by {w4a8.MIN_K_STEP}, not {group} of {size}"
        if size > QUANTIZE_MAX_INPUTS:
            return f"holds a row in registers: at most {QUANTIZE_MAX_INPUTS} inputs, not {size}"
    if activation.type == "int":
        return None
    if problem.device == "cuda" and not has_float8_products():
        return "this GPU has no float8 products"
    if parse_choice(problem.requested).only == FIXED_ORDER:
        return "adds float8 products in an order that depends on the number of tokens"
    return None


def explain_variants(problem: Problem) -> list[tuple[str, str]]:
    """Return (variant, how many tokens it takes or why it takes none) for every variant."""
    spec, activation = problem.spec, problem.activation
    weight_only = spec is not None and activation is None
    if weight_only:
        spec = kernel_spec(spec, problem.in_features)
    layer = Layer(
        kind="float" if spec is None else "packed" if weight_only else _kind_of_codes(spec.bits),
        spec=spec,
        num_experts=1,  # why a variant refuses a layer does not depend on these zeros and ones
        top_k=1,
        hidden=problem.out_features,
        inner=problem.in_features,
        gated=problem.gated,
        gelu=problem.gelu,
        cut_after=problem.cut_after,
        sm_count=0,
        shared_bytes=0,
        lacks_sm90=gpu_device.lacks_arch(torch.device(problem.device), "sm_90"),
    )
    choice = parse_choice(problem.requested)
    return [
        (each.name, choice.explained(each.name, each.refuses(layer), each.tokens))
        for each in (*VARIANTS, ON_REQUEST)
    ]


def _kind_of_codes(bits: int) -> str:
    return "w4a8" if bits == 4 else "codes"


def fixed_order_on_cpu(problem: Problem) -> str | None:
    """Return why the reference does not run as the fixed-order kernel; None: it runs.

    It then computes each token alone.
    """
    if problem.requested != FIXED_ORDER:
        return "runs only if requested by name"
    return None if problem.device == "cpu" else "for a CPU: on a GPU it is a variant of triton"


ROUTE = triton_or_reference("moe", "route", "triton_route", needs_triton_on_gpu)
ROUTE_TOKENS = triton_or_reference("moe", "route_tokens", "triton_route", needs_triton_on_gpu)
EXPERTS = Operation(
    "experts",
    Kernel(
        name="triton",
        module="moe.triton_experts",
        priority=20,
        supports=triton_experts,
        variants=NAMES,
        explain_variants=explain_variants,
    ),
    reference("moe"),
    Kernel(
        name=FIXED_ORDER,
        module="moe.reference",
        priority=5,
        supports=fixed_order_on_cpu,
    ),
)
OPERATIONS = (ROUTE, ROUTE_TOKENS, EXPERTS)
