"""Latent attention over paged entries for sm_90, in Gluon, for decode rows and short chunks.

A warp-specialized kernel: four warps load 64 entries per step by TMA, a warpgroup computes scores
and weights, and one or two more sum values, while the next scores are computed. Entries stay in
shared memory, where both products read them: as keys [keys, E], and transposed as values
[L, keys]. Queries are the columns of both products.

Legend: see latent/ops.py; N columns of a tile (query rows times heads), S splits of a context.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from qkernels.attention.cache import AttentionStep
from qkernels.attention.merge_splits import merge_splits
from qkernels.attention.sm90_decode_8bit import request_of
from qkernels.attention.triton_paged import LOG2_E
from qkernels.gpu.config import ceil_div
from qkernels.gpu.device import sm_count
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pdl import pdl_options
from qkernels.gpu.pdl_gluon import griddepcontrol_wait, launch_dependents
from qkernels.gpu.pipeline import make_pipeline
from qkernels.gpu.tma import aligned, describe
from qkernels.latent.cache import PagedLatents
from qkernels.latent.sm90_decode_config import (
    CHUNK_WIDTH,
    LOAD_REGISTERS,
    STEP_KEYS,
    Sm90LatentConfig,
    sm90_latent_config,
)
from qkernels.latent.sm90_decode_load import load
from qkernels.latent.sm90_decode_mma import score, sum_values
from qkernels.latent.sm90_decode_structs import (
    KEYS,
    STAGES,
    WIDTH,
    Entries,
    Latents,
    SharedMemory,
    Tile,
    Weights,
)


def latent_attention(
    q_THE: torch.Tensor,
    cache: PagedLatents,
    step: AttentionStep,
    *,
    latent_width: int,
    scale: float,
    config: Sm90LatentConfig | None = None,
) -> torch.Tensor:
    """Implement ops.latent_attention over 16-bit pages; `config` replaces the default one."""
    (T, H, E), R, L = q_THE.shape, step.context_lengths_R.shape[0], latent_width
    q_THE = aligned(q_THE.contiguous())
    out_THL = q_THE.new_empty((T, H, L))
    if T == 0 or R == 0:
        return out_THL
    if cache.pages.shape[0] == 0:
        return out_THL.zero_()
    if config is None:
        config = sm90_latent_config(
            num_requests=R,
            heads=H,
            max_query_len=step.max_query_len,
            max_context_len=step.max_context_len,
            sm_count=sm_count(q_THE.device),
        )
    partials = sums = None
    if config.split > 1:
        partials = out_THL.new_empty((T, H, config.split, L), dtype=torch.float32)
        sums = out_THL.new_empty((2, T, H, config.split), dtype=torch.float32)
    # Each request has one block, or request r owns the blocks from query_starts[r] // block_q + r
    # on, as in paged attention. The heads of a block run at the same time, because they read the
    # same entries.
    search = step.max_query_len > config.block_q
    blocks = T // config.block_q + R if search else R
    grid = (ceil_div(H, config.block_heads), blocks, config.split)
    with on_device(q_THE):
        launch(
            _latent_attention,
            grid,
            q_THE,
            boxes(cache.pages),
            step.block_tables_RX,
            step.query_starts_R1,
            step.context_lengths_R,
            out_THL,
            partials,
            sums,
            R,
            T,
            scale * LOG2_E,
            step.block_tables_RX.stride(0),
            H=H,
            E=E,
            L=L,
            N=config.columns,
            BLOCK_HEADS=config.block_heads,
            PAGE=cache.page_size,
            SPLIT=config.split,
            SEARCH=search,
            SCORE_REGISTERS=config.score_registers,
            LOAD_REGISTERS=LOAD_REGISTERS,
            num_warps=config.value_warps,
            maxnreg=config.registers,
            **pdl_options(q_THE, T),
        )
    if config.split == 1:
        return out_THL
    return merge_splits(partials, sums, step.query_starts_R1, out_THL, None)


def boxes(pages_PBE: torch.Tensor) -> TensorDescriptor:
    """Return a TMA descriptor with boxes of one page, or 64 tokens of it, and 128 bytes."""
    rows = min(STEP_KEYS, pages_PBE.shape[1])
    return describe(_descriptor, pages_PBE, (1, rows, CHUNK_WIDTH))


def _descriptor(base, shape, strides, block) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    return TensorDescriptor(base, shape, strides, block, layout)


@gluon.jit(do_not_specialize=["R", "T", "stride_table"])
def _latent_attention(
    q_ptr,  # as in sm90_decode_structs.Latents
    pages,
    tables_ptr,  # [R, X]
    starts_ptr,  # [R + 1]
    lengths_ptr,  # [R]
    out_ptr,
    partials_ptr,
    sums_ptr,
    R,
    T,
    scale,
    stride_table,
    H: gl.constexpr,
    E: gl.constexpr,
    L: gl.constexpr,
    N: gl.constexpr,
    BLOCK_HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    SPLIT: gl.constexpr,
    SEARCH: gl.constexpr,
    SCORE_REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    BLOCK_Q: gl.constexpr = N // BLOCK_HEADS
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shared = SharedMemory(
        q_latent=gl.allocate_shared_memory(DTYPE, [1, N, L], layout),
        q_rope=gl.allocate_shared_memory(DTYPE, [1, N, WIDTH], layout),
        entries=make_pipeline(
            Entries(
                latent=gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, L], layout),
                rope=gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, WIDTH], layout),
            ),
            STAGES,
            1,
        ),
        weights=make_pipeline(
            Weights(
                weight=gl.allocate_shared_memory(DTYPE, [N, KEYS], layout),
                factor=gl.allocate_shared_memory(gl.float32, [N], flat),
            ),
            1,
            1,
        ),
    )
    fence_async_shared()
    if PDL:
        launch_dependents()
        griddepcontrol_wait()
    block, split = gl.program_id(1), gl.program_id(2)
    request = block
    if SEARCH:
        request = request_of(starts_ptr, block, R, BLOCK_Q)
    start = gl.load(starts_ptr + request)
    count = gl.load(starts_ptr + request + 1) - start
    before = gl.load(lengths_ptr + request) - count
    first_row = gl.to_tensor(0)
    if SEARCH:
        first_row = (block - start // BLOCK_Q - request) * BLOCK_Q
    # a block after the request's last row has no steps and stores nothing
    end = gl.where(first_row < count, before + gl.minimum(first_row + BLOCK_Q, count), 0)
    first_step = 0
    last_step = (end + KEYS - 1) // KEYS
    if SPLIT > 1:
        steps = (last_step + SPLIT - 1) // SPLIT
        first_step = split * steps
        last_step = gl.maximum(gl.minimum(last_step, first_step + steps), first_step)
    latents = Latents(
        q_ptr=q_ptr,
        pages=pages,
        out_ptr=out_ptr,
        partials_ptr=partials_ptr,
        sums_ptr=sums_ptr,
        T=T,
        scale=scale,
        H=H,
        E=E,
        L=L,
        N=N,
        BLOCK_HEADS=BLOCK_HEADS,
        PAGE=PAGE,
        SPLIT=SPLIT,
    )
    tile = Tile(
        table=tables_ptr + request.to(gl.int64) * stride_table,
        start=start,
        count=count,
        before=before,
        end=end,
        first_row=first_row,
        first_head=gl.program_id(0) * BLOCK_HEADS,
        split=split,
        first_step=gl.to_tensor(first_step),
        last_step=last_step,
    )
    gl.warp_specialize(
        [
            (sum_values, (latents, shared, tile)),
            (score, (latents, shared, tile)),
            (load, (latents, shared, tile, PDL, 0)),
            (load, (latents, shared, tile, PDL, 1)),
            (load, (latents, shared, tile, PDL, 2)),
            (load, (latents, shared, tile, PDL, 3)),
        ],
        [4, 1, 1, 1, 1],
        [SCORE_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS],
    )
