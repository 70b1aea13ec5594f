"""The experts of a layer in Triton, on any GPU: two grouped products and the sum over experts.

Every grid depends only on the number of tokens, and nothing waits for the GPU, so CUDA graphs can
capture the kernels. Equal inputs give equal bits.

Legend: M tokens, E experts, k experts per token, P = M k pairs, C hidden size, I inner size.
"""

import torch
import triton.language as tl

from qkernels.choice import parse_choice
from qkernels.gpu.config import power_of_two
from qkernels.gpu.device import has_pdl, uses_ptx
from qkernels.gpu.launch import launch, on_device
from qkernels.moe.adapted.weights import ExpertAdapters
from qkernels.moe.config import ExpertsConfig, ExpertsPlan, num_blocks
from qkernels.moe.experts import (
    ExpertsProblem,
    ExpertStack,
    ExpertWeights,
    PreparedExperts,
    shape_of,
)
from qkernels.moe.routing import Glu, Routes
from qkernels.moe.stack import SCALE_INPUTS, products_alike, stack, stack_bits
from qkernels.moe.tiles_triton import ExpertsTile
from qkernels.moe.triton_active import active_experts, active_pairs
from qkernels.moe.triton_packed import experts_packed, experts_w4a8
from qkernels.moe.triton_pairs import sort_pairs, sum_pairs
from qkernels.moe.triton_plain import experts_plain
from qkernels.moe.tuned import measured_plan
from qkernels.moe.variants import layer_of, plan_experts
from qkernels.operands.split_k import LinearOutput, SplitKPartials
from qkernels.rowwise import ops as rowwise
from qkernels.w4a8 import layout as w4a8
from qkernels.wna16.layout import TILE_N, k_step
from qkernels.wna16.prepack import code_offset
from qkernels.wna16.unpack.fp4_layout import fp4_words
from qkernels.wna16.unpack.groups import grouping
from qkernels.wna16.unpack.words import MAGIC_WORD

PLAIN_BLOCK_K = {1: 128, 2: 64}  # bytes per element -> inputs of a tile
TRITON_DTYPE = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def prepare_experts(
    weights: ExpertWeights, dtype: torch.dtype, device: torch.device
) -> PreparedExperts:
    """Stack the weights of all experts, once for each of the two products."""
    bits = stack_bits(weights)
    gate_up = stack(
        weights.gate_up,
        dtype=dtype,
        device=device,
        gated=weights.glu.gated,
        bits=bits,
        bias_EN=weights.gate_up_bias_EN,
    )
    down = stack(
        weights.down,
        dtype=dtype,
        device=device,
        gated=False,
        bits=bits,
        bias_EN=weights.down_bias_EN,
    )
    hidden, inner = shape_of(weights.down[0])
    return PreparedExperts(
        gate_up=gate_up,
        down=down,
        glu=weights.glu,
        problem=ExpertsProblem(
            kernel="triton",
            kind=down.kind,
            spec=down.spec,
            activation=down.activation,
            num_experts=len(weights.down),
            routed_experts=weights.routed_experts or len(weights.down),
            top_k=weights.top_k,
            hidden=hidden,
            inner=inner,
            gated=weights.glu.gated,
            gelu=weights.glu.gelu,
            cut_after=weights.glu.cut_after,
            alike=products_alike(weights),
            dtype=dtype,
            device=device,
        ),
    )


def plan(problem: ExpertsProblem, M: int) -> ExpertsPlan:
    """Return the plan for M tokens on the problem's GPU."""
    choice = parse_choice(problem.requested)
    measured = measured_plan(problem, M, choice)
    return measured or plan_experts(layer_of(problem), M, choice)


def experts(
    x_MC: torch.Tensor,
    routes: Routes,
    prepared: PreparedExperts,
    plan: ExpertsPlan | None,
    shared_MC: torch.Tensor | None = None,
    adapters: ExpertAdapters | None = None,
) -> LinearOutput:
    """Implement ops.experts."""
    (M, C), problem = x_MC.shape, prepared.problem
    if adapters is not None:
        from qkernels.moe.adapted import triton_adapted

        return triton_adapted.experts(x_MC, routes, prepared, adapters, shared_MC)
    ids_Mk, weights_Mk = routes.ids_Mk.contiguous(), routes.weights_Mk.contiguous()
    k, E = ids_Mk.shape[1], problem.num_experts
    if plan.variant == "sm90_few_tokens":
        return _few_tokens(x_MC, Routes(ids_Mk, weights_Mk), prepared, plan, shared_MC)
    elsewhere = (ids_Mk, E) if problem.is_partial else (None, 0)
    lists = (ids_Mk, None, None)
    if plan.variant == "sorted":
        lists = (ids_Mk, *sort_pairs(ids_Mk, E))
    few = 0 if plan.variant == "sorted" else power_of_two(M * k)
    common = {"top_k": k, "pairs": few, "experts": power_of_two(E), "partial": problem.is_partial}
    with on_device(x_MC):
        hidden_PI = x_MC.new_empty(M * k, problem.inner)
        tile = ExpertsTile(**common, **activation_constants(prepared.glu))
        run_product(x_MC, k, prepared.gate_up, plan.gate_up, lists, weights_Mk, hidden_PI, tile)
        if plan.output == "parts":
            parts = _empty_parts(x_MC, plan.down.split * k, shared_MC)
            if problem.is_partial and not few:
                parts.zero_()  # no block writes the pairs of experts of other ranks
            tile = ExpertsTile(parts=True, weighted=True, **common)
            run_product(hidden_PI, 1, prepared.down, plan.down, lists, weights_Mk, parts, tile)
            if shared_MC is not None:
                parts[-1].copy_(shared_MC)
            return SplitKPartials(parts=parts, dtype=x_MC.dtype)
        y_PC = x_MC.new_empty(M * k, C)
        tile = ExpertsTile(weighted=True, **common)
        run_product(hidden_PI, 1, prepared.down, plan.down, lists, weights_Mk, y_PC, tile)
        out_MC = torch.empty_like(x_MC)
        sum_pairs(y_PC, k, shared_MC, out_MC, *elsewhere)
    return out_MC


def _few_tokens(
    x_MC: torch.Tensor,
    routes: Routes,
    prepared: PreparedExperts,
    plan: ExpertsPlan,
    shared_MC: torch.Tensor | None,
) -> LinearOutput:
    # import Gluon only if this kernel runs
    from qkernels.moe import sm90_few_tokens as kernel

    ids_Mk, weights_Mk = routes
    E, is_partial = prepared.problem.num_experts, prepared.problem.is_partial
    parts = cleared = None
    with on_device(x_MC):
        if plan.output == "parts":
            count = plan.down.split * ids_Mk.shape[1]
            parts = _empty_parts(x_MC, count, shared_MC)
            cleared = parts[:count] if is_partial else None
        if plan.gate_up.sorts:
            active = active_pairs(x_MC, routes, E, plan.gate_up.block_m, cleared)
        else:
            active = active_experts(ids_Mk, E, is_partial, cleared)
        gate_up, down = prepared.gate_up, prepared.down
        hidden = kernel.gate_up(x_MC, ids_Mk, active, gate_up, prepared.glu, plan.gate_up)
        if parts is not None:
            kernel.down(hidden, ids_Mk, weights_Mk, active, down, plan.down, parts)
            if shared_MC is not None:
                parts[-1].copy_(shared_MC)
            return SplitKPartials(parts=parts, dtype=x_MC.dtype)
        y_PC = x_MC.new_empty(ids_Mk.numel(), x_MC.shape[1])
        kernel.down(hidden, ids_Mk, weights_Mk, active, down, plan.down, y_PC)
        out_MC = torch.empty_like(x_MC)
        elsewhere = (ids_Mk, E) if is_partial else (None, 0)
        sum_pairs(y_PC, ids_Mk.shape[1], shared_MC, out_MC, *elsewhere)
    return out_MC


def _empty_parts(x_MC: torch.Tensor, count: int, shared_MC: torch.Tensor | None) -> torch.Tensor:
    """Allocate partial sums, one more if there is a shared expert's output."""
    count += shared_MC is not None
    return torch.empty((count, *x_MC.shape), dtype=torch.float32, device=x_MC.device)


def activation_constants(glu: Glu) -> dict[str, float]:
    """Return the activation constants of the first product."""
    if not glu.gated:
        return {"relu2": True}
    if glu.gelu:
        return {"glu": True, "gelu": True}
    numbers = {"alpha": glu.alpha, "offset": glu.offset, "limit": glu.limit or 0.0}
    return {"glu": True, **numbers, "cut_after": glu.cut_after}


def run_product(
    x: torch.Tensor,
    row_pairs: int,
    weight: ExpertStack,
    config: ExpertsConfig,
    lists: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    weights_Mk: torch.Tensor,
    y: torch.Tensor,
    tile: ExpertsTile,
) -> None:
    """Run one product of all pairs. `row_pairs`: number of pairs that share a row of x."""
    N, K, P = weight.out_features, weight.in_features, lists[0].numel()
    scales = weight.tensors.get("scales")
    num_experts = _num_experts(weight)
    blocks = P if tile.pairs else num_blocks(config, P, num_experts)
    grid = (blocks, N // config.block_n, config.split)
    pdl = config.pdl and has_pdl(x.device)
    options = {"num_warps": config.warps, **({"launch_pdl": True} if pdl else {})}
    sizes = (P, N, K, num_experts)
    if weight.kind == "packed":
        group, bits = weight.spec.group_length(K), weight.spec.bits
        launch(
            experts_packed,
            grid,
            x,
            weight.tensors["packed"],
            scales,
            weight.tensors.get("offsets"),
            weight.tensors.get("blocks"),
            weight.bias_EN,
            *lists,
            weights_Mk,
            y,
            *sizes,
            ROW_PAIRS=row_pairs,
            STEPS_PER_GROUP=group // k_step(group),
            GROUPING=grouping(weight.spec, x.dtype),
            FP4=fp4_words(weight.spec, x.dtype),
            MAGIC=MAGIC_WORD[x.dtype],
            OFFSET=code_offset(weight.spec, x.dtype),
            BITS=bits,
            BM=config.block_m,
            BN=config.block_n,
            BK=k_step(group),
            EVEN=K % k_step(group) == 0,
            TILE_N=TILE_N,
            SPLIT=config.split,
            STAGES=config.stages,
            PDL=pdl,
            USE_PTX=uses_ptx(x.device),
            TILE=tile,
            **options,
        )
        return
    dtype, x_scales = x.dtype, None
    if weight.activation is not None:
        x, x_scales = rowwise.quantize_input(
            x, weight.activation, weight.tensors.get("input_scale")
        )
        x_scales = x_scales.contiguous()
    if weight.kind == "w4a8":
        group = weight.spec.group_length(K)
        block_k = w4a8.k_step(group)
        launch(
            experts_w4a8,
            grid,
            x,
            x_scales,
            weight.tensors["packed"],
            scales,
            weight.bias_EN,
            *lists,
            weights_Mk,
            y,
            *sizes,
            DTYPE=TRITON_DTYPE[dtype],
            ROW_PAIRS=row_pairs,
            STEPS_PER_GROUP=0 if group == K else group // block_k,
            FACTOR=w4a8.code_factor(weight.activation.type),
            INTEGERS=weight.activation.type == "int",
            BM=config.block_m,
            BN=config.block_n,
            BK=block_k,
            TILE_N=w4a8.TILE_N,
            SPLIT=config.split,
            STAGES=config.stages,
            PDL=pdl,
            USE_PTX=uses_ptx(x.device),
            TILE=tile,
            **options,
        )
        return
    matrix = weight.tensors["codes" if weight.kind == "codes" else "weight"]
    blocks = scales is not None and scales.ndim == 2
    block_k = SCALE_INPUTS if blocks else PLAIN_BLOCK_K[matrix.element_size()]
    launch(
        experts_plain,
        grid,
        x,
        x_scales,
        matrix,
        scales,
        weight.bias_EN,
        *lists,
        weights_Mk,
        y,
        *sizes,
        DTYPE=TRITON_DTYPE[dtype],
        ROW_PAIRS=row_pairs,
        BM=config.block_m,
        BN=config.block_n,
        BK=block_k,
        SPLIT=config.split,
        STAGES=config.stages,
        BLOCKS=blocks,
        EVEN=K % block_k == 0,
        PDL=pdl,
        TILE=tile,
        **options,
    )


def _num_experts(weight: ExpertStack) -> int:
    if "packed" in weight.tensors:
        return weight.tensors["packed"].shape[0] * TILE_N // weight.out_features
    return weight.tensors["codes" if weight.kind == "codes" else "weight"].shape[0] // (
        weight.out_features
    )
