"""y = x W^T with 4-bit weights and 8-bit activations, for sm_90, in Gluon.

A persistent, warp-specialized kernel for every number of rows, built like w8a8/sm90.py. One
producer warp keeps TMA loads of packed codes, scales and x in flight. One to three consumer
warpgroups multiply 64 outputs each: operand A is codes, expanded to 8 bits in registers; operand B
is x, in shared memory. The sum of each group (integer, or the tensor core's for float8) is added to
a float32 total with one fused multiply-add by the group's scale. With one scale per output, codes
are summed as integers to the end; also if the scales of each row are whole multiples of one number,
times which codes are then expanded.

Legend: M rows of x, K inputs, N outputs, G groups; a K step is 128 inputs.
"""

from dataclasses import replace

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
)

from formats.in_memory.packed import PackedWeight
from qkernels.choice import FIXED_ORDER
from qkernels.gpu.device import sm_count
from qkernels.gpu.gluon_compat import descriptor
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pdl_gluon import griddepcontrol_wait
from qkernels.gpu.pipeline import make_pipeline
from qkernels.gpu.registers import split_columns
from qkernels.gpu.split_k_reduce import reduce_in_last_arriver, reduce_scatter
from qkernels.gpu.tma import aligned
from qkernels.gpu.workspace import workspace
from qkernels.linear.plan import GemmPlan, GemmProblem, plan_without_choice
from qkernels.linear.prepared import PreparedWeight
from qkernels.operands.codes import Codes
from qkernels.operands.split_k import Consumer
from qkernels.tuning.table import tuning_table_of
from qkernels.w4a8 import layout
from qkernels.w4a8.config import (
    MULTIPLES,
    W4A8Sm90Config,
    default_sm90_config,
    fixed_order_config,
)
from qkernels.w4a8.prepack import prepacked
from qkernels.w4a8.sm90_load import load
from qkernels.w4a8.sm90_products import (
    multiply_ahead,
    multiply_groups,
    multiply_integers,
    multiply_multiples,
)
from qkernels.w4a8.sm90_structs import Gemm, Numerics, Stages
from qkernels.w4a8.tuned import TUNED
from qkernels.w8a8.sm90_epilogue import epilogue, load_vectors
from qkernels.w8a8.sm90_structs import EpilogueBuffers

WEIGHT_BOX = [32, 32]  # packed words of a stored tile in one K step: two outputs per line


def prepare_weight(
    packed: PackedWeight, dtype: torch.dtype, device: torch.device | str | None = None
) -> PreparedWeight:
    """Prepack codes in K steps of 128 inputs, and scales by group or by output.

    If the scales of each row are multiples of one number, sums stay integers to the end.
    """
    block_k = layout.K_STEP
    return prepacked(packed, dtype, device, kernel="sm90_w4a8", block_k=block_k, multiples=True)


def plan(
    problem: GemmProblem, M: int, consumer: Consumer | None = None, *, fused: bool = True
) -> GemmPlan:
    """Return the plan for M rows; the previous operation rounds the input if it can."""
    config = _chosen_config(problem, M)
    variant = MULTIPLES if problem.in_multiples else "sm90"
    return replace(plan_without_choice(problem), variant=variant, config=config)


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
    config: W4A8Sm90Config | None = None,
    y_MN: torch.Tensor | None = None,
) -> torch.Tensor:
    """Implement ops.linear_codes, deterministic. `config` replaces the tuned or default config.

    The result is written to contiguous `y_MN` if it is given.
    """
    (M, K), N = codes_MK.shape, weight.out_features
    device = codes_MK.device
    if y_MN is None:
        y_MN = torch.empty((M, N), dtype=weight.dtype, device=device)
    if M == 0:
        return y_MN
    config = config or _chosen_config(weight.problem, M)
    numerics = numerics_of(weight.problem)
    codes_MK = aligned(codes_MK.contiguous())
    packed = weight.tensors["packed"].view(torch.int32).view(-1, WEIGHT_BOX[1])
    scales = weight.tensors["scales"]
    boxes = weight.tensors["multiples"] if numerics.in_multiples else scales
    partials, counters = workspace(device)
    sums_are_integers = codes_MK.dtype == torch.int8 and not numerics.in_groups
    assert config.promotes != sums_are_integers, config
    assert config.fits(M, N, K, sm_count(device)), config
    with on_device(codes_MK):
        launch(
            _w4a8_sm90,
            (min(sm_count(device) * config.blocks_per_sm, config.tiles(M, N) * config.split),),
            descriptor(packed, WEIGHT_BOX),
            descriptor(boxes.view(-1), [layout.TILE_N * numerics.groups])
            if numerics.in_boxes
            else descriptor(packed, WEIGHT_BOX),
            descriptor(codes_MK, [config.block_b, layout.K_STEP]),
            descriptor(y_MN, [config.store_width, config.consumer_rows]),
            scales_M1.contiguous(),
            scales,
            scales if bias is None else bias,
            partials.view(torch.int32) if sums_are_integers else partials,
            counters,
            M,
            N,
            K,
            CONFIG=config,
            NUMERICS=numerics,
            HAS_BIAS=bias is not None,
            num_warps=4,
            maxnreg=config.registers,
            launch_pdl=True,
        )
    return y_MN


def numerics_of(problem: GemmProblem) -> Numerics:
    """Return how a weight's codes are scaled."""
    factor = layout.code_factor(problem.activation.type)
    if problem.group == problem.in_features:
        return Numerics(factor=factor, in_groups=False)
    return Numerics(
        factor=1.0 if problem.in_multiples else factor,
        in_groups=not problem.in_multiples,
        in_multiples=problem.in_multiples,
        groups=max(1, layout.K_STEP // problem.group),
        steps_per_group=max(1, problem.group // layout.K_STEP),
    )


def _chosen_config(problem: GemmProblem, M: int) -> W4A8Sm90Config:
    """Return the config measured on this GPU, else the default.

    A table may be from another GPU or edited, so `fits` is checked again: splits that
    reduce-scatter without all being resident would wait forever.
    """
    N, K, group = problem.out_features, problem.in_features, _scaled_inputs(problem)
    sms, integers = sm_count(problem.device), problem.activation.type == "int"
    if problem.requested == FIXED_ORDER:
        return fixed_order_config(M, N, K, group, sms, integers)
    row = tuning_table_of(problem.device).find(TUNED, N=N, K=K, group=group, integers=integers, M=M)
    config = None if row is None else row.config
    if isinstance(config, W4A8Sm90Config) and config.fits(M, N, K, sms):
        return config
    return default_sm90_config(M, N, K, group, sms, integers)


def _scaled_inputs(problem: GemmProblem) -> int:
    """Return the inputs of one float scale. Configs of multiples are those of one per output."""
    return problem.in_features if problem.in_multiples else problem.group


@gluon.jit
def _consume(gemm, pipeline, buffers, CONSUMER: gl.constexpr):
    """Run a consumer warpgroup, which computes and stores 64 outputs of each work tile."""
    CONFIG: gl.constexpr = gemm.CONFIG
    SPLIT: gl.constexpr = CONFIG.split
    SUM: gl.constexpr = gemm.partials_ptr.dtype.element_ty
    COLUMNS: gl.constexpr = CONFIG.block_b
    STORE_TILES: gl.constexpr = COLUMNS // CONFIG.store_width
    # Triton supports the integer wgmma for up to 224 columns
    INSTRUCTION_N: gl.constexpr = min(COLUMNS, 128)
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, INSTRUCTION_N, 32])
    griddepcontrol_wait()
    state = pipeline.consumer_start()
    for work in range(gl.program_id(0), gemm.num_work_tiles(), gl.num_programs(0)):
        work_tile = gemm.work_tile(work)
        slot = work // SPLIT * CONFIG.num_consumers + CONSUMER
        row = (work_tile.tile_a * CONFIG.num_consumers + CONSUMER) * 64
        column = work_tile.tile_b * COLUMNS
        # after a reduce-scatter, this block stores its part of the columns
        stored = column + work % SPLIT * CONFIG.stored_columns if CONFIG.reduce_scatter else column
        sums = gl.zeros([64, COLUMNS], SUM, LAYOUT)
        store_layout: gl.constexpr = split_columns(sums, STORE_TILES)[0].type.layout
        # these loads run during the product
        vectors = load_vectors(gemm, row, stored, store_layout)
        if gemm.NUMERICS.in_multiples:
            sums, state = multiply_multiples(gemm, pipeline, state, sums, work_tile, CONSUMER)
        elif not CONFIG.promotes:
            sums, state = multiply_integers(gemm, pipeline, state, sums, work_tile, CONSUMER)
        elif CONFIG.loads_ahead and gemm.NUMERICS.groups == 1:
            sums, state = multiply_ahead(gemm, pipeline, state, sums, work_tile, CONSUMER)
        else:
            sums, state = multiply_groups(gemm, pipeline, state, sums, work_tile, CONSUMER)
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


@gluon.jit(do_not_specialize=["M"])
def _w4a8_sm90(
    weight,  # as in sm90_structs.Gemm
    scales,
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
    NUMERICS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    CONSUMERS: gl.constexpr = CONFIG.num_consumers
    STAGES: gl.constexpr = CONFIG.stages
    SLOTS: gl.constexpr = STAGES * CONSUMERS
    gemm = Gemm(
        weight=weight,
        scales=scales,
        x=x,
        y=y,
        input_scales_ptr=input_scales_ptr,
        scales_ptr=scales_ptr,
        bias_ptr=bias_ptr,
        partials_ptr=partials_ptr,
        counters_ptr=counters_ptr,
        M=M,
        N=N,
        tiles_a=gl.cdiv(N, CONSUMERS * 64),
        tiles_b=gl.cdiv(M, CONFIG.block_b),
        k_steps=K // 128,
        CONFIG=CONFIG,
        NUMERICS=NUMERICS,
        HAS_BIAS=HAS_BIAS,
        OUTPUT_SCALES=not NUMERICS.in_groups,
        BLOCKS=False,
    )
    packed = gl.allocate_shared_memory(gl.int32, [SLOTS, 32, 32], weight.layout)
    x_stages = gl.allocate_shared_memory(x.dtype, [STAGES, CONFIG.block_b, 128], x.layout)
    if NUMERICS.in_boxes:
        SCALES: gl.constexpr = scales.block_type.shape[0]
        scale_stages = gl.allocate_shared_memory(scales.dtype, [SLOTS, SCALES], scales.layout)
    else:
        scale_stages = packed
    y_memory = gl.allocate_shared_memory(
        y.dtype, [CONSUMERS * CONFIG.store_stages, CONFIG.store_width, 64], y.layout
    )
    stages = Stages(weight=packed, scales=scale_stages, x=x_stages)
    pipeline = make_pipeline(stages, STAGES, CONSUMERS)
    fence_async_shared()
    column_vectors = gl.allocate_shared_memory(
        gl.float32,
        [CONSUMERS, CONFIG.stored_columns if CONFIG.column_vectors_in_shared else 1],
        gl.SwizzledSharedLayout(1, 1, 1, [0]),
    )
    buffers = EpilogueBuffers(y=y_memory, column_vectors=column_vectors)
    REGISTERS: gl.constexpr = CONFIG.consumer_registers
    PRODUCER: gl.constexpr = CONFIG.producer_registers
    if CONSUMERS == 1:
        gl.warp_specialize(
            [(_consume, (gemm, pipeline, buffers, 0)), (load, (gemm, pipeline))], [1], [PRODUCER]
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (gemm, pipeline, buffers, 0)),
                (_consume, (gemm, pipeline, buffers, 1)),
                (load, (gemm, pipeline)),
            ],
            [4, 1],
            [REGISTERS, PRODUCER],
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
            [REGISTERS, REGISTERS, PRODUCER],
        )
