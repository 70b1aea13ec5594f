"""Products of 4-bit experts for few tokens on sm_90, in Gluon: y^T = W x^T with wgmma.

The pipeline is the one of wna16/sm90_small_m.py: a producer warp keeps TMA loads of packed weights,
scales and x in flight, and one or two consumer warpgroups multiply 64 outputs each. A work tile is
one split of one output tile of an active expert. Resident blocks share the work tiles evenly,
whichever experts are active.

- Up to 8 tokens, a tile has one column per token. Columns of tokens that did not choose the expert
  are computed but not stored, because eight columns cost as much as one; so no row is gathered.
  gate_up stores the activated product of the d-th active expert and token m in row d M + m, so down
  finds the rows of its tokens adjacent.
- More tokens are gathered by expert beforehand: a tile has one column per sorted pair, up to BM.
  Further pairs of an expert make another entry.

    M  tokens               D  entries: an active expert with up to BM of its pairs
    k  experts per token    N  outputs and
    P  = M k pairs          K  inputs of an expert
                            BM columns of a tile
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma_wait,
)

from qkernels.gpu.config import ceil_div
from qkernels.gpu.device import sm_count
from qkernels.gpu.gluon_compat import descriptor
from qkernels.gpu.launch import launch
from qkernels.gpu.pdl_gluon import griddepcontrol_wait, launch_dependents
from qkernels.gpu.pipeline import make_pipeline
from qkernels.gpu.tma import aligned
from qkernels.moe.experts import ExpertStack
from qkernels.moe.routing import Glu
from qkernels.moe.sm90_few_tokens_config import FewTokensConfig
from qkernels.moe.sm90_few_tokens_structs import Experts, TokensTile
from qkernels.moe.triton_active import ActiveExperts
from qkernels.wna16.layout import TILE_N
from qkernels.wna16.prepack import stack_numerics
from qkernels.wna16.sm90_k_step import (
    WEIGHT_BOX,
    X_BOX_K,
    allocate_stages,
    load_weight,
    load_x,
    multiply,
    multiply_by_group,
    multiply_fp4,
    step_scales,
)


def gate_up(
    x_MC: torch.Tensor,
    ids_Mk: torch.Tensor,
    active: ActiveExperts,
    weight: ExpertStack,
    glu: Glu,
    config: FewTokensConfig,
) -> torch.Tensor:
    """Return the activated products, [P, I] of sorted pairs, or [D M, I].

    Row d M + m belongs to token m and the d-th active expert; rows of tokens that did not choose
    the expert are undefined.
    """
    sorts = active.order is not None
    tile = TokensTile(
        top_k=ids_Mk.shape[1],
        glu=True,
        sorted=sorts,
        counted=active.counted,
        alpha=glu.alpha,
        offset=glu.offset,
        limit=glu.limit or 0.0,
    )
    rows = ids_Mk.numel() if sorts else active.most * len(ids_Mk)
    y = x_MC.new_empty(rows, weight.out_features // 2)
    x = active.x_PC if sorts else x_MC
    _launch(x, ids_Mk, None, active, weight, config, y, tile)
    return y


def down(
    hidden: torch.Tensor,
    ids_Mk: torch.Tensor,
    weights_Mk: torch.Tensor,
    active: ActiveExperts,
    weight: ExpertStack,
    config: FewTokensConfig,
    y: torch.Tensor,
) -> None:
    """Apply down and the routing weights; write `y`: float32 [split k or more, M, C], or [P, C].

    It must follow gate_up directly, or a kernel that started after gate_up: it loads the first
    weights of the active experts before that kernel has ended.
    """
    sorts = active.order is not None
    tile = TokensTile(
        top_k=ids_Mk.shape[1],
        glu=False,
        sorted=sorts,
        counted=active.counted,
        parts=y.ndim == 3,
    )
    _launch(hidden, ids_Mk, weights_Mk, active, weight, config, y, tile)


def _launch(
    x: torch.Tensor,
    ids_Mk: torch.Tensor,
    weights_Mk: torch.Tensor | None,
    active: ActiveExperts,
    weight: ExpertStack,
    config: FewTokensConfig,
    y: torch.Tensor,
    tile: TokensTile,
) -> None:
    x = aligned(x)
    N, K = weight.out_features, weight.in_features
    scales, factors = weight.tensors["scales"], weight.tensors.get("blocks")
    offsets = weight.tensors.get("offsets", scales)
    numerics = stack_numerics(weight.spec, K, x.dtype, weight.tensors, weight.bias_EN)
    box = TILE_N * numerics.stored_steps
    if factors is not None:  # 4-bit floats: one or two words of scales per row and K step
        box *= scales.shape[-1]
    tiles = N // config.block_n
    launch(
        _experts_few_tokens,
        (min(config.blocks_per_sm * sm_count(x.device), active.most * tiles * config.split),),
        descriptor(weight.tensors["packed"].view(-1, WEIGHT_BOX[1]), WEIGHT_BOX),
        descriptor(x, [config.block_m, X_BOX_K]),
        descriptor(scales.view(-1), [box]),
        descriptor(offsets.view(-1), [box]),
        scales if weight.bias_EN is None else weight.bias_EN,
        scales if factors is None else factors,
        ids_Mk if active.order is None else active.order,
        weights_Mk if active.weights is None or weights_Mk is None else active.weights,
        active.list,
        y,
        len(ids_Mk),
        N,
        ceil_div(K, 128),
        tiles,
        active.most,
        CONFIG=config,
        NUMERICS=numerics,
        TILE=tile,
        num_warps=4,
        maxnreg=config.registers,
        launch_pdl=True,
    )


@gluon.jit
def _consume(gemm, pipeline, CONSUMER: gl.constexpr):
    """Run a consumer warpgroup, which computes and stores 64 outputs of each work tile."""
    BM: gl.constexpr = gemm.CONFIG.block_m
    GROUPS: gl.constexpr = gemm.NUMERICS.stored_steps
    # four sums of more than 8 columns leave no registers
    AT_ONCE: gl.constexpr = 32 // BM if GROUPS == 4 else GROUPS
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    LOOK_FIRST: gl.constexpr = BM <= 16  # more columns leave no registers for it
    griddepcontrol_wait()
    num_entries = gemm.num_entries()
    num_work = num_entries * gemm.tiles * gemm.CONFIG.split
    choices = _choices(gemm)
    next_tile = gemm.work_tile(gl.program_id(0), num_entries)
    state = pipeline.consumer_start()
    for work in range(gl.program_id(0), num_work, gl.num_programs(0)):
        # these look-ups are used after the K steps, or in the next work tile
        work_tile = next_tile
        next_tile = gemm.work_tile(work + gl.num_programs(0), num_entries)
        if LOOK_FIRST:
            pairs = _look_up(gemm, work_tile, gl.SliceLayout(0, SUMS))
        sums = gl.zeros([64, BM], gl.float32, SUMS)
        for _ in range(work_tile.k_begin, work_tile.k_end):
            pipeline.consumer_wait(state)
            if gemm.NUMERICS.fp4 is not None:
                sums = multiply_fp4(gemm, pipeline.mem, state.stage, sums, CONSUMER, SUMS)
                sums = warpgroup_mma_wait(0, deps=[sums])
                pipeline.consumer_release(state)
            elif gemm.NUMERICS.stored_steps > 1:
                for first in gl.static_range(0, GROUPS, AT_ONCE):
                    products, scales = multiply_by_group(
                        gemm, pipeline.mem, state.stage, first, AT_ONCE, CONSUMER, SUMS
                    )
                    if AT_ONCE == 1:
                        products = (warpgroup_mma_wait(0, deps=products),)
                    else:
                        products = warpgroup_mma_wait(0, deps=products)
                    if first + AT_ONCE == GROUPS:
                        pipeline.consumer_release(state)
                    for i in gl.static_range(AT_ONCE):
                        sums += products[i] * scales[i][:, None]
            else:
                scale = step_scales(gemm, pipeline.mem, state.stage, CONSUMER, SUMS)
                product = multiply(gemm, pipeline.mem, state.stage, CONSUMER, SUMS)
                product = warpgroup_mma_wait(0, deps=[product])
                pipeline.consumer_release(state)
                sums += product * scale[:, None]
            state = state.advance()
        if not LOOK_FIRST:
            pairs = _look_up(gemm, work_tile, gl.SliceLayout(0, SUMS))
        rows, weights = _columns(gemm, work_tile, choices, pairs, gl.SliceLayout(0, SUMS))
        first_n = gemm.first_output(work_tile, CONSUMER)
        n = first_n + gl.arange(0, 64, gl.SliceLayout(1, SUMS))
        if gemm.NUMERICS.fp4 is not None:
            sums *= gl.load(gemm.factors_ptr + work_tile.expert * gemm.N + n)[:, None]
        if gemm.NUMERICS.has_bias:
            bias = gl.load(gemm.bias_ptr + work_tile.expert * gemm.N + n).to(gl.float32)
            sums += gl.where(work_tile.split == 0, bias, 0.0)[:, None]
        if gemm.TILE.glu:
            _store(gemm, _activated(gemm, sums), rows, first_n // 2, gemm.N // 2)
        else:
            _store(gemm, sums * weights[None, :], rows, first_n, gemm.N)


@gluon.jit
def _choices(gemm):
    """Load the experts and routing weights [BM, slots] of columns that are tokens, once."""
    TILE: gl.constexpr = gemm.TILE
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [32 // TILE.slots, TILE.slots], [4, 1], [1, 0])
    m = gl.arange(0, gemm.CONFIG.block_m, gl.SliceLayout(1, LAYOUT))[:, None]
    j = gl.arange(0, TILE.slots, gl.SliceLayout(0, LAYOUT))[None, :]
    experts = m + j
    weights = experts
    if not TILE.sorted:
        mask = (m < gemm.M) & (j < TILE.top_k)
        pair = m * TILE.top_k + j
        experts = gl.load(gemm.ids_ptr + pair, mask=mask, other=-1, cache_modifier=".cg")
        if not TILE.glu:
            weights = gl.load(gemm.weights_ptr + pair, mask=mask, other=0.0, cache_modifier=".cg")
    return experts, weights, j


@gluon.jit
def _look_up(gemm, work_tile, COLUMNS: gl.constexpr):
    """Load the pairs and routing weights [BM] of columns that are sorted pairs (down only)."""
    TILE: gl.constexpr = gemm.TILE
    pairs = gl.arange(0, gemm.CONFIG.block_m, COLUMNS)
    weights = pairs
    if TILE.sorted and not TILE.glu:
        place = work_tile.first + pairs
        mask = pairs < work_tile.pairs
        pairs = gl.load(gemm.ids_ptr + place, mask=mask, other=0, cache_modifier=".cg")
        weights = gl.load(gemm.weights_ptr + place, mask=mask, other=0.0, cache_modifier=".cg")
    return pairs, weights


@gluon.jit
def _columns(gemm, work_tile, choices, pairs, COLUMNS: gl.constexpr):
    """Return the row of y (-1: none) and, for down, the routing weight of each column [BM]."""
    TILE: gl.constexpr = gemm.TILE
    column = gl.arange(0, gemm.CONFIG.block_m, COLUMNS)
    pair, weights = pairs
    if TILE.sorted:
        wants = column < work_tile.pairs
        if TILE.glu:
            row = work_tile.first + column
        elif TILE.parts:
            row = (work_tile.split * TILE.top_k + pair % TILE.top_k) * gemm.M + pair // TILE.top_k
        else:
            row = pair
    else:
        of_tokens, their_weights, j = choices
        active = of_tokens == work_tile.expert
        choice = gl.convert_layout(gl.max(gl.where(active, j, -1), 1), COLUMNS)
        wants = choice >= 0
        if not TILE.glu:
            weights = gl.convert_layout(gl.sum(gl.where(active, their_weights, 0.0), 1), COLUMNS)
        if TILE.glu:
            row = work_tile.entry * gemm.M + column
        elif TILE.parts:
            row = (work_tile.split * TILE.top_k + choice) * gemm.M + column
        else:
            row = column * TILE.top_k + choice
    return gl.where(wants, row, -1), weights


@gluon.jit
def _activated(gemm, sums):
    """Apply the gated activation to sums [64, BM] of gate and up. Return [32, BM].

    Eight rows of gate alternate with eight rows of up, so a thread has both of a pair (stack.py).
    """
    TILE: gl.constexpr = gemm.TILE
    DTYPE: gl.constexpr = gemm.y_ptr.dtype.element_ty
    BM: gl.constexpr = sums.shape[1]
    # rounds where torch rounds: the product, the activation, and their product
    rounded = sums.to(DTYPE).to(gl.float32)
    gate, up = gl.split(rounded.reshape([4, 2, 8, BM]).permute([0, 2, 3, 1]))
    if TILE.limit > 0:
        gate = gl.minimum(gate, TILE.limit)
        up = gl.minimum(gl.maximum(up, -TILE.limit), TILE.limit)
    act = (gate / (1 + gl.exp(-TILE.alpha * gate))).to(DTYPE).to(gl.float32)
    return (act * (up + TILE.offset)).reshape([32, BM])


@gluon.jit
def _store(gemm, values, rows, first_n, N):
    """Store values [outputs, BM] to rows of y, in the accumulator's layout.

    In a row, 8 adjacent outputs are stored together: 32 bytes of float32.
    """
    LAYOUT: gl.constexpr = values.type.layout
    n = first_n + gl.arange(0, values.shape[0], gl.SliceLayout(1, LAYOUT))
    rows = gl.convert_layout(rows, gl.SliceLayout(0, LAYOUT), assert_trivial=True)
    ptrs = gemm.y_ptr + ((rows * N)[None, :] + n[:, None])
    # every n is below N: the comparison only broadcasts the mask to the values' shape
    mask = (rows >= 0)[None, :] & (n < N)[:, None]
    gl.store(ptrs, values.to(gemm.y_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _load(gemm, pipeline):
    """Run the producer warp, which loads all K steps of the block's work tiles."""
    CONFIG: gl.constexpr = gemm.CONFIG
    if gemm.TILE.glu:
        # the previous kernel computes which experts are active
        griddepcontrol_wait()
    num_entries = gemm.num_entries()
    num_work = num_entries * gemm.tiles * CONFIG.split
    work_tile = gemm.work_tile(gl.program_id(0), num_entries)
    prefetched = gl.minimum(work_tile.k_end - work_tile.k_begin, CONFIG.stages)
    if gl.program_id(0) >= num_work:
        prefetched = 0
    for stage in range(prefetched):
        state = pipeline.producer_start(stage)
        load_weight(gemm, pipeline, state, work_tile, work_tile.k_begin + stage, True)
    if not gemm.TILE.glu:
        griddepcontrol_wait()
    # after the wait, because the next kernel may read what kernels before this one wrote
    launch_dependents()
    state = pipeline.producer_start()
    loaded = 0
    for work in range(gl.program_id(0), num_work, gl.num_programs(0)):
        next_tile = gemm.work_tile(work + gl.num_programs(0), num_entries)
        x_row = gemm.first_row(work_tile)
        for k_step in range(work_tile.k_begin, work_tile.k_end):
            pipeline.producer_acquire(state)
            load_weight(gemm, pipeline, state, work_tile, k_step, loaded >= prefetched)
            load_x(gemm, pipeline, state, x_row, k_step)
            loaded += 1
            state = state.advance()
        work_tile = next_tile


@gluon.jit(do_not_specialize=["M", "k_steps", "tiles", "most"])
def _experts_few_tokens(
    weight,  # as in Experts
    x,
    scales,
    offsets,
    bias_ptr,
    factors_ptr,
    ids_ptr,
    weights_ptr,
    active_ptr,
    y_ptr,
    M,
    N,
    k_steps,
    tiles,
    most,
    CONFIG: gl.constexpr,
    NUMERICS: gl.constexpr,
    TILE: gl.constexpr,
):
    stages = allocate_stages(weight, x, scales, offsets, CONFIG, NUMERICS)
    pipeline = make_pipeline(stages, CONFIG.stages, CONFIG.num_consumers)
    fence_async_shared()
    gemm = Experts(
        weight=weight,
        x=x,
        scales=scales,
        offsets=offsets,
        bias_ptr=bias_ptr,
        factors_ptr=factors_ptr,
        ids_ptr=ids_ptr,
        weights_ptr=ids_ptr if weights_ptr is None else weights_ptr,
        active_ptr=active_ptr,
        y_ptr=y_ptr,
        M=M,
        N=N,
        k_steps=k_steps,
        tiles=tiles,
        most=most,
        CONFIG=CONFIG,
        NUMERICS=NUMERICS,
        TILE=TILE,
    )
    if CONFIG.num_consumers == 1:
        gl.warp_specialize(
            [(_consume, (gemm, pipeline, 0)), (_load, (gemm, pipeline))],
            [1],
            [CONFIG.producer_registers],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (gemm, pipeline, 0)),
                (_consume, (gemm, pipeline, 1)),
                (_load, (gemm, pipeline)),
            ],
            [4, 1],
            [CONFIG.consumer_registers, CONFIG.producer_registers],
        )
