"""Kernel variants of a layer's experts, one row each, and the choice of a variant for M tokens.

Plain Python, without tensors.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from formats.scheme import QuantSpec
from qkernels.choice import FIXED_ORDER, KernelChoice
from qkernels.gpu import device as gpu_device
from qkernels.moe.config import FEW_TOKENS, ExpertsPlan, few_plan, sorted_plan
from qkernels.moe.experts import ExpertsProblem
from qkernels.moe.sm90_few_tokens_config import few_tokens_tiles, group_fault
from qkernels.operands.limbs import K_STEP
from qkernels.wna16.layout import TILE_N, fp4_step, has_fp4, is_in_groups

ANY = KernelChoice()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The experts of a layer and the GPU that they are on."""

    kind: Literal["packed", "w4a8", "codes", "float"]
    spec: QuantSpec | None
    num_experts: int  # experts on all ranks, over which the pairs are distributed
    top_k: int
    hidden: int
    inner: int
    gated: bool
    gelu: bool
    cut_after: bool = False
    alike: bool = True  # both products have the same quantization
    sm_count: int
    shared_bytes: int  # most shared memory of a block
    lacks_sm90: str | None  # why this GPU cannot run sm_90 kernels; None: it can


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to run the two products."""

    name: str
    tokens: str  # which numbers of tokens it takes, for `explain`
    refuses: Callable[[Layer], str | None]  # why the layer cannot run; None: it can
    plan: Callable[[Layer, int], ExpertsPlan | None]  # (layer, M) -> plan; None: M is too large


def _refuses_few_tokens(layer: Layer) -> str | None:
    if layer.kind != "packed" or layer.spec.bits != 4:
        return "takes 4-bit weights with 16-bit activations"
    if not layer.alike:
        return "takes the same quantization in both products"
    if is_in_groups(layer.spec):
        return f"takes one scale for each K step, not one for {layer.spec.group} inputs"
    if not layer.gated:
        return "takes experts with a gate"
    if layer.gelu:
        return "takes SiLU, not GELU"
    if layer.cut_after:
        return "cuts gate before its activation, not after it"
    for size in (layer.hidden, layer.inner):
        if has_fp4(layer.spec):
            fault = None
            if fp4_step(size) != K_STEP:
                fault = f"takes sizes that steps of {K_STEP} inputs nearly fill, not {size}"
        else:
            fault = group_fault(layer.spec.group_length(size))
        if fault is not None:
            return fault
    if layer.hidden % TILE_N or 2 * layer.inner % TILE_N:
        return f"takes outputs divisible by {TILE_N}"
    return layer.lacks_sm90


def _sizes(layer: Layer, M: int) -> dict[str, int]:
    names = ("top_k", "num_experts", "hidden", "inner", "sm_count")
    return {"M": M} | {name: getattr(layer, name) for name in names}


def _few_tokens(layer: Layer, M: int) -> ExpertsPlan | None:
    tiles = few_tokens_tiles(**_sizes(layer, M))
    return None if tiles is None else tiles.plan(M=M, top_k=layer.top_k, hidden=layer.hidden)


def _few(layer: Layer, M: int) -> ExpertsPlan | None:
    return few_plan(**_sizes(layer, M))


def _sorted(layer: Layer, M: int) -> ExpertsPlan:
    return sorted_plan(
        M=M,
        top_k=layer.top_k,
        num_experts=layer.num_experts,
        shared_bytes=layer.shared_bytes,
        packed=layer.kind == "packed",
    )


def _fixed_order(layer: Layer, M: int) -> ExpertsPlan:
    """Return a plan that does not split K and adds the experts' outputs in a separate kernel.

    All variants sum a K step (or a group, if it is shorter) from zero, scale the sum and add it to
    the total, so they give the same bits. 4-bit floats and GGUF blocks are scaled before the
    product; for them only the portable kernels run.
    """
    portable = layer.spec is not None and (has_fp4(layer.spec) or is_in_groups(layer.spec))
    refused = portable or _refuses_few_tokens(layer)
    of_sm90 = None if refused else _few_tokens(layer, M)
    if of_sm90 is None:
        return adapted_plan(layer, M)
    return replace(of_sm90, down=replace(of_sm90.down, split=1), output="sum")


def adapted_plan(layer: Layer, M: int) -> ExpertsPlan:
    """Return the plan of a step with adapters of experts: portable kernels without split-K.

    Their results are added to before the activation and before the sum over experts.
    """
    plan = _few(layer, M) or _sorted(layer, M)
    return replace(plan, down=replace(plan.down, split=1), output="sum")


SM90_FEW_TOKENS = Variant(
    name="sm90_few_tokens",
    tokens="few tokens of an expert",
    refuses=_refuses_few_tokens,
    plan=_few_tokens,
)
# In order of preference; the last variant takes every M.
VARIANTS: tuple[Variant, ...] = (
    SM90_FEW_TOKENS,
    Variant(name="few", tokens=f"up to {FEW_TOKENS} tokens", refuses=lambda layer: None, plan=_few),
    Variant(
        name="sorted",
        tokens="token counts that no other variant takes",
        refuses=lambda layer: None,
        plan=_sorted,
    ),
)
# Batch-invariant: a token's bits do not depend on the other tokens (choice.py). Runs on request.
ON_REQUEST = Variant(
    name=FIXED_ORDER,
    tokens="any number of tokens, if requested by name",
    refuses=lambda layer: None,
    plan=_fixed_order,
)
NAMES = tuple(variant.name for variant in (*VARIANTS, ON_REQUEST))


def layer_of(problem: ExpertsProblem) -> Layer:
    """Return the problem's experts and GPU as a Layer."""
    names = ("kind", "spec", "top_k", "hidden", "inner", "gated", "gelu", "cut_after", "alike")
    return Layer(
        **{name: getattr(problem, name) for name in names},
        num_experts=problem.routed_experts,
        sm_count=gpu_device.sm_count(problem.device),
        shared_bytes=gpu_device.shared_bytes(problem.device),
        lacks_sm90=gpu_device.lacks_arch(problem.device, "sm_90"),
    )


@functools.lru_cache(maxsize=2**14)
def plan_experts(layer: Layer, M: int, choice: KernelChoice = ANY) -> ExpertsPlan:
    """Return the plan of the first variant that takes M tokens.

    A requested variant is used wherever it can run. A forbidden variant is never used, except for
    the last one, which runs if no other variant does.
    """
    asked = [each for each in (*VARIANTS, ON_REQUEST) if each.name == choice.only]
    for variant in asked + [each for each in VARIANTS if each.name not in choice.never]:
        if variant.refuses(layer) is None:
            plan = variant.plan(layer, M)
            if plan is not None:
                return plan
    return VARIANTS[-1].plan(layer, M)
