"""W4A16 of a few rows on the integer tensor core: x as 8-bit limbs. Knows no file format.

The four limbs of an input (limbs.py) are columns of an 8-bit product, which few rows leave
empty anyway. Codes become operands by a mask: a byte is 16 (q - 8), or q - 128. The sum of a step
is exact; then the scale multiplies it. Every warp streams its own part of the weight from memory
into operand registers, and nothing is shared between warps before the end.

Legend: M rows of x, K inputs, N outputs, G groups; W warps of a block, each with its own steps of
128 inputs; BN outputs of a block; T tiles of 8 columns (row, digit), each of two rows.
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
from qkernels.operands.limbs import (
    K_STEP,
    LIMBS_COLUMNS,
    LIMBS_OF_INPUT,
    TILE_WORDS,
    Limbs,
)
from qkernels.wna16.layout import TILE_N
from qkernels.wna16.prepack import offset_of
from qkernels.wna16.sm90_gemv_imma_config import GemvImmaConfig

# Floats that are integers, 1.5 2^23 and 2^22 around it: of 128 products |sum| <= 128 128 255.
MAGIC = gl.constexpr(0x4B400000)
MAGIC_FLOAT = gl.constexpr(12582912.0)


@functools.cache
def layouts(W: int, BN: int, bits: int) -> dict[str, object]:
    """Where each lane (g = lane / 4, t = lane % 4) has what.

    Both operands lie in memory as the lanes want them, 16 bytes at a time. WEIGHTS: bytes of codes
    [W, BN row], of limbs 4 bits in a row of 64, or 8 bits in a row of 128, whose halves are two
    turns. INPUTS: limbs [W, 1024]. PRODUCT: what the tensor core adds up.
    """

    def streamed(size: int, row: int = 64) -> gl.DistributedLinearLayout:
        lanes = [16, 32, row, 2 * row, 4 * row]
        turns = [1 << i for i in range(6, size.bit_length() - 1) if 1 << i not in lanes]
        return gl.DistributedLinearLayout(
            reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], *([0, turn] for turn in turns)],
            lane_bases=[[0, lane] for lane in lanes],
            warp_bases=[[1 << i, 0] for i in range(W.bit_length() - 1)],
            block_bases=[],
            shape=[W, size],
        )

    product = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[W, 1, 1], instr_shape=[1, 16, 8]
    )
    row = 16 * bits
    return {
        "WEIGHTS": streamed(row * BN, row),
        "INPUTS": streamed(4 * TILE_WORDS),
        "PRODUCT": product,
    }


def run(
    limbs: Limbs,
    weight: PreparedWeight,
    bias: torch.Tensor | None,
    config: GemvImmaConfig,
) -> torch.Tensor:
    """Limbs of M rows to [M, N]. For groups of 128 n, and few rows.

    A row with an inf or NaN comes out as NaN.
    """
    M, K = limbs.num_rows, limbs.in_features
    N, bits = weight.out_features, weight.spec.bits
    y_MN = torch.empty((M, N), dtype=weight.dtype, device=weight.device)
    with on_device(y_MN):
        launch(
            _w4a16_digits,
            (weight.tensors["words"].shape[0] * (TILE_N // config.block_n),),
            limbs.words.view(torch.int8),
            limbs.scales,
            limbs.sums,
            weight.tensors["words"].view(torch.int8),
            weight.tensors["scales"],
            weight.tensors.get("offsets"),
            bias,
            y_MN,
            M,
            N,
            K // K_STEP,
            STEPS_OF_GROUP=weight.spec.group_length(K) // K_STEP,
            BITS=bits,
            OFFSET=offset_of(weight),
            TILES=limbs.words.shape[1],
            COLUMNS=LIMBS_COLUMNS,
            D=LIMBS_OF_INPUT,
            W=config.warps,
            BN=config.block_n,
            TILE_N=TILE_N,
            AHEAD=config.ahead,
            **layouts(config.warps, config.block_n, bits),
            num_warps=config.warps,
            launch_pdl=True,
        )
    return y_MN


@gluon.jit
def _left(codes, BITS: gl.constexpr, PRODUCT: gl.constexpr):
    """Bytes of codes [W, BN row] to the tensor core's left operand [W, BN, 128]. Moves nothing.

    4 bits: 16 (q - 8). Input 32 j + 16 h + 4 t + b of the operand is half h of byte b of word j of
    lane t. 8 bits: q - 128. Input 64 i + 16 w + 4 t + b is byte b of word w of lane t in turn i.
    """
    W: gl.constexpr = codes.shape[0]
    BN: gl.constexpr = codes.shape[1] // (16 * BITS)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 4)
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
    return gl.convert_layout(values.reshape([W, BN, 128]), LEFT, assert_trivial=True)


@gluon.jit
def _right(limbs, PRODUCT: gl.constexpr):
    """Limbs [W, 1024] as limbs.py has them to [W, 128, 8], inputs in the order of `_left`."""
    W: gl.constexpr = limbs.shape[0]
    # [W, i, column, t, w, b]
    x = limbs.reshape([W, 2, 8, 4, 4, 4]).permute([0, 1, 4, 3, 5, 2])
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, 4)
    return gl.convert_layout(x.reshape([W, 128, 8]), RIGHT, assert_trivial=True)


@gluon.jit
def _store(sums, y_ptr, bias_ptr, first_n, first_m, M, N):
    """Sums [BN, 2 rows] to y, with the bias."""
    LAYOUT: gl.constexpr = sums.type.layout
    n = first_n + gl.arange(0, sums.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    m = first_m + gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    if bias_ptr is not None:
        sums += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
    inside = (m[None, :] < M) & (n[:, None] < N)
    gl.store(y_ptr + m[None, :] * N + n[:, None], sums.to(y_ptr.dtype.element_ty), mask=inside)


@gluon.jit(do_not_specialize=["M"])
def _w4a16_digits(
    limbs_ptr,  # [steps, T, 1024] bytes
    input_scales_ptr,  # [steps, T, 8]
    sums_ptr,  # [steps, T, 8] or None: symmetric
    codes_ptr,  # [N/64, steps, 64, 16 BITS] bytes: the words of gemm.py
    scales_ptr,  # [N/64, G, 64]
    offsets_ptr,  # [N/64, G, 64] or None
    bias_ptr,  # [N] or None
    y_ptr,  # [M, N]
    M,
    N,
    steps,
    STEPS_OF_GROUP: gl.constexpr,
    BITS: gl.constexpr,
    OFFSET: gl.constexpr,
    TILES: gl.constexpr,
    COLUMNS: gl.constexpr,
    D: gl.constexpr,
    W: gl.constexpr,
    BN: gl.constexpr,
    TILE_N: gl.constexpr,
    AHEAD: gl.constexpr,
    WEIGHTS: gl.constexpr,  # layouts()
    INPUTS: gl.constexpr,
    PRODUCT: gl.constexpr,
):
    ROW: gl.constexpr = 16 * BITS  # bytes of a row and step
    # what the operand's value of a code is multiplied by
    SHIFTED: gl.constexpr = 16 if BITS == 4 else 1
    ROWS: gl.constexpr = gl.SliceLayout(2, PRODUCT)
    COLS: gl.constexpr = gl.SliceLayout(1, PRODUCT)
    block = gl.program_id(0)
    stored, part = block // (TILE_N // BN), block % (TILE_N // BN)
    warp = gl.arange(0, W, layout=gl.SliceLayout(1, WEIGHTS))
    byte = gl.arange(0, ROW * BN, layout=gl.SliceLayout(0, WEIGHTS))
    codes_ptrs = codes_ptr + stored.to(gl.int64) * steps * (ROW * TILE_N) + part * (ROW * BN)
    codes_ptrs += byte[None, :]
    row_warp = gl.arange(0, W, layout=gl.SliceLayout(1, ROWS))
    row = gl.arange(0, BN, layout=gl.SliceLayout(0, ROWS))
    group_rows = stored * (steps // STEPS_OF_GROUP) * TILE_N + part * BN + row[None, :]
    limb_warp = gl.arange(0, W, layout=gl.SliceLayout(1, INPUTS))
    limb = gl.arange(0, 128 * COLUMNS, layout=gl.SliceLayout(0, INPUTS))[None, :]
    column_warp = gl.arange(0, W, layout=gl.SliceLayout(1, COLS))
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, COLS))[None, :]
    magic = gl.full([W, BN, COLUMNS], MAGIC, gl.int32, PRODUCT)
    totals = ()
    for _ in gl.static_range(TILES):
        totals += (gl.zeros([W, BN, COLUMNS], gl.float32, PRODUCT),)
    for first in range(0, steps, AHEAD * W):
        # beyond the last step: the last, with scales of 0
        codes = ()
        scales = ()
        offsets = ()
        for i in gl.static_range(AHEAD):
            step = gl.minimum(first + i * W + warp, steps - 1)
            # each is read once: the L2 is for what every step reads again, down to the instructions
            ptrs = codes_ptrs + step[:, None] * (ROW * TILE_N)
            codes += (gl.load(ptrs, eviction_policy="evict_first"),)
            step = first + i * W + row_warp
            group = group_rows + (step // STEPS_OF_GROUP * TILE_N)[:, None]
            inside = (step < steps)[:, None]
            scales += (gl.load(scales_ptr + group, mask=inside, other=0.0),)
            if offsets_ptr is not None:
                offsets += (gl.load(offsets_ptr + group, mask=inside, other=0.0),)
        if first == 0:
            # weights never change; the rest is the kernel's before until it ends
            griddepcontrol_wait()
        for i in gl.static_range(AHEAD):
            left = _left(codes[i], BITS, PRODUCT)
            scale = scales[i].to(gl.float32)[:, :, None] / SHIFTED
            step = gl.minimum(first + i * W + limb_warp, steps - 1)[:, None] * TILES
            column_step = gl.minimum(first + i * W + column_warp, steps - 1)[:, None] * TILES
            new = ()
            for j in gl.static_range(TILES):
                limbs = gl.load(limbs_ptr + (step + j) * (128 * COLUMNS) + limb)
                of_columns = (column_step + j) * COLUMNS + column
                initial = magic
                if offsets_ptr is not None:
                    # how far the zero is from the one that the operand has subtracted
                    zero = SHIFTED * (offsets[i].to(gl.float32) - OFFSET).to(gl.int32)[:, :, None]
                    initial -= zero * gl.load(sums_ptr + of_columns)[:, None, :]
                product = mma_v2(left, _right(limbs, PRODUCT), initial)
                exact = product.to(gl.float32, bitcast=True) - MAGIC_FLOAT
                input_scale = gl.load(input_scales_ptr + of_columns)[:, None, :]
                new += (totals[j] + exact * (scale * input_scale),)
            totals = new
    launch_dependents()
    for j in gl.static_range(TILES):
        digits_of_rows = totals[j].reshape([W, BN, COLUMNS // D, D])
        sums = gl.sum(gl.sum(digits_of_rows, 3), 0)
        _store(sums, y_ptr, bias_ptr, block * BN, j * (COLUMNS // D), M, N)
