"""Products of experts with packed weights in Triton, with 16-bit or 8-bit activations.

One matrix holds all experts, prepacked like a single linear: an expert's tiles of 64 outputs follow
those of the previous expert. The weight is operand A. Rows of x are gathered.

- `experts_packed`: 4- or 8-bit weights, blocks of a GGUF file or 4-bit floats, with 16-bit
  activations. It uses the layout of wna16/prepack.py and the inner loop of wna16/triton_gemm.py: a
  scale multiplies the sums of a K step; blocks and 4-bit floats are scaled before the product.
- `experts_w4a8`: 4-bit weights and 8-bit activations. It uses the layout of w4a8/layout.py and the
  inner loop of w4a8/triton_gemm.py: codes are expanded to int8 or e4m3. The sum of a group
  (integer, or float32 for float8) is scaled and added to a float32 total. With one scale per
  output, integers are summed to the end.

Legend: K inputs, N outputs of an expert, G groups; BM pairs, BN outputs, BK inputs of a tile.
"""

import triton
import triton.language as tl

from qkernels.moe.tiles_triton import clear_part, find_pairs, store_pairs
from qkernels.w4a8.triton_gemm import expanded_weights
from qkernels.wna16.triton_gemm import prefetch_groups
from qkernels.wna16.unpack.fp4 import fp4_weights, prefetch_scales
from qkernels.wna16.unpack.groups import grouped_weights, prefetch_steps
from qkernels.wna16.unpack.words import unpack


@triton.jit(do_not_specialize=["P"])
def experts_packed(
    x_ptr,  # [rows, K]
    packed_ptr,  # [E N/64, K/BK, 64, WORDS]
    scales_ptr,  # [E N/64, G, 64]; FP4 [E N/64, K/BK, 64, PARTS]; GROUPING [.., PARTS, groups]
    offsets_ptr,  # [E N/64, G, 64] or None
    blocks_ptr,  # factors [E N] with FP4; [E N/64, blocks, 64, PARTS] with GROUPING; or None
    bias_ptr,  # [E, N] or None
    ids_ptr,  # [P]
    sorted_ptr,  # [P], or None if there are few ids
    counts_ptr,  # [E], or None
    weights_ptr,  # [P]
    y_ptr,
    P,
    N,
    K,
    E,
    ROW_PAIRS: tl.constexpr,  # pairs that share a row of x
    STEPS_PER_GROUP: tl.constexpr,
    GROUPING: tl.constexpr,  # Grouping, or None: each K step is in one group
    FP4: tl.constexpr,  # Fp4Words, or None: integer codes
    MAGIC: tl.constexpr,
    OFFSET: tl.constexpr,
    BITS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN: tl.constexpr,  # K is divisible by BK
    TILE_N: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    USE_PTX: tl.constexpr,
    TILE: tl.constexpr,
):
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    WORDS: tl.constexpr = BK * BITS // 32
    block, tile_n, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        # the previous kernel computes which experts are active
        tl.extra.cuda.gdc_wait()
    expert, pair, valid = find_pairs(ids_ptr, sorted_ptr, counts_ptr, block, P, E, BM, TILE)
    if tl.sum(valid.to(tl.int32), 0) > 0:
        row = tl.arange(0, BN)
        steps = tl.cdiv(K, BK)
        groups = steps // STEPS_PER_GROUP
        first = split * steps // SPLIT
        last = (split + 1) * steps // SPLIT
        tile = expert * (N // BN) + tile_n
        stored_tile = tile * (BN // TILE_N) + row // TILE_N
        stored_row = row % TILE_N
        x_row = (pair // ROW_PAIRS).to(tl.int64)
        x_ptrs = x_ptr + x_row[None, :] * K + (first * BK + tl.arange(0, BK))[:, None]
        packed_rows = ((stored_tile.to(tl.int64) * steps + first) * TILE_N + stored_row) * WORDS
        packed_ptrs = packed_ptr + packed_rows[:, None] + tl.arange(0, WORDS)[None, :]
        group_rows = stored_tile * groups * TILE_N + stored_row
        if USE_PTX and FP4 is not None:
            prefetch_scales(scales_ptr, tile, first, last, steps, FP4, TILE_N, BN)
        elif USE_PTX and GROUPING is not None:
            prefetch_steps(scales_ptr, tile, first, last, steps, GROUPING, TILE_N, BN)
        elif USE_PTX:
            prefetch_groups(scales_ptr, tile, first, last, groups, STEPS_PER_GROUP, TILE_N, BN)
            if offsets_ptr is not None:
                prefetch_groups(offsets_ptr, tile, first, last, groups, STEPS_PER_GROUP, TILE_N, BN)
        total = tl.zeros((BN, BM), tl.float32)
        for step in tl.range(first, last, num_stages=STAGES):
            if EVEN:
                x = tl.load(x_ptrs, mask=valid[None, :], other=0.0)
            else:
                k = step * BK + tl.arange(0, BK)
                x = tl.load(x_ptrs, mask=valid[None, :] & (k[:, None] < K), other=0.0)
            packed = tl.load(packed_ptrs, eviction_policy="evict_first")
            if FP4 is not None:
                weights = fp4_weights(
                    packed,
                    scales_ptr,
                    stored_tile,
                    stored_row,
                    step,
                    steps,
                    FP4,
                    BN,
                    BK,
                    TILE_N,
                    DTYPE,
                    USE_PTX,
                )
                total = tl.dot(weights, x, total)
            elif GROUPING is not None:
                weights = grouped_weights(
                    packed,
                    scales_ptr,
                    blocks_ptr,
                    stored_tile,
                    stored_row,
                    step,
                    steps,
                    GROUPING,
                    MAGIC,
                    OFFSET,
                    BITS,
                    BN,
                    BK,
                    TILE_N,
                    DTYPE,
                    USE_PTX,
                )
                total = tl.dot(weights, x, total)
            else:
                group = group_rows + step // STEPS_PER_GROUP * TILE_N
                scale = tl.load(scales_ptr + group)
                values = unpack(packed, MAGIC, BITS, BN, BK, DTYPE, USE_PTX)
                if offsets_ptr is None:
                    codes = values - OFFSET
                else:
                    codes = values - tl.load(offsets_ptr + group)[:, None]
                total += tl.dot(codes.to(DTYPE), x) * scale.to(tl.float32)[:, None]
            x_ptrs += BK
            packed_ptrs += TILE_N * WORDS
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
        if GROUPING is not None and USE_PTX:
            total *= 1 / GROUPING.shrink
        if FP4 is not None:
            total *= tl.load(blocks_ptr + stored_tile * TILE_N + stored_row)[:, None]
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + expert * N + tile_n * BN + row).to(tl.float32)
            total += tl.where(split == 0, bias, 0.0)[:, None]
        store_pairs(
            total, y_ptr, weights_ptr, pair, valid, tile_n, split, P, N, DTYPE, BN, BM, TILE
        )
    elif TILE.partial and TILE.parts:
        clear_part(ids_ptr, y_ptr, block, tile_n, split, P, N, E, BN, TILE)


@triton.jit(do_not_specialize=["P"])
def experts_w4a8(
    x_ptr,  # codes [rows, K]
    x_scales_ptr,  # [rows]
    packed_ptr,  # [E N/64, K/BK, 64, BK/2]
    scales_ptr,  # [E N/64, G, 64]; without groups float32 [E N]
    bias_ptr,  # [E, N] or None
    ids_ptr,  # [P]
    sorted_ptr,  # [P], or None if there are few ids
    counts_ptr,  # [E], or None
    weights_ptr,  # [P]
    y_ptr,
    P,
    N,
    K,
    E,
    DTYPE: tl.constexpr,  # of activations
    ROW_PAIRS: tl.constexpr,  # pairs that share a row of x
    STEPS_PER_GROUP: tl.constexpr,  # 0: one scale per output, no groups
    FACTOR: tl.constexpr,  # factor by which codes exceed their values in the product
    INTEGERS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TILE_N: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    USE_PTX: tl.constexpr,
    TILE: tl.constexpr,
):
    PRODUCT: tl.constexpr = tl.int32 if INTEGERS else tl.float32
    TO_THE_END: tl.constexpr = INTEGERS and STEPS_PER_GROUP == 0
    SUM: tl.constexpr = tl.int32 if TO_THE_END else tl.float32
    block, tile_n, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        # the previous kernel computes which experts are active
        tl.extra.cuda.gdc_wait()
    expert, pair, valid = find_pairs(ids_ptr, sorted_ptr, counts_ptr, block, P, E, BM, TILE)
    if tl.sum(valid.to(tl.int32), 0) > 0:
        row = tl.arange(0, BN)
        steps = K // BK
        first = split * steps // SPLIT
        last = (split + 1) * steps // SPLIT
        stored_tile = (expert * (N // BN) + tile_n) * (BN // TILE_N) + row // TILE_N
        stored_row = row % TILE_N
        x_row = (pair // ROW_PAIRS).to(tl.int64)
        x_ptrs = x_ptr + x_row[None, :] * K + (first * BK + tl.arange(0, BK))[:, None]
        packed_rows = (stored_tile.to(tl.int64) * steps + first) * TILE_N + stored_row
        packed_ptrs = packed_ptr + packed_rows[:, None] * (BK // 2) + tl.arange(0, BK // 2)[None, :]
        if STEPS_PER_GROUP > 0:
            groups = steps // STEPS_PER_GROUP
            scale_ptrs = scales_ptr + stored_tile * groups * TILE_N + stored_row
        zero = tl.zeros((), tl.float32).to(x_ptr.dtype.element_ty)
        total = tl.zeros((BN, BM), SUM)
        for step in tl.range(first, last, num_stages=STAGES):
            x = tl.load(x_ptrs, mask=valid[None, :], other=zero)
            packed = tl.load(packed_ptrs, eviction_policy="evict_first")
            weights = expanded_weights(packed, INTEGERS, BN, BK, USE_PTX)
            if TO_THE_END:
                total = tl.dot(weights, x, total, out_dtype=tl.int32)
            else:
                # the tensor core keeps 14 bits of a float8 sum: add it in float32 after each step
                product = tl.dot(weights, x, out_dtype=PRODUCT).to(tl.float32)
                if STEPS_PER_GROUP > 0:
                    scale = tl.load(scale_ptrs + step // STEPS_PER_GROUP * TILE_N).to(tl.float32)
                    factor = tl.broadcast_to((scale / FACTOR)[:, None], BN, BM)
                    total = tl.fma(product, factor, total)
                else:
                    total += product
            x_ptrs += BK
            packed_ptrs += TILE_N * (BK // 2)
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
        x_scales = tl.load(x_scales_ptr + x_row, mask=valid, other=0.0)
        sums = total.to(tl.float32) * x_scales[None, :]
        if STEPS_PER_GROUP == 0:
            sums *= tl.load(scales_ptr + stored_tile * TILE_N + stored_row)[:, None]
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + expert * N + tile_n * BN + row).to(tl.float32)
            sums += tl.where(split == 0, bias, 0.0)[:, None]
        store_pairs(sums, y_ptr, weights_ptr, pair, valid, tile_n, split, P, N, DTYPE, BN, BM, TILE)
    elif TILE.partial and TILE.parts:
        clear_part(ids_ptr, y_ptr, block, tile_n, split, P, N, E, BN, TILE)
