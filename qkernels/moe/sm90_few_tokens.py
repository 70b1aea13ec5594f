"""Products of W4A16 experts for few tokens on sm_90, in Gluon: y^T = W x^T with wgmma.

The pipeline is that of wna16/sm90_small_m.py: a producer warp keeps TMA loads of packed weights,
scales and x in flight, one or two consumer warpgroups multiply 64 outputs each. Work is a tile and
a split of an expert that some token wants; blocks that stay resident share it evenly, whichever
the experts are.

A tile has a column for each token. That of a token which does not want the expert is computed, for
nothing, and not stored: up to eight columns cost what one does. So no row is gathered. gate_up
stores the activated product of the d-th wanted expert and token m in row d M + m, so down finds its
tokens' rows side by side.

Legend: M tokens, k experts of a token, D experts that are wanted, N outputs and K inputs of an
expert; BM columns of a tile, at least M.
"""

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma_wait,
)

from qkernels.gpu.config import CompileTimeConfig, power_of_two
from qkernels.gpu.device import sm_count
from qkernels.gpu.gluon_compat import aggregate, descriptor, integer, tma_load
from qkernels.gpu.launch import launch
from qkernels.gpu.pdl_gluon import griddepcontrol_wait, launch_dependents
from qkernels.gpu.pipeline import make_pipeline
from qkernels.gpu.tma import aligned
from qkernels.moe.experts import ExpertStack
from qkernels.moe.routing import Glu
from qkernels.moe.sm90_few_tokens_config import FewTokensConfig
from qkernels.wna16.layout import TILE_N
from qkernels.wna16.prepack import stack_numerics
from qkernels.wna16.sm90_k_step import WEIGHT_BOX, X_BOX_K, Stages, multiply, step_scales


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensTile(CompileTimeConfig):
    """Constants of a launch, compiled in."""

    top_k: int
    glu: bool  # gate_up: outputs are gate and up; else down: weighted parts [split, k, M, N]
    counted: bool  # the wanted experts follow their number; else they are a token's, k of them
    alpha: float = 1.0
    offset: float = 0.0
    limit: float = 0.0  # 0: none

    @property
    def slots(self) -> int:
        return power_of_two(self.top_k)


def gate_up(
    x_MC: torch.Tensor,
    ids_Mk: torch.Tensor,
    wanted: torch.Tensor,
    weight: ExpertStack,
    glu: Glu,
    config: FewTokensConfig,
) -> torch.Tensor:
    """[D M, I]: row d M + m is the activated product of token m and the d-th wanted expert.

    `wanted`: as from wanted_experts. Rows of tokens that do not want the expert hold anything.
    """
    M, k = ids_Mk.shape
    tile = TokensTile(
        top_k=k,
        glu=True,
        counted=M > 1,
        alpha=glu.alpha,
        offset=glu.offset,
        limit=glu.limit or 0.0,
    )
    most = _most_wanted(weight, ids_Mk)
    y = x_MC.new_empty(most * M, weight.out_features // 2)
    _launch(x_MC, ids_Mk, None, wanted, weight, config, y, tile)
    return y


def down(
    hidden: torch.Tensor,
    ids_Mk: torch.Tensor,
    shares_Mk: torch.Tensor,
    wanted: torch.Tensor,
    weight: ExpertStack,
    config: FewTokensConfig,
    parts: torch.Tensor,
) -> None:
    """gate_up's result to `parts`, float32 [split k or more, M, C]: times the shares, to be added.

    Follows gate_up at once, or a kernel that began after it: the wanted experts' first weights are
    under way before that has ended.
    """
    tile = TokensTile(top_k=ids_Mk.shape[1], glu=False, counted=ids_Mk.shape[0] > 1)
    _launch(hidden, ids_Mk, shares_Mk, wanted, weight, config, parts, tile)


def _most_wanted(weight: ExpertStack, ids_Mk: torch.Tensor) -> int:
    experts = weight.tensors["packed"].shape[0] * TILE_N // weight.out_features
    return min(experts, ids_Mk.numel())


def _launch(
    x: torch.Tensor,
    ids_Mk: torch.Tensor,
    shares_Mk: torch.Tensor | None,
    wanted: torch.Tensor,
    weight: ExpertStack,
    config: FewTokensConfig,
    y: torch.Tensor,
    tile: TokensTile,
) -> None:
    x = aligned(x)
    M, N, K = ids_Mk.shape[0], weight.out_features, weight.in_features
    scales, offsets = weight.tensors["scales"], weight.tensors.get("offsets")
    tiles = N // config.block_n
    most_work = _most_wanted(weight, ids_Mk) * tiles * config.split
    launch(
        _experts_few_tokens,
        (min(config.blocks_per_sm * sm_count(x.device), most_work),),
        descriptor(weight.tensors["packed"].view(-1, WEIGHT_BOX[1]), WEIGHT_BOX),
        descriptor(x, [config.block_m, X_BOX_K]),
        descriptor(scales.view(-1), [TILE_N]),
        descriptor((scales if offsets is None else offsets).view(-1), [TILE_N]),
        scales if weight.bias_EN is None else weight.bias_EN,
        ids_Mk,
        shares_Mk,
        wanted,
        y,
        M,
        N,
        K // 128,
        tiles,
        CONFIG=config,
        NUMERICS=stack_numerics(weight.spec, K, x.dtype, weight.tensors, weight.bias_EN),
        TILE=tile,
        num_warps=4,
        maxnreg=config.registers,
        launch_pdl=True,
    )


@aggregate
class _WorkTile:
    """One split of one tile of a wanted expert."""

    wanted: gl.tensor  # its number d among the wanted experts
    expert: gl.tensor
    tile: gl.tensor  # among the expert's
    split: gl.tensor
    k_begin: gl.tensor  # in K steps
    k_end: gl.tensor


@aggregate
class _Experts:
    """The kernel's arguments."""

    weight: tma.tensor_descriptor  # packed [E N/64 K/128 32, 32]
    x: tma.tensor_descriptor  # [M, K] or [D M, K], boxes [BM, 64]
    scales: tma.tensor_descriptor  # [E N/64 G 64]
    offsets: tma.tensor_descriptor  # [E N/64 G 64], valid if has_offsets
    bias_ptr: gl.tensor  # [E, N], valid if has_bias
    ids_ptr: gl.tensor  # [M, k]
    shares_ptr: gl.tensor  # [M, k], valid in down
    wanted_ptr: gl.tensor  # D and the wanted experts; not counted: the experts of one token
    y_ptr: gl.tensor  # [D M, N / 2], or parts [split, k, M, N]
    M: integer
    N: integer
    k_steps: integer
    tiles: integer  # of an expert
    CONFIG: gl.constexpr  # FewTokensConfig
    NUMERICS: gl.constexpr  # WeightNumerics
    TILE: gl.constexpr  # TokensTile

    @gluon.jit
    def num_wanted(self):
        # .cg, here and below: a block may start before the kernel that wrote these has ended, and
        # an SM's L1 may hold what was there before
        if self.TILE.counted:
            return gl.load(self.wanted_ptr, cache_modifier=".cg")
        else:
            return gl.to_tensor(self.TILE.top_k)

    @gluon.jit
    def work_tile(self, work, num_wanted):
        """After the last one that there is, the last one again."""
        SPLIT: gl.constexpr = self.CONFIG.split
        split = work % SPLIT
        wanted = gl.minimum(work // SPLIT // self.tiles, num_wanted - 1)
        FIRST: gl.constexpr = 1 if self.TILE.counted else 0
        return _WorkTile(
            wanted=wanted,
            expert=gl.load(self.wanted_ptr + FIRST + wanted, cache_modifier=".cg"),
            tile=work // SPLIT % self.tiles,
            split=split,
            k_begin=split * self.k_steps // SPLIT,
            k_end=(split + 1) * self.k_steps // SPLIT,
        )

    @gluon.jit
    def stored_tile(self, work_tile, CONSUMER: gl.constexpr):
        tile = work_tile.expert * self.tiles + work_tile.tile
        return tile * self.CONFIG.num_consumers + CONSUMER

    @gluon.jit
    def first_output(self, work_tile, CONSUMER: gl.constexpr):
        """Of a consumer's 64, among those of the expert."""
        return (work_tile.tile * self.CONFIG.num_consumers + CONSUMER) * 64


@gluon.jit
def _consume(gemm, pipeline, CONSUMER: gl.constexpr):
    """A consumer warpgroup: 64 outputs of each work tile, and their results."""
    BM: gl.constexpr = gemm.CONFIG.block_m
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    GLU: gl.constexpr = gemm.TILE.glu
    LOOK_FIRST: gl.constexpr = BM <= 16  # more columns leave no registers for it
    griddepcontrol_wait()
    num_wanted = gemm.num_wanted()
    num_work = num_wanted * gemm.tiles * gemm.CONFIG.split
    state = pipeline.consumer_start()
    for work in range(gl.program_id(0), num_work, gl.num_programs(0)):
        work_tile = gemm.work_tile(work, num_wanted)
        if LOOK_FIRST:
            # while the first weights are under way
            choice, shares = _choices(gemm, work_tile.expert, gl.SliceLayout(0, SUMS))
        sums = gl.zeros([64, BM], gl.float32, SUMS)
        for _ in range(work_tile.k_begin, work_tile.k_end):
            pipeline.consumer_wait(state)
            scale = step_scales(gemm, pipeline.mem, state.stage, CONSUMER, SUMS)
            product = multiply(gemm, pipeline.mem, state.stage, CONSUMER, SUMS)
            product = warpgroup_mma_wait(0, deps=[product])
            pipeline.consumer_release(state)
            sums += product * scale[:, None]
            state = state.advance()
        if not LOOK_FIRST:
            choice, shares = _choices(gemm, work_tile.expert, gl.SliceLayout(0, SUMS))
        first_n = gemm.first_output(work_tile, CONSUMER)
        if gemm.NUMERICS.has_bias:
            n = first_n + gl.arange(0, 64, gl.SliceLayout(1, SUMS))
            bias = gl.load(gemm.bias_ptr + work_tile.expert * gemm.N + n).to(gl.float32)
            sums += gl.where(work_tile.split == 0, bias, 0.0)[:, None]
        if GLU:
            _store_activated(gemm, sums, choice, work_tile, first_n)
        else:
            _store_parts(gemm, sums * shares[None, :], choice, work_tile, first_n)


@gluon.jit
def _choices(gemm, expert, COLUMNS: gl.constexpr):
    """Of each column [BM]: which of its token's choices the expert is, -1: none; and its share."""
    TOP_K: gl.constexpr = gemm.TILE.top_k
    SLOTS: gl.constexpr = gemm.TILE.slots
    IDS: gl.constexpr = gl.BlockedLayout([1, 1], [32 // SLOTS, SLOTS], [4, 1], [1, 0])
    m = gl.arange(0, gemm.CONFIG.block_m, gl.SliceLayout(1, IDS))[:, None]
    j = gl.arange(0, SLOTS, gl.SliceLayout(0, IDS))[None, :]
    mask = (m < gemm.M) & (j < TOP_K)
    ids = gl.load(gemm.ids_ptr + m * TOP_K + j, mask=mask, other=-1, cache_modifier=".cg")
    choice = gl.convert_layout(gl.max(gl.where(ids == expert, j, -1), 1), COLUMNS)
    if gemm.TILE.glu:
        shares = choice  # nobody asks
    else:
        m = gl.arange(0, gemm.CONFIG.block_m, COLUMNS)
        ptrs = gemm.shares_ptr + m * TOP_K + choice
        shares = gl.load(ptrs, mask=choice >= 0, other=0.0, cache_modifier=".cg")
    return choice, shares


@gluon.jit
def _store_activated(gemm, sums, choice, work_tile, first_n):
    """Rows of gate and up alternate by eight, so a thread has a gate and its up (stack.py)."""
    TILE: gl.constexpr = gemm.TILE
    DTYPE: gl.constexpr = gemm.y_ptr.dtype.element_ty
    BM: gl.constexpr = sums.shape[1]
    # rounded where torch rounds the product, the activation and their product
    rounded = sums.to(DTYPE).to(gl.float32)
    gate, up = gl.split(rounded.reshape([4, 2, 8, BM]).permute([0, 2, 3, 1]))
    if TILE.limit > 0:
        gate = gl.minimum(gate, TILE.limit)
        up = gl.minimum(gl.maximum(up, -TILE.limit), TILE.limit)
    act = (gate / (1 + gl.exp(-TILE.alpha * gate))).to(DTYPE).to(gl.float32)
    y = (act * (up + TILE.offset)).reshape([32, BM]).to(DTYPE)
    LAYOUT: gl.constexpr = y.type.layout
    n = first_n // 2 + gl.arange(0, 32, gl.SliceLayout(1, LAYOUT))
    m = gl.arange(0, BM, gl.SliceLayout(0, LAYOUT))
    wants = gl.convert_layout(choice, gl.SliceLayout(0, LAYOUT), assert_trivial=True) >= 0
    row = work_tile.wanted * gemm.M + m
    ptrs = gemm.y_ptr + ((row * (gemm.N // 2))[None, :] + n[:, None])
    # all n are below N: the mask takes the sums' shape by it
    gl.store(ptrs, y, mask=wants[None, :] & (n < gemm.N)[:, None])


@gluon.jit
def _store_parts(gemm, sums, choice, work_tile, first_n):
    """As they are in the accumulator: 8 outputs of a row, 32 bytes, at a time."""
    SUMS: gl.constexpr = sums.type.layout
    n = first_n + gl.arange(0, 64, gl.SliceLayout(1, SUMS))
    m = gl.arange(0, sums.shape[1], gl.SliceLayout(0, SUMS))
    row = (work_tile.split * gemm.TILE.top_k + choice) * gemm.M + m
    ptrs = gemm.y_ptr + ((row * gemm.N)[None, :] + n[:, None])
    gl.store(ptrs, sums, mask=(choice >= 0)[None, :] & (n < gemm.N)[:, None])


@gluon.jit
def _load_weight(gemm, pipeline, state, work_tile, k_step, pred):
    """A K step's packed weights and scales; the stage then expects x, too."""
    NUMERICS: gl.constexpr = gemm.NUMERICS
    CONSUMERS: gl.constexpr = gemm.CONFIG.num_consumers
    OFFSET_BYTES: gl.constexpr = gemm.offsets.block_type.nbytes if NUMERICS.has_offsets else 0
    CONSUMER_BYTES: gl.constexpr = (
        gemm.weight.block_type.nbytes + gemm.scales.block_type.nbytes + OFFSET_BYTES
    )
    BYTES: gl.constexpr = CONSUMERS * CONSUMER_BYTES + 2 * gemm.x.block_type.nbytes
    stages = pipeline.mem
    barrier = pipeline.full_barrier(state)
    pipeline.producer_expect(state, BYTES, pred)
    groups = gemm.k_steps // NUMERICS.steps_per_group
    for i in gl.static_range(CONSUMERS):
        stored_tile = gemm.stored_tile(work_tile, i)
        own = state.stage * CONSUMERS + i
        row = (stored_tile * gemm.k_steps + k_step) * 32
        tma_load(gemm.weight, [row, 0], barrier, stages.weight.index(own), pred=pred)
        group = stored_tile * groups + k_step // NUMERICS.steps_per_group
        tma_load(gemm.scales, [group * 64], barrier, stages.scales.index(own), pred=pred)
        if NUMERICS.has_offsets:
            tma_load(gemm.offsets, [group * 64], barrier, stages.offsets.index(own), pred=pred)


@gluon.jit
def _load(gemm, pipeline):
    """The producer warp: all K steps of the block's work tiles."""
    CONFIG: gl.constexpr = gemm.CONFIG
    if gemm.TILE.glu:
        # which weights are wanted is what the kernel before computes
        griddepcontrol_wait()
    num_wanted = gemm.num_wanted()
    num_work = num_wanted * gemm.tiles * CONFIG.split
    work_tile = gemm.work_tile(gl.program_id(0), num_wanted)
    prefetched = gl.minimum(work_tile.k_end - work_tile.k_begin, CONFIG.stages)
    if gl.program_id(0) >= num_work:
        prefetched = 0
    for stage in range(prefetched):
        state = pipeline.producer_start(stage)
        _load_weight(gemm, pipeline, state, work_tile, work_tile.k_begin + stage, True)
    if not gemm.TILE.glu:
        griddepcontrol_wait()
    # After the wait: blocks of the next kernel may read what was written before this one.
    launch_dependents()
    state = pipeline.producer_start()
    loaded = 0
    for work in range(gl.program_id(0), num_work, gl.num_programs(0)):
        work_tile = gemm.work_tile(work, num_wanted)
        x_row = 0 if gemm.TILE.glu else work_tile.wanted * gemm.M
        for k_step in range(work_tile.k_begin, work_tile.k_end):
            pipeline.producer_acquire(state)
            _load_weight(gemm, pipeline, state, work_tile, k_step, loaded >= prefetched)
            for i in gl.static_range(2):
                k = k_step * 128 + i * 64
                box = pipeline.mem.x.index(2 * state.stage + i)
                tma_load(gemm.x, [x_row, k], pipeline.full_barrier(state), box)
            loaded += 1
            state = state.advance()


@gluon.jit(do_not_specialize=["M", "k_steps", "tiles"])
def _experts_few_tokens(
    weight,  # as in _Experts
    x,
    scales,
    offsets,
    bias_ptr,
    ids_ptr,
    shares_ptr,
    wanted_ptr,
    y_ptr,
    M,
    N,
    k_steps,
    tiles,
    CONFIG: gl.constexpr,
    NUMERICS: gl.constexpr,
    TILE: gl.constexpr,
):
    STAGES: gl.constexpr = CONFIG.stages
    SLOTS: gl.constexpr = STAGES * CONFIG.num_consumers
    packed_stages = gl.allocate_shared_memory(gl.int32, [SLOTS, 32, 32], weight.layout)
    x_stages = gl.allocate_shared_memory(x.dtype, [STAGES * 2, CONFIG.block_m, 64], x.layout)
    scale_stages = gl.allocate_shared_memory(scales.dtype, [SLOTS, 64], scales.layout)
    if NUMERICS.has_offsets:
        offset_stages = gl.allocate_shared_memory(offsets.dtype, [SLOTS, 64], offsets.layout)
    else:
        offset_stages = scale_stages
    stages = Stages(weight=packed_stages, x=x_stages, scales=scale_stages, offsets=offset_stages)
    pipeline = make_pipeline(stages, STAGES, CONFIG.num_consumers)
    fence_async_shared()
    gemm = _Experts(
        weight=weight,
        x=x,
        scales=scales,
        offsets=offsets,
        bias_ptr=bias_ptr,
        ids_ptr=ids_ptr,
        shares_ptr=ids_ptr if shares_ptr is None else shares_ptr,
        wanted_ptr=wanted_ptr,
        y_ptr=y_ptr,
        M=M,
        N=N,
        k_steps=k_steps,
        tiles=tiles,
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
