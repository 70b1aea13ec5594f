"""Loads of sm90_decode_8bit.py: cp.async of coded pages, and the register layouts.

Legend: W warps, N keys of a warp's step, D bytes of a row (the head dim; half of it with 4-bit
codes), b a byte of one load of a lane, t = lane % 4, g = lane / 4.

mma may sum over k in any order, if A and B use the same one. Here it is the order in memory, which
channel_of_input and channel_of_output in sm90_decode_8bit_operands.py define:

    keys      lane (g, t) loads the bytes d = 64 c + 16 t + b of the keys 8 j + g; of 32 bytes,
              d = 8 t + b
    values    lane (g, t) loads the bytes d = C g + b, C = D / 8, of two keys 2 p and 2 p + 1,
              where p = t + 4 r
"""

import functools

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from qkernels.gpu.gluon_compat import aggregate, integer, load_elements

KEYS_OF_WARP = 32


def _bases(*powers: int, dim: int, rank: int = 4) -> list[list[int]]:
    """Return the basis vectors of a layout along one dimension."""
    return [[power if axis == dim else 0 for axis in range(rank)] for power in powers]


def _powers(first: int, end: int) -> list[int]:
    """Return first, 2 first, 4 first, ... below `end`."""
    found = []
    while first < end:
        found.append(first)
        first *= 2
    return found


@functools.cache
def layouts(D: int, W: int) -> dict[str, object]:
    """Return the register layouts that the module's docstring describes.

    KEYS: words of four codes [W, N / 16, 16, D / 4]. VALUES: codes of every second key [W, N / 16,
    8, D]. SLOTS: one key per lane, [W, N]. PRODUCT: the accumulators of mma.
    """
    N, C = KEYS_OF_WARP, min(16, D // 8)
    words = min(4, D // 16)  # adjacent words of a lane
    keys = gl.DistributedLinearLayout(
        reg_bases=_bases(*_powers(1, words), *_powers(4 * words, D // 4), dim=3)
        + _bases(8, dim=2)
        + _bases(*_powers(1, N // 16), dim=1),
        lane_bases=_bases(words, 2 * words, dim=3) + _bases(1, 2, 4, dim=2),
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


@aggregate
class Stages:
    """Shared memory of all pipeline stages."""

    k: gl.shared_memory_descriptor  # words [stages, W, N / 16, 16, D / 4]
    even_v: gl.shared_memory_descriptor  # codes [stages, W, N / 16, 8, D]
    odd_v: gl.shared_memory_descriptor
    k_scales: gl.shared_memory_descriptor  # [stages, W, N]; int64 or int32 with 4-bit codes
    v_scales: gl.shared_memory_descriptor


@aggregate
class KvHead:
    """The pages of one request and one KV head."""

    table: gl.tensor
    k_ptr: gl.tensor  # to words
    v_ptr: gl.tensor
    k_scales_ptr: gl.tensor
    v_scales_ptr: gl.tensor
    begin: integer  # first key that may be read
    end: gl.tensor
    stride_kp: integer  # stride of a page
    stride_vp: integer
    stride_ksp: integer
    stride_ksb: integer  # stride of a slot
    stride_vsp: integer
    stride_vsb: integer
    STRIDE_KB: gl.constexpr
    STRIDE_VB: gl.constexpr
    B: gl.constexpr
    W: gl.constexpr
    N: gl.constexpr
    KEYS: gl.constexpr  # layouts()
    VALUES: gl.constexpr
    SLOTS: gl.constexpr


@aggregate
class StepPages:
    """Pages of a step's keys; 0 for keys that are not read."""

    blocks: gl.tensor  # page of every 16 keys [W, N / 16]
    keys: gl.tensor  # page of every key [W, N]


@gluon.jit
def load_pages(head, first_key):
    """Look up the pages of the step that begins with `first_key`."""
    W: gl.constexpr = head.W
    N: gl.constexpr = head.N
    SLOTS: gl.constexpr = head.SLOTS
    BLOCKS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, head.KEYS))
    key = first_key + gl.arange(0, W, layout=gl.SliceLayout(1, BLOCKS))[:, None] * N
    key += gl.arange(0, N // 16, layout=gl.SliceLayout(0, BLOCKS))[None, :] * 16
    exists = (key > head.begin - 16) & (key < head.end)
    blocks = gl.load(head.table + key // head.B, mask=exists, other=0)
    key = first_key + gl.arange(0, W, layout=gl.SliceLayout(1, SLOTS))[:, None] * N
    key += gl.arange(0, N, layout=gl.SliceLayout(0, SLOTS))[None, :]
    exists = (key >= head.begin) & (key < head.end)
    keys = gl.load(head.table + key // head.B, mask=exists, other=0)
    return StepPages(blocks=blocks, keys=keys)


@gluon.jit
def load_step(stages, stage, head, pages, first_key):
    """Start the cp.async loads of one step into a stage. Keys that may not be read become zeros."""
    B: gl.constexpr = head.B
    W: gl.constexpr = head.W
    N: gl.constexpr = head.N
    D: gl.constexpr = stages.even_v.shape[4]
    KEYS: gl.constexpr = head.KEYS
    VALUES: gl.constexpr = head.VALUES
    SLOTS: gl.constexpr = head.SLOTS
    STRIDE_KB: gl.constexpr = head.STRIDE_KB
    STRIDE_VB: gl.constexpr = head.STRIDE_VB
    BLOCKS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, KEYS))
    key = first_key + gl.arange(0, W, layout=gl.SliceLayout(1, BLOCKS))[:, None] * N
    key += gl.arange(0, N // 16, layout=gl.SliceLayout(0, BLOCKS))[None, :] * 16
    rows = pages.blocks.to(gl.int64) * head.stride_kp + key % B * STRIDE_KB
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(3, KEYS))))
    row = row[None, :][None, :, :]
    word = gl.arange(
        0, D // 4, layout=gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, KEYS)))
    )
    exists = (key[:, :, None] + row >= head.begin) & (key[:, :, None] + row < head.end)
    ptrs = head.k_ptr + (rows[:, :, None] + row * STRIDE_KB)[:, :, :, None]
    ptrs += word[None, :][None, :, :][None, :, :, :]
    load_elements(stages.k.index(stage), ptrs, exists[:, :, :, None])

    VALUE_BLOCKS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, VALUES))
    rows = pages.blocks.to(gl.int64) * head.stride_vp + key % B * STRIDE_VB
    rows = gl.convert_layout(rows, VALUE_BLOCKS)
    key = gl.convert_layout(key, VALUE_BLOCKS)
    pair = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(3, VALUES))))
    pair = 2 * pair[None, :][None, :, :]
    d = gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, VALUES))))
    key = key[:, :, None] + pair
    exists = (key >= head.begin) & (key < head.end)
    ptrs = head.v_ptr + (rows[:, :, None] + pair * STRIDE_VB)[:, :, :, None]
    ptrs += d[None, :][None, :, :][None, :, :, :]
    load_elements(stages.even_v.index(stage), ptrs, exists[:, :, :, None])
    exists = (key + 1 >= head.begin) & (key + 1 < head.end)
    load_elements(stages.odd_v.index(stage), ptrs + STRIDE_VB, exists[:, :, :, None])

    key = first_key + gl.arange(0, W, layout=gl.SliceLayout(1, SLOTS))[:, None] * N
    key += gl.arange(0, N, layout=gl.SliceLayout(0, SLOTS))[None, :]
    exists = (key >= head.begin) & (key < head.end)
    page = pages.keys.to(gl.int64)
    k_ptrs = head.k_scales_ptr + page * head.stride_ksp + key % B * head.stride_ksb
    v_ptrs = head.v_scales_ptr + page * head.stride_vsp + key % B * head.stride_vsb
    load_elements(stages.k_scales.index(stage), k_ptrs, exists)
    load_elements(stages.v_scales.index(stage), v_ptrs, exists)
    async_copy.commit_group()
