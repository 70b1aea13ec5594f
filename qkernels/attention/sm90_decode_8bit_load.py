"""How codes of 8-bit pages come into a block of sm90_decode_8bit.py, and where each lane has them.

Legend: W warps, N keys of a warp's step, D head dim; b a byte of what a lane loads at once, t =
lane % 4, g = lane / 4. The operands' index that the tensor core sums over may be in any order that
both sides share, so it follows the memory:

    keys      lane (g, t) loads the bytes d = 64 c + 16 t + b of the keys 8 j + g
    values    lane (g, t) loads the bytes d = C g + b, C = D / 8, of two keys 2 p and 2 p + 1,
              where p = t + 4 r
"""

import functools

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from qkernels.gpu.gluon_compat import load_elements

WARPS = 4
KEYS_OF_WARP = 32


def _bases(*powers: int, dim: int, rank: int = 4) -> list[list[int]]:
    """Unit vectors of a layout along one dimension."""
    return [[power if axis == dim else 0 for axis in range(rank)] for power in powers]


def _powers(first: int, end: int) -> list[int]:
    """first, 2 first, 4 first .. below end."""
    found = []
    while first < end:
        found.append(first)
        first *= 2
    return found


@functools.cache
def layouts(D: int) -> dict[str, object]:
    """Where each lane has what, as the module's docstring says.

    KEYS: words of codes [W, N / 16, 16, D / 4]. VALUES: codes of every second key [W, N / 16, 8,
    D]. SLOTS: one key for each lane, [W, N]. PRODUCT: what the tensor core adds up.
    """
    W, N, C = WARPS, KEYS_OF_WARP, min(16, D // 8)
    keys = gl.DistributedLinearLayout(
        reg_bases=_bases(1, 2, *_powers(16, D // 4), dim=3)
        + _bases(8, dim=2)
        + _bases(*_powers(1, N // 16), dim=1),
        lane_bases=_bases(4, 8, dim=3) + _bases(1, 2, 4, dim=2),
        warp_bases=_bases(*_powers(1, W), dim=0),
        block_bases=[],
        shape=[W, N // 16, 16, D // 4],
    )
    values = gl.DistributedLinearLayout(
        reg_bases=_bases(*_powers(1, C), *_powers(8 * C, D), dim=3)
        + _bases(4, dim=2)
        + _bases(*_powers(1, N // 16), dim=1),
        lane_bases=_bases(1, 2, dim=2) + _bases(C, 2 * C, 4 * C, dim=3),
        warp_bases=_bases(*_powers(1, W), dim=0),
        block_bases=[],
        shape=[W, N // 16, 8, D],
    )
    slots = gl.DistributedLinearLayout(
        reg_bases=_bases(*_powers(32, N), dim=1, rank=2),
        lane_bases=_bases(*_powers(1, 32), dim=1, rank=2),
        warp_bases=_bases(*_powers(1, W), dim=0, rank=2),
        block_bases=[],
        shape=[W, N],
    )
    product = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[W, 1, 1], instr_shape=[1, 16, 8]
    )
    return {"KEYS": keys, "VALUES": values, "SLOTS": slots, "PRODUCT": product}


@gluon.jit
def load_pages(
    table,
    first_key,
    begin,
    stop,
    B: gl.constexpr,
    W: gl.constexpr,
    N: gl.constexpr,
    KEYS: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """Pages of a step, of its blocks of 16 keys [W, N / 16] and of its keys [W, N]; else 0."""
    BLOCKS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, KEYS))
    key = first_key + gl.arange(0, W, layout=gl.SliceLayout(1, BLOCKS))[:, None] * N
    key += gl.arange(0, N // 16, layout=gl.SliceLayout(0, BLOCKS))[None, :] * 16
    of_blocks = gl.load(table + key // B, mask=(key > begin - 16) & (key < stop), other=0)
    key = first_key + gl.arange(0, W, layout=gl.SliceLayout(1, SLOTS))[:, None] * N
    key += gl.arange(0, N, layout=gl.SliceLayout(0, SLOTS))[None, :]
    of_keys = gl.load(table + key // B, mask=(key >= begin) & (key < stop), other=0)
    return of_blocks, of_keys


@gluon.jit
def copy_step(
    shared,  # memory of all stages: keys, even and odd values, both scales
    stage,
    source,  # (heads, strides, first and last key that may be read)
    pages,  # of the step, as load_pages gives them
    first_key,
    B: gl.constexpr,
    STRIDE_KB: gl.constexpr,
    STRIDE_VB: gl.constexpr,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """Ask for one step. What lies outside begin..stop becomes zeros.

    heads: pointers to a head's first row of keys and values, and to their scales. strides: of a
    page, keys and values; of a page and a slot, scales of keys and of values.
    """
    keys, even, odd, k_scales, v_scales = shared
    heads, strides, begin, stop = source
    k_head, v_head, k_scales_head, v_scales_head = heads
    of_blocks, of_keys = pages
    W: gl.constexpr = k_scales.shape[1]
    N: gl.constexpr = k_scales.shape[2]
    D: gl.constexpr = even.shape[4]
    stride_kp, stride_vp, stride_ksp, stride_ksb, stride_vsp, stride_vsb = strides
    BLOCKS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, KEYS))
    key = first_key + gl.arange(0, W, layout=gl.SliceLayout(1, BLOCKS))[:, None] * N
    key += gl.arange(0, N // 16, layout=gl.SliceLayout(0, BLOCKS))[None, :] * 16
    rows = of_blocks.to(gl.int64) * stride_kp + key % B * STRIDE_KB
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(3, KEYS))))
    row = row[None, :][None, :, :]
    word = gl.arange(
        0, D // 4, layout=gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, KEYS)))
    )
    exists = (key[:, :, None] + row >= begin) & (key[:, :, None] + row < stop)
    ptrs = k_head + (rows[:, :, None] + row * STRIDE_KB)[:, :, :, None]
    ptrs += word[None, :][None, :, :][None, :, :, :]
    load_elements(keys.index(stage), ptrs, exists[:, :, :, None])

    VALUE_BLOCKS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, VALUES))
    rows = of_blocks.to(gl.int64) * stride_vp + key % B * STRIDE_VB
    rows = gl.convert_layout(rows, VALUE_BLOCKS)
    key = gl.convert_layout(key, VALUE_BLOCKS)
    pair = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(3, VALUES))))
    pair = 2 * pair[None, :][None, :, :]
    d = gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, VALUES))))
    key = key[:, :, None] + pair
    exists = (key >= begin) & (key < stop)
    ptrs = v_head + (rows[:, :, None] + pair * STRIDE_VB)[:, :, :, None]
    ptrs += d[None, :][None, :, :][None, :, :, :]
    load_elements(even.index(stage), ptrs, exists[:, :, :, None])
    exists = (key + 1 >= begin) & (key + 1 < stop)
    load_elements(odd.index(stage), ptrs + STRIDE_VB, exists[:, :, :, None])

    key = first_key + gl.arange(0, W, layout=gl.SliceLayout(1, SLOTS))[:, None] * N
    key += gl.arange(0, N, layout=gl.SliceLayout(0, SLOTS))[None, :]
    exists = (key >= begin) & (key < stop)
    page = of_keys.to(gl.int64)
    k_ptrs = k_scales_head + page * stride_ksp + key % B * stride_ksb
    v_ptrs = v_scales_head + page * stride_vsp + key % B * stride_vsb
    load_elements(k_scales.index(stage), k_ptrs, exists)
    load_elements(v_scales.index(stage), v_ptrs, exists)
    async_copy.commit_group()
