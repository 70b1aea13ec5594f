"""y = x W^T with 8-bit weights and 8-bit activations, for sm_90, in Gluon.

A persistent, warp-specialized kernel: each block takes one output tile after another. One producer
warp keeps TMA loads in flight, as far ahead as the pipeline has stages. One to three consumer
warpgroups multiply their own rows of operand A, and store their results while the next tile is
being loaded. If the weight has too few tiles for the SMs, K is split over several blocks. These
reduce their partial sums by reduce-scatter or, with few columns, in the last block to arrive. Sums
and rounding are the same as in triton_gemm.py.

Legend: M rows of x, K inputs, N outputs. A and B are the operands of wgmma: the weight and x with
CONFIG.weight_is_a, else x and the weight.
"""

from dataclasses import replace

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from formats.in_memory.weights import Weight
from qkernels.choice import FIXED_ORDER
from qkernels.gpu.config import ceil_div
from qkernels.gpu.device import sm_count
from qkernels.gpu.gluon_compat import descriptor
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pdl_gluon import griddepcontrol_wait
from qkernels.gpu.pipeline import make_pipeline
from qkernels.gpu.registers import split_columns
from qkernels.gpu.split_k_reduce import reduce_in_last_arriver, reduce_scatter
from qkernels.gpu.workspace import workspace
from qkernels.linear.plan import GemmPlan, GemmProblem, plan_without_choice
from qkernels.linear.prepared import PreparedWeight
from qkernels.operands.codes import Codes
from qkernels.operands.split_k import Consumer
from qkernels.tuning.table import tuning_table_of
from qkernels.w8a8 import triton_gemm
from qkernels.w8a8.config import (
    SM90_BLOCK_K,
    WEIGHT_BOX_ROWS,
    W8A8Sm90Config,
    default_sm90_config,
    fixed_order_config,
)
from qkernels.w8a8.sm90_epilogue import epilogue, load_vectors
from qkernels.w8a8.sm90_load import load
from qkernels.w8a8.sm90_structs import EpilogueBuffers, Gemm, Stages
from qkernels.w8a8.tuned import TUNED

# layout of a store tile if consumers have idle rows: 64 outputs of a row of y, 128 bytes
IDLE_ROWS_LAYOUT = gl.constexpr(
    gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
)


def prepare_weight(
    packed: Weight, dtype: torch.dtype, device: torch.device | str | None = None
) -> PreparedWeight:
    """Prepare a weight as triton_gemm.prepare_weight does, with the codes in TMA boxes."""
    weight = triton_gemm.prepare_weight(packed, dtype, device)
    tensors = {**weight.tensors, "codes": in_tma_boxes(weight.tensors["codes"])}
    return replace(weight, kernel="sm90_w8a8", tensors=tensors)


def in_tma_boxes(codes_NK: torch.Tensor) -> torch.Tensor:
    """Rearrange codes to [N/64, K/128, 64, 128], padded with zeros: a TMA box is contiguous.

    Code (n, k) is at [n // 64, k // 128, n % 64, k % 128].
    """
    N, K = codes_NK.shape
    boxes, steps = ceil_div(N, WEIGHT_BOX_ROWS), ceil_div(K, SM90_BLOCK_K)
    bytes_NK = codes_NK.view(torch.int8)
    if (boxes * WEIGHT_BOX_ROWS, steps * SM90_BLOCK_K) != (N, K):
        padded = bytes_NK.new_zeros(boxes * WEIGHT_BOX_ROWS, steps * SM90_BLOCK_K)
        padded[:N, :K] = bytes_NK
        bytes_NK = padded
    bytes_NK = bytes_NK.view(boxes, WEIGHT_BOX_ROWS, steps, SM90_BLOCK_K).transpose(1, 2)
    return bytes_NK.contiguous().view(codes_NK.dtype)


def plan(
    problem: GemmProblem, M: int, consumer: Consumer | None = None, *, fused: bool = True
) -> GemmPlan:
    """Return the plan for M rows; the previous operation rounds the input if it can."""
    N, K, activation = problem.out_features, problem.in_features, problem.activation
    kind = "blocks" if activation.per == "group" else activation.type
    if problem.requested == FIXED_ORDER and kind != "int":
        config = fixed_order_config(M, N, K, sm_count(problem.device), kind)
    else:
        config = _chosen_config(problem.device, M, N, K, kind)
    return replace(plan_without_choice(problem), variant="sm90", config=config)


def run(
    plan: GemmPlan, x: Codes, weight: PreparedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply codes [M, K] to [M, N], rounded once to the weight's dtype."""
    return linear_codes(*x, weight, bias, config=plan.config)


def run_into(
    y_MN: torch.Tensor,
    plan: GemmPlan,
    x: Codes,
    weight: PreparedWeight,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run `run` for M >= 1 and write the result to contiguous `y_MN`."""
    return linear_codes(*x, weight, bias, config=plan.config, y_MN=y_MN)


def linear_codes(
    codes_MK: torch.Tensor,
    scales_M1: torch.Tensor,
    weight: PreparedWeight,
    bias: torch.Tensor | None = None,
    *,
    config: W8A8Sm90Config | None = None,
    y_MN: torch.Tensor | None = None,
) -> torch.Tensor:
    """Implement ops.linear_codes, deterministic. `config` replaces the tuned or default config.

    The result is written to contiguous `y_MN` if it is given.
    """
    (M, K), N = codes_MK.shape, weight.out_features
    device, integers = codes_MK.device, codes_MK.dtype == torch.int8
    if y_MN is None:
        y_MN = torch.empty((M, N), dtype=weight.dtype, device=device)
    if M == 0:
        return y_MN
    blocks = weight.tensors["scales"].ndim == 2
    kind = "blocks" if blocks else weight.activation.type
    config = config or _chosen_config(device, M, N, K, kind)
    codes_MK = codes_MK.contiguous()
    x_rows = config.block_b if config.weight_is_a else config.consumer_rows
    x = descriptor(codes_MK, [x_rows, SM90_BLOCK_K])
    boxes = weight.tensors["codes"].view(-1, SM90_BLOCK_K)
    boxes = descriptor(boxes, [config.weight_box_rows, SM90_BLOCK_K])
    scales_N = weight.tensors["scales"]
    partials, counters = workspace(device)
    max_blocks = sm_count(device) * config.blocks_per_sm
    assert config.fits(M, N, sm_count(device)), config
    with on_device(codes_MK):
        launch(
            _w8a8_sm90,
            (min(max_blocks, config.tiles(M, N) * config.split),),
            boxes,
            x,
            _result_descriptor(y_MN, config),
            scales_M1.contiguous(),
            scales_N,
            scales_N if bias is None else bias,
            partials.view(torch.int32) if integers else partials,
            counters,
            M,
            N,
            K,
            CONFIG=config,
            HAS_BIAS=bias is not None,
            BLOCKS=blocks,
            num_warps=4,
            maxnreg=config.registers,
            launch_pdl=True,
        )
    return y_MN


def _result_descriptor(y_MN: torch.Tensor, config: W8A8Sm90Config) -> TensorDescriptor:
    """Return a TMA descriptor of y with boxes of a store tile.

    Idle rows lie outside of the tensor, so TMA does not write them.
    """
    if not config.weight_is_a:
        return descriptor(y_MN, [config.consumer_rows, config.store_width])
    if not config.idle_rows:
        return descriptor(y_MN, [config.store_width, config.consumer_rows])
    (M, N), rows = y_MN.shape, config.stored_rows
    by_consumer = y_MN.as_strided((N // rows, M, rows), (rows, N, 1))
    return descriptor(by_consumer, [1, config.store_width, config.consumer_rows])


def _chosen_config(device: torch.device, M: int, N: int, K: int, kind: str) -> W8A8Sm90Config:
    """Return the config measured on this GPU, else the default.

    Tables have no configs for blocks. A table may be from another GPU or edited, so `fits` is
    checked again: splits that reduce-scatter without all being resident would wait forever.
    """
    sms = sm_count(device)
    if kind in ("int", "float"):
        row = tuning_table_of(device).find(TUNED, N=N, K=K, integers=kind == "int", M=M)
        if (
            row is not None
            and isinstance(row.config, W8A8Sm90Config)
            and row.config.fits(M, N, sms)
        ):
            return row.config
    return default_sm90_config(M, N, K, sms, kind)


@gluon.jit
def _multiply(gemm, pipeline, state, sums, work_tile, row, column, CONSUMER: gl.constexpr):
    """Return `sums` plus the products of a consumer's rows of A, and the next pipeline state."""
    CONFIG: gl.constexpr = gemm.CONFIG
    layout: gl.constexpr = sums.type.layout
    if CONFIG.promotion_steps == 0:
        for k_step in range(work_tile.k_begin, work_tile.k_end):
            pipeline.consumer_wait(state)
            a = pipeline.mem.a.index(state.stage * CONFIG.num_consumers + CONSUMER)
            b = pipeline.mem.b.index(state.stage).permute((1, 0))
            sums = warpgroup_mma(a, b, sums, is_async=True, use_acc=k_step > work_tile.k_begin)
            sums = warpgroup_mma_wait(1, deps=[sums])
            pipeline.consumer_release_previous(state, k_step > work_tile.k_begin)
            state = state.advance()
        sums = warpgroup_mma_wait(0, deps=[sums])
        pipeline.consumer_release_previous(state, work_tile.k_end > work_tile.k_begin)
    else:
        # the tensor core keeps 14 bits of a float8 sum: add it in float32 every few steps
        for first in range(work_tile.k_begin, work_tile.k_end, CONFIG.promotion_steps):
            products = gl.zeros(sums.shape, sums.dtype, layout)
            end = gl.minimum(work_tile.k_end, first + CONFIG.promotion_steps)
            for k_step in range(first, end):
                pipeline.consumer_wait(state)
                a = pipeline.mem.a.index(state.stage * CONFIG.num_consumers + CONSUMER)
                b = pipeline.mem.b.index(state.stage).permute((1, 0))
                products = warpgroup_mma(a, b, products, is_async=True, use_acc=k_step > first)
                products = warpgroup_mma_wait(1, deps=[products])
                pipeline.consumer_release_previous(state, k_step > first)
                state = state.advance()
            if gemm.BLOCKS:
                scales = _block_scales(gemm, row, column, first, layout)
            products = warpgroup_mma_wait(0, deps=[products])
            pipeline.consumer_release_previous(state)
            if gemm.BLOCKS:
                products = products * gl.expand_dims(scales, 0 if CONFIG.weight_is_a else 1)
            sums += products
    return sums, state


@gluon.jit
def _consume(gemm, pipeline, buffers, CONSUMER: gl.constexpr):
    """Run a consumer warpgroup, which computes and stores the products of its rows of A."""
    CONFIG: gl.constexpr = gemm.CONFIG
    SPLIT: gl.constexpr = CONFIG.split
    SUM: gl.constexpr = gemm.partials_ptr.dtype.element_ty
    STORE_TILES: gl.constexpr = CONFIG.block_b // CONFIG.store_width
    ROWS: gl.constexpr = CONFIG.consumer_rows
    COLUMNS: gl.constexpr = CONFIG.block_b
    # Triton supports the integer wgmma for up to 224 columns
    INSTRUCTION_N: gl.constexpr = min(COLUMNS, 128)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, INSTRUCTION_N, 32])
    num_work_tiles = gemm.num_work_tiles()
    griddepcontrol_wait()
    state = pipeline.consumer_start()
    for work in range(gl.program_id(0), num_work_tiles, gl.num_programs(0)):
        work_tile = gemm.work_tile(work)
        slot = work // SPLIT * CONFIG.num_consumers + CONSUMER
        row = (work_tile.tile_a * CONFIG.num_consumers + CONSUMER) * CONFIG.stored_rows
        column = work_tile.tile_b * CONFIG.block_b
        # after a reduce-scatter, this block stores its part of the columns
        stored = column + work % SPLIT * CONFIG.stored_columns if CONFIG.reduce_scatter else column
        sums = gl.zeros([ROWS, COLUMNS], SUM, layout)
        store_layout: gl.constexpr = split_columns(sums, STORE_TILES)[0].type.layout
        # these loads run during the product
        vectors = load_vectors(gemm, row, stored, store_layout)
        sums, state = _multiply(gemm, pipeline, state, sums, work_tile, row, column, CONSUMER)
        complete = True
        if CONFIG.reduce_scatter:
            sums = reduce_scatter(
                sums, slot, work % SPLIT, gemm.partials_ptr, gemm.counters_ptr, SPLIT
            )
        elif SPLIT > 1:
            sums, complete = reduce_in_last_arriver(
                sums, slot, work % SPLIT, gemm.partials_ptr, gemm.counters_ptr, SPLIT
            )
        if complete:
            epilogue(gemm, buffers, sums, vectors, row, stored, CONSUMER)
    tma.store_wait(0)


@gluon.jit
def _block_scales(gemm, row, column, k_step, layout: gl.constexpr):
    """Return the product of both scales of a K step for each row of x. Only with BLOCKS.

    A consumer's rows of A, and the columns of a tile, lie in one block of the weight.
    """
    CONFIG: gl.constexpr = gemm.CONFIG
    if CONFIG.weight_is_a:
        m = column + gl.arange(0, CONFIG.block_b, gl.SliceLayout(0, layout))
        block = row // 128
    else:
        m = row + gl.arange(0, CONFIG.consumer_rows, gl.SliceLayout(1, layout))
        block = column // 128
    m = gl.minimum(m, gemm.M - 1)
    input_scales = gl.load(gemm.input_scales_ptr + m.to(gl.int64) * gemm.k_steps + k_step)
    return input_scales * gl.load(gemm.scales_ptr + block * gemm.k_steps + k_step)


@gluon.jit(do_not_specialize=["M"])
def _w8a8_sm90(
    weight,  # as in sm90_structs.Gemm
    x,
    y,
    input_scales_ptr,
    scales_ptr,
    bias_ptr,
    partials_ptr,
    counters_ptr,
    M,
    N,
    K,
    CONFIG: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    BLOCKS: gl.constexpr,
):
    CONSUMERS: gl.constexpr = CONFIG.num_consumers
    ROWS: gl.constexpr = CONFIG.consumer_rows
    BLOCK_B: gl.constexpr = CONFIG.block_b
    BK: gl.constexpr = x.block_type.shape[1]
    STAGES: gl.constexpr = CONFIG.stages
    WEIGHT_IS_A: gl.constexpr = CONFIG.weight_is_a
    k_steps = gl.cdiv(K, BK)
    tiles_a = gl.cdiv(N if WEIGHT_IS_A else M, CONSUMERS * CONFIG.stored_rows)
    tiles_b = gl.cdiv(M if WEIGHT_IS_A else N, BLOCK_B)
    gemm = Gemm(
        weight=weight,
        x=x,
        y=y,
        input_scales_ptr=input_scales_ptr,
        scales_ptr=scales_ptr,
        bias_ptr=bias_ptr,
        partials_ptr=partials_ptr,
        counters_ptr=counters_ptr,
        M=M,
        N=N,
        tiles_a=tiles_a,
        tiles_b=tiles_b,
        k_steps=k_steps,
        CONFIG=CONFIG,
        HAS_BIAS=HAS_BIAS,
        BLOCKS=BLOCKS,
        OUTPUT_SCALES=not BLOCKS,
    )
    # both operands have the same layout: rows of 128 bytes with the widest swizzle
    a = gl.allocate_shared_memory(x.dtype, [STAGES * CONSUMERS, ROWS, BK], x.layout)
    b = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_B, BK], x.layout)
    STORE_TILE: gl.constexpr = y.block_type.shape[-2:]
    y_layout: gl.constexpr = IDLE_ROWS_LAYOUT if CONFIG.idle_rows else y.layout
    y_memory = gl.allocate_shared_memory(
        y.dtype, [CONSUMERS * CONFIG.store_stages, STORE_TILE[0], STORE_TILE[1]], y_layout
    )
    pipeline = make_pipeline(Stages(a=a, b=b), STAGES, CONSUMERS)
    fence_async_shared()
    column_vectors = gl.allocate_shared_memory(
        gl.float32,
        [
            CONSUMERS * CONFIG.num_column_vectors,
            CONFIG.stored_columns if CONFIG.column_vectors_in_shared else 1,
        ],
        gl.SwizzledSharedLayout(1, 1, 1, [0]),
    )
    buffers = EpilogueBuffers(y=y_memory, column_vectors=column_vectors)
    REGISTERS: gl.constexpr = CONFIG.consumer_registers
    if CONSUMERS == 1:
        gl.warp_specialize(
            [(_consume, (gemm, pipeline, buffers, 0)), (load, (gemm, pipeline))], [1], [24]
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (gemm, pipeline, buffers, 0)),
                (_consume, (gemm, pipeline, buffers, 1)),
                (load, (gemm, pipeline)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (gemm, pipeline, buffers, 0)),
                (_consume, (gemm, pipeline, buffers, 1)),
                (_consume, (gemm, pipeline, buffers, 2)),
                (load, (gemm, pipeline)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )
