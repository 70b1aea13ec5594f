"""W4A16 and W8A16 for up to 4 rows on sm_90, in Gluon: int8 limbs on the integer tensor core.

The four limbs of an input (operands/limbs.py) are columns of an int8 product; with few rows these
columns would be empty otherwise. A mask turns codes into operand A: int8 16 (q - 8) for 4 bits, q -
128 for 8 bits. The sum of a K step is exact, and then multiplied by the scales. Each warp streams
its own K steps from global memory into registers; warps share nothing before the final reduction.

Legend: M rows of x, K inputs, N outputs, G groups; W warps of a block, each with its own K steps of
128 inputs; BN outputs of a block; T tiles of 8 columns, which are two rows of four limbs.
"""

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pdl_gluon import griddepcontrol_wait, launch_dependents
from qkernels.gpu.registers import signed_nibbles
from qkernels.linear.prepared import PreparedWeight
from qkernels.lora.sm90_term import add_few_rows, lora_term, prefetch_few_rows
from qkernels.lora.term import LoraTerm, term_arguments, term_parts
from qkernels.operands.limbs import (
    K_STEP,
    LIMBS_COLUMNS,
    LIMBS_OF_INPUT,
    TILE_WORDS,
    Limbs,
)
from qkernels.wna16.layout import TILE_N
from qkernels.wna16.prepack import weight_numerics
from qkernels.wna16.sm90_gemv_imma_config import GemvImmaConfig

# The accumulator starts with the bits of the float32 number 1.5 * 2^23. A sum of 128 products is at
# most 128 * 128 * 255 < 2^22, so the result, read as float32, is 1.5 * 2^23 + sum.
MAGIC = gl.constexpr(0x4B400000)
MAGIC_FLOAT = gl.constexpr(12582912.0)

COLUMNS = gl.constexpr(LIMBS_COLUMNS)
LIMBS_PER_INPUT = gl.constexpr(LIMBS_OF_INPUT)
STORED_ROWS = gl.constexpr(TILE_N)  # outputs per stored tile


@functools.cache
def layouts(W: int, BN: int, bits: int) -> dict[str, object]:
    """Return the register layouts; lane = 4 g + t.

    Both operands are in memory in the order of the lanes, 16 bytes at a time. PACKED: bytes of
    codes [W, BN row_bytes]; with 8 bits, a row's 128 bytes take two loads. LIMBS: [W, 1024]. SUMS:
    the mma accumulator.
    """

    def streamed(size: int, row_bytes: int = 64) -> gl.DistributedLinearLayout:
        lanes = [16, 32, row_bytes, 2 * row_bytes, 4 * row_bytes]
        loads = [1 << i for i in range(6, size.bit_length() - 1) if 1 << i not in lanes]
        return gl.DistributedLinearLayout(
            reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], *([0, load] for load in loads)],
            lane_bases=[[0, lane] for lane in lanes],
            warp_bases=[[1 << i, 0] for i in range(W.bit_length() - 1)],
            block_bases=[],
            shape=[W, size],
        )

    sums = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[W, 1, 1], instr_shape=[1, 16, 8]
    )
    row_bytes = 16 * bits
    return {
        "PACKED": streamed(row_bytes * BN, row_bytes),
        "LIMBS": streamed(4 * TILE_WORDS),
        "SUMS": sums,
    }


def run(
    limbs: Limbs,
    weight: PreparedWeight,
    bias: torch.Tensor | None,
    config: GemvImmaConfig,
    term: LoraTerm | None = None,
) -> torch.Tensor:
    """Multiply limbs of M rows to [M, N] and add the adapters' term, for groups divisible by 128.

    A row that contains infinity or NaN gives NaN.
    """
    M, K = limbs.num_rows, limbs.in_features
    N = weight.out_features
    y_MN = torch.empty((M, N), dtype=weight.dtype, device=weight.device)
    with on_device(y_MN):
        launch(
            _wna16_gemv_imma,
            (weight.tensors["packed"].shape[0] * (TILE_N // config.block_n),),
            limbs.words.view(torch.int8),
            limbs.scales,
            limbs.sums,
            weight.tensors["packed"].view(torch.int8),
            weight.tensors["scales"],
            weight.tensors.get("offsets"),
            bias,
            y_MN,
            M,
            N,
            K // K_STEP,
            term_arguments(term),
            PARTS=term_parts(term),
            TILES=limbs.words.shape[1],
            CONFIG=config,
            NUMERICS=weight_numerics(weight, bias),
            **layouts(config.warps, config.block_n, weight.spec.bits),
            num_warps=config.warps,
            launch_pdl=True,
            # keeps as many blocks per SM as without adapters
            **({} if term is None else {"maxnreg": 64 * limbs.words.shape[1]}),
        )
    return y_MN


@gluon.jit
def _operand_a(codes, BITS: gl.constexpr, SUMS: gl.constexpr):
    """Convert bytes of codes [W, BN row_bytes] to operand A [W, BN, 128], within each thread.

    4 bits: the operand has 16 (q - 8). Its input 32 j + 16 h + 4 t + b is half h of byte b of word
    j of lane t. 8 bits: the operand has q - 128. Its input 64 i + 16 w + 4 t + b is byte b of word
    w of lane t in load i.
    """
    W: gl.constexpr = codes.shape[0]
    BN: gl.constexpr = codes.shape[1] // (16 * BITS)
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 4)
    if BITS == 8:
        signed = gl.inline_asm_elementwise(
            "xor.b32 $0, $1, 0x80808080;", "=r,r", [codes], dtype=gl.int8, is_pure=True, pack=4
        )
        # [W, row, i, t, w, b]
        values = signed.reshape([W, BN, 2, 4, 4, 4]).permute([0, 1, 2, 4, 3, 5])
    else:
        low, high = signed_nibbles(codes)
        # [W, row, t, j, b, h]
        values = gl.join(low, high).reshape([W, BN, 4, 4, 4, 2]).permute([0, 1, 3, 5, 2, 4])
    return gl.convert_layout(values.reshape([W, BN, 128]), A, assert_trivial=True)


@gluon.jit
def _operand_b(limbs, SUMS: gl.constexpr):
    """Convert limbs [W, 1024] to operand B [W, 128, 8], inputs in the order of `_operand_a`."""
    W: gl.constexpr = limbs.shape[0]
    # [W, i, column, t, w, b]
    x = limbs.reshape([W, 2, 8, 4, 4, 4]).permute([0, 1, 4, 3, 5, 2])
    B: gl.constexpr = gl.DotOperandLayout(1, SUMS, 4)
    return gl.convert_layout(x.reshape([W, 128, 8]), B, assert_trivial=True)


@gluon.jit
def _store(sums, y_ptr, bias_ptr, first_n, first_m, M, N):
    """Store sums [BN, 2 rows] plus the bias to y."""
    LAYOUT: gl.constexpr = sums.type.layout
    n = first_n + gl.arange(0, sums.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    m = first_m + gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    if bias_ptr is not None:
        sums += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
    mask = (m[None, :] < M) & (n[:, None] < N)
    gl.store(y_ptr + m[None, :] * N + n[:, None], sums.to(y_ptr.dtype.element_ty), mask=mask)


@gluon.jit(do_not_specialize=["M"])
def _wna16_gemv_imma(
    limbs_ptr,  # [K/128, T, 1024] bytes
    input_scales_ptr,  # [K/128, T, 8]
    input_sums_ptr,  # [K/128, T, 8]; None: symmetric
    packed_ptr,  # [N/64, K/128, 64, 16 BITS] bytes
    scales_ptr,  # [N/64, G, 64]
    offsets_ptr,  # [N/64, G, 64] or None
    bias_ptr,  # [N] or None
    y_ptr,  # [M, N]
    M,
    N,
    k_steps,
    lora,  # TermArguments
    PARTS: gl.constexpr,
    TILES: gl.constexpr,  # T
    CONFIG: gl.constexpr,  # GemvImmaConfig
    NUMERICS: gl.constexpr,  # WeightNumerics
    PACKED: gl.constexpr,  # layouts()
    LIMBS: gl.constexpr,
    SUMS: gl.constexpr,
):
    W: gl.constexpr = CONFIG.warps
    BN: gl.constexpr = CONFIG.block_n
    IN_FLIGHT: gl.constexpr = CONFIG.steps_in_flight
    BITS: gl.constexpr = NUMERICS.bits
    STEPS_PER_GROUP: gl.constexpr = NUMERICS.steps_per_group
    ROW_BYTES: gl.constexpr = 16 * BITS  # bytes of a row in a K step
    A_FACTOR: gl.constexpr = 16 if BITS == 4 else 1  # factor of codes in operand A
    ROWS: gl.constexpr = gl.SliceLayout(2, SUMS)
    COLS: gl.constexpr = gl.SliceLayout(1, SUMS)
    term = lora_term(lora, PARTS)
    block = gl.program_id(0)
    stored_tile = block // (STORED_ROWS // BN)
    inside = block % (STORED_ROWS // BN)  # which BN rows of the stored tile
    warp = gl.arange(0, W, layout=gl.SliceLayout(1, PACKED))
    byte = gl.arange(0, ROW_BYTES * BN, layout=gl.SliceLayout(0, PACKED))
    packed_ptrs = packed_ptr + stored_tile.to(gl.int64) * k_steps * (ROW_BYTES * STORED_ROWS)
    packed_ptrs = packed_ptrs + inside * (ROW_BYTES * BN)
    packed_ptrs += byte[None, :]
    row_warp = gl.arange(0, W, layout=gl.SliceLayout(1, ROWS))
    row = gl.arange(0, BN, layout=gl.SliceLayout(0, ROWS))
    groups = k_steps // STEPS_PER_GROUP
    group_rows = stored_tile * groups * STORED_ROWS + inside * BN + row[None, :]
    limb_warp = gl.arange(0, W, layout=gl.SliceLayout(1, LIMBS))
    limb = gl.arange(0, 128 * COLUMNS, layout=gl.SliceLayout(0, LIMBS))[None, :]
    column_warp = gl.arange(0, W, layout=gl.SliceLayout(1, COLS))
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, COLS))[None, :]
    magic = gl.full([W, BN, COLUMNS], MAGIC, gl.int32, SUMS)
    totals = ()
    for _ in gl.static_range(TILES):
        totals += (gl.zeros([W, BN, COLUMNS], gl.float32, SUMS),)
    for first in range(0, k_steps, IN_FLIGHT * W):
        # after the last K step, repeat it with scales of 0
        codes = ()
        scales = ()
        offsets = ()
        for i in gl.static_range(IN_FLIGHT):
            k_step = gl.minimum(first + i * W + warp, k_steps - 1)
            # evict_first: codes are read once; the L2 should keep data that every K step reads,
            # and instructions
            ptrs = packed_ptrs + k_step[:, None] * (ROW_BYTES * STORED_ROWS)
            codes += (gl.load(ptrs, eviction_policy="evict_first"),)
            k_step = first + i * W + row_warp
            group = group_rows + (k_step // STEPS_PER_GROUP * STORED_ROWS)[:, None]
            mask = (k_step < k_steps)[:, None]
            scales += (gl.load(scales_ptr + group, mask=mask, other=0.0),)
            if offsets_ptr is not None:
                offsets += (gl.load(offsets_ptr + group, mask=mask, other=0.0),)
        if first == 0:
            # weights never change; the previous kernel may still write the limbs
            if PARTS > 0:
                prefetch_few_rows(term, block * BN, M, 2 * TILES, W)
            griddepcontrol_wait()
        for i in gl.static_range(IN_FLIGHT):
            a = _operand_a(codes[i], BITS, SUMS)
            scale = scales[i].to(gl.float32)[:, :, None] / A_FACTOR
            tile = gl.minimum(first + i * W + limb_warp, k_steps - 1)[:, None] * TILES
            column_tile = gl.minimum(first + i * W + column_warp, k_steps - 1)[:, None] * TILES
            new = ()
            for j in gl.static_range(TILES):
                limbs = gl.load(limbs_ptr + (tile + j) * (128 * COLUMNS) + limb)
                columns = (column_tile + j) * COLUMNS + column
                initial = magic
                if offsets_ptr is not None:
                    # distance of the zero point from the one already subtracted in operand A
                    zero = offsets[i].to(gl.float32) - NUMERICS.offset
                    zero = A_FACTOR * zero.to(gl.int32)[:, :, None]
                    initial -= zero * gl.load(input_sums_ptr + columns)[:, None, :]
                product = mma_v2(a, _operand_b(limbs, SUMS), initial)
                exact = product.to(gl.float32, bitcast=True) - MAGIC_FLOAT
                input_scale = gl.load(input_scales_ptr + columns)[:, None, :]
                new += (totals[j] + exact * (scale * input_scale),)
            totals = new
    launch_dependents()
    if PARTS > 0:
        totals = add_few_rows(term, totals, block * BN, M, SUMS)
    ROWS_PER_TILE: gl.constexpr = COLUMNS // LIMBS_PER_INPUT
    for j in gl.static_range(TILES):
        by_limb = totals[j].reshape([W, BN, ROWS_PER_TILE, LIMBS_PER_INPUT])
        sums = gl.sum(gl.sum(by_limb, 3), 0)
        _store(sums, y_ptr, bias_ptr, block * BN, j * ROWS_PER_TILE, M, N)
