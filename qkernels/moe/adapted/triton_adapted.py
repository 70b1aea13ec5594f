"""Experts with the LoRA adapters of their tokens in Triton, on any GPU.

Both grouped products leave their results in memory, where the adapters' terms are added: to gate
and up before the activation, to down before the sum over experts. Every grid depends only on the
number of tokens, and nothing waits for the GPU, so CUDA graphs can capture the kernels. Results of
tokens without an adapter have the bits of the portable kernels without split-K.

Legend: see weights.py; k experts per token, P = M k pairs, C hidden size, I inner size.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from qkernels.gpu.config import ceil_div, power_of_two
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pdl import pdl_options
from qkernels.lora.config import RANK_BLOCK
from qkernels.moe.adapted.config import (
    ACTIVATED,
    EXPAND_OUTPUTS,
    SHRINK_INPUTS,
    PairTiles,
    pair_tiles,
    rank_blocks,
)
from qkernels.moe.adapted.kernels import activate_pairs, expand_pairs, shrink_pairs
from qkernels.moe.adapted.weights import ExpertAdapters, ExpertLora
from qkernels.moe.config import ExpertsPlan, tiles_of_pairs
from qkernels.moe.experts import PreparedExperts
from qkernels.moe.routing import Routes
from qkernels.moe.tiles_triton import ExpertsTile
from qkernels.moe.triton_experts import activation_constants, run_product
from qkernels.moe.triton_pairs import sort_pairs, sum_pairs
from qkernels.moe.variants import adapted_plan, layer_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pairs:
    """The pairs of a step, their adapters, and the tiles in which they run."""

    lists: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
    slots_M: torch.Tensor
    weights_Mk: torch.Tensor
    num_experts: int
    plan: ExpertsPlan
    constants: Mapping[str, int]  # of ExpertsTile

    @property
    def count(self) -> int:
        return self.lists[0].numel()

    @property
    def num_tokens(self) -> int:
        return self.slots_M.numel()

    def grid(self, tiles: PairTiles, middle: int) -> tuple[int, int, int]:
        blocks = self.count
        if self.plan.variant == "sorted":
            blocks = tiles_of_pairs(self.count, self.num_experts, tiles.block_m)
        return blocks, middle, tiles.owners


def experts(
    x_MC: torch.Tensor,
    routes: Routes,
    prepared: PreparedExperts,
    adapters: ExpertAdapters,
    shared_MC: torch.Tensor | None = None,
) -> torch.Tensor:
    """Implement ops.experts with adapters."""
    (M, C), problem = x_MC.shape, prepared.problem
    ids_Mk, weights_Mk = routes.ids_Mk.contiguous(), routes.weights_Mk.contiguous()
    k, E = ids_Mk.shape[1], problem.num_experts
    plan = adapted_plan(layer_of(problem), M)
    is_sorted = plan.variant == "sorted"
    lists = (ids_Mk, *(sort_pairs(ids_Mk, E) if is_sorted else (None, None)))
    pairs = _Pairs(
        lists=lists,
        slots_M=adapters.slots_M,
        weights_Mk=weights_Mk,
        num_experts=E,
        plan=plan,
        constants={
            "top_k": k,
            "pairs": 0 if is_sorted else power_of_two(M * k),
            "experts": power_of_two(E),
            "partial": problem.is_partial,
        },
    )
    with on_device(x_MC):
        hidden_PI = _hidden(x_MC, k, pairs, prepared, adapters.gate_up)
        h_PSR = _shrink(hidden_PI, 1, pairs, adapters.down)
        y_PC, weighted = x_MC.new_empty(M * k, C), ExpertsTile(weighted=True, **pairs.constants)
        run_product(hidden_PI, 1, prepared.down, plan.down, lists, weights_Mk, y_PC, weighted)
        _expand_(y_PC, h_PSR, pairs, adapters.down, weighted)
        out_MC = torch.empty_like(x_MC)
        elsewhere = (ids_Mk, E) if problem.is_partial else (None, 0)
        sum_pairs(y_PC, k, shared_MC, out_MC, *elsewhere)
    return out_MC


def _hidden(
    x_MC: torch.Tensor, k: int, pairs: _Pairs, prepared: PreparedExperts, lora: ExpertLora
) -> torch.Tensor:
    """Return the activated results of gate_up [P, I]. The results themselves are freed."""
    tile, config = ExpertsTile(**pairs.constants), pairs.plan.gate_up
    h_PSR = _shrink(x_MC, k, pairs, lora)
    y_PN = x_MC.new_empty(pairs.count, prepared.gate_up.out_features)
    run_product(x_MC, k, prepared.gate_up, config, pairs.lists, pairs.weights_Mk, y_PN, tile)
    _expand_(y_PN, h_PSR, pairs, lora, tile)
    return _activated(y_PN, prepared)


def _shrink(x: torch.Tensor, row_pairs: int, pairs: _Pairs, lora: ExpertLora) -> torch.Tensor:
    """Return A x of each pair, float32 [P, S, R]; undefined for pairs without an adapter."""
    S, R, K = lora.num_slices, lora.max_rank, lora.in_features
    h_PSR = torch.empty((pairs.count, S, R), dtype=torch.float32, device=x.device)
    tiles = pair_tiles(pairs.plan, lora.num_slots)
    launch(
        shrink_pairs,
        pairs.grid(tiles, S * rank_blocks(R)),
        x,
        pairs.slots_M,
        lora.a_LRESK,
        lora.ranks_LS,
        *pairs.lists,
        h_PSR,
        pairs.count,
        K,
        pairs.num_experts,
        R,
        lora.a_LRESK.stride(0),
        lora.a_LRESK.stride(1),
        lora.ranks_LS.stride(0),
        S=S,
        ROW_PAIRS=row_pairs,
        BM=tiles.block_m,
        BK=SHRINK_INPUTS,
        BR=RANK_BLOCK,
        BY_ROW=tiles.by_row,
        STAGES=3,
        TILE=ExpertsTile(**pairs.constants),
        num_warps=4,
        **pdl_options(x, pairs.num_tokens),
    )
    return h_PSR


def _expand_(
    y: torch.Tensor, h_PSR: torch.Tensor, pairs: _Pairs, lora: ExpertLora, tile: ExpertsTile
) -> None:
    """Add scale * B h to the pairs that have an adapter, times their routing weights if asked."""
    S, size = lora.num_slices, lora.sizes[0]
    tiles = pair_tiles(pairs.plan, lora.num_slots)
    launch(
        expand_pairs,
        pairs.grid(tiles, S * ceil_div(size, EXPAND_OUTPUTS)),
        y,
        h_PSR,
        pairs.slots_M,
        lora.b_LREN,
        lora.ranks_LS,
        lora.scales_LS,
        *pairs.lists,
        pairs.weights_Mk,
        pairs.count,
        pairs.num_experts,
        lora.max_rank,
        lora.b_LREN.stride(0),
        lora.b_LREN.stride(1),
        lora.ranks_LS.stride(0),
        lora.scales_LS.stride(0),
        S=S,
        SIZE=size,
        BM=tiles.block_m,
        BN=EXPAND_OUTPUTS,
        BR=RANK_BLOCK,
        BY_ROW=tiles.by_row,
        TILE=tile,
        num_warps=4,
        **pdl_options(y, pairs.num_tokens),
    )


def _activated(y_PN: torch.Tensor, prepared: PreparedExperts) -> torch.Tensor:
    """Return the activated results of gate_up [P, I]."""
    P, inner = y_PN.shape[0], prepared.problem.inner
    hidden_PI = y_PN.new_empty(P, inner)
    block = min(ACTIVATED, power_of_two(inner))
    launch(
        activate_pairs,
        (P, ceil_div(inner, block)),
        y_PN,
        hidden_PI,
        inner,
        BLOCK=block,
        TILE=ExpertsTile(top_k=1, pairs=0, experts=1, **activation_constants(prepared.glu)),
        num_warps=4,
        **pdl_options(y_PN, P // prepared.problem.top_k),
    )
    return hidden_PI
