"""Rounding of a linear's input to 8 bits in Triton, with one program per row.

The result is bit-exact with formats.numerics.activation.quantize_input on a CPU. A row is read as
several tensors (chunks), so that all loads are in flight before the first value is used. Legend: M
rows of x, K inputs.
"""

import torch
import triton
import triton.language as tl

from formats.numerics.activation import MIN_INPUT_SCALE
from formats.scheme import ActivationSpec
from qkernels.gpu.config import ceil_div, power_of_two
from qkernels.gpu.device import INTERPRETED, has_pdl, sm_count
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pdl import pdl_launch_and_wait
from qkernels.operands.codes import CODE_DTYPES
from qkernels.operands.codes_triton import (
    CODE_RANGE,
    encode,
    magnitude_bits,
    scale_of,
    scale_of_chunks,
)

# With more than 8192 channels, the next kernel may start early only up to this many rows.
WIDE_ROWS_LAUNCH_FIRST = 16
NO_PDL = {"PDL": False, "LAUNCH_FIRST": False}


def row_warps(block: int) -> int:
    """Return the warps of a program that reads a whole row in one pass.

    A thread has 16 channels; there are at most 32 warps.
    """
    return min(32, max(1, block // 512))


def row_chunks(width: int, element_size: int) -> tuple[int, int, int]:
    """Return (channels per chunk, number of chunks, warps) of a row.

    A thread has 8 channels of each chunk.
    """
    # Times for 4096 rows of 14336, in us. silu to codes: 72, with 4096 and 16 warps 79, with 8192
    # and 32 warps 114, with 1024 and 4 warps 74. quantize_input: 43, 47, 49.
    largest = 2048 if width * element_size <= 2**15 else 4096
    chunk = min(largest, max(256, power_of_two(width)))
    return chunk, ceil_div(width, chunk), chunk // 256


def dependent_launch(rows: int, width: int, device: torch.device) -> dict[str, bool]:
    """Return launch arguments: PDL, and whether the next kernel may start before this one waits.

    After an early start, a product loads its first weights while the kernel before this one still
    runs. Rounding included, qkv at 256 rows takes 14.9 us instead of 15.3, and down at 1 row 18.7
    instead of 19.4. But waiting blocks occupy SMs: down at 64 rows takes 19.9 us instead of 19.6,
    and at 256 rows 33.8 instead of 33.4.
    """
    if not has_pdl(device):
        return NO_PDL
    first = rows <= (2 * sm_count(device) if width <= 8192 else WIDE_ROWS_LAUNCH_FIRST)
    return {"PDL": True, "LAUNCH_FIRST": first, "launch_pdl": True}


def quantize_input(
    x_MK: torch.Tensor, activation: ActivationSpec, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement ops.quantize_input in Triton."""
    if activation.per == "group":
        return _quantize_groups_of(x_MK, activation)
    M, K = x_MK.shape
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    dtype = CODE_DTYPES[activation.type]
    smallest, largest = CODE_RANGE[dtype]
    codes_MK = torch.empty((M, K), dtype=dtype, device=x_MK.device)
    scales_M1 = torch.empty((M, 1), dtype=torch.float32, device=x_MK.device)
    if M:
        chunk, chunks, warps = row_chunks(K, x_MK.element_size())
        with on_device(x_MK):
            launch(
                _quantize_rows,
                (M,),
                x_MK,
                None if activation.dynamic else scale,
                codes_MK,
                scales_M1,
                x_MK.stride(0),
                K,
                SMALLEST=smallest,
                LARGEST=largest,
                MIN_SCALE=MIN_INPUT_SCALE,
                CHUNK=chunk,
                CHUNKS=chunks,
                INTERPRETED=INTERPRETED,
                num_warps=warps,
                **dependent_launch(M, K, x_MK.device),
            )
    return codes_MK, scales_M1


def _quantize_groups_of(
    x_MK: torch.Tensor, activation: ActivationSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round x with one scale per group of inputs in each row: scales [M, groups]."""
    M, K = x_MK.shape
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    dtype, size = CODE_DTYPES[activation.type], activation.group_size
    smallest, largest = CODE_RANGE[dtype]
    groups = K // size
    codes_MK = torch.empty((M, K), dtype=dtype, device=x_MK.device)
    scales_MS = torch.empty((M, groups), dtype=torch.float32, device=x_MK.device)
    if M:
        rows = max(1, 2048 // size)
        with on_device(x_MK):
            launch(
                _quantize_groups,
                (ceil_div(groups, rows), M),
                x_MK,
                codes_MK,
                scales_MS,
                x_MK.stride(0),
                groups,
                SIZE=size,
                ROWS=rows,
                SMALLEST=smallest,
                LARGEST=largest,
                MIN_SCALE=MIN_INPUT_SCALE,
                INTERPRETED=INTERPRETED,
                num_warps=8,
                **dependent_launch(M, K, x_MK.device),
            )
    return codes_MK, scales_MS


@triton.jit
def _quantize_rows(
    x_ptr,  # [M, K]
    scale_ptr,  # [] or None: dynamic
    codes_ptr,  # [M, K]
    scales_ptr,  # [M]
    stride_x,
    K,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
    LAUNCH_FIRST: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    DYNAMIC: tl.constexpr = scale_ptr is None
    c = tl.arange(0, CHUNK)
    if PDL:
        pdl_launch_and_wait(LAUNCH_FIRST)
    x = ()
    for i in tl.static_range(CHUNKS):
        k = i * CHUNK + c
        x = x + (tl.load(x_ptr + row * stride_x + k, mask=k < K, other=0.0),)
    scale = scale_of_chunks(x, LARGEST, MIN_SCALE) if DYNAMIC else tl.load(scale_ptr)
    DTYPE: tl.constexpr = codes_ptr.dtype.element_ty
    for i in tl.static_range(CHUNKS):
        k = i * CHUNK + c
        codes = encode(x[i], scale, SMALLEST, LARGEST, DTYPE, DYNAMIC, INTERPRETED)
        tl.store(codes_ptr + row * K + k, codes, mask=k < K)
    tl.store(scales_ptr + row, scale)


@triton.jit
def _quantize_groups(
    x_ptr,  # [M, groups * SIZE]
    codes_ptr,  # the same
    scales_ptr,  # [M, groups]
    stride_x,
    groups,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # groups per program
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    PDL: tl.constexpr,
    LAUNCH_FIRST: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    mask = (group < groups)[:, None] & (k >= 0)
    if PDL:
        pdl_launch_and_wait(LAUNCH_FIRST)
    x = tl.load(x_ptr + row * stride_x + k, mask=mask, other=0.0)
    scales = scale_of(magnitude_bits(x), LARGEST, MIN_SCALE)
    DTYPE: tl.constexpr = codes_ptr.dtype.element_ty
    codes = encode(x, scales[:, None], SMALLEST, LARGEST, DTYPE, True, INTERPRETED)
    tl.store(codes_ptr + row * groups * SIZE + k, codes, mask=mask)
    tl.store(scales_ptr + row * groups + group, scales, mask=group < groups)
