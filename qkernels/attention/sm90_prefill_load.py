"""The warps of sm90_prefill.py that only load: which tile is next, its pages, its queries.

Shared memory is handed over in rings. A ring is (memory, full barriers, empty barriers), and n
counts what went through it.

A tile is (start, count, length, first row, KV head, part): the request's first row among all, how
many it has, the keys of its context; the tile's first row, its KV head, its part of the context.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from qkernels.attention.config import PREFILL_KEYS, PREFILL_ROWS, PREFILL_STAGES
from qkernels.gpu.gluon_compat import load_elements, reshaped, tma_load

ROWS = gl.constexpr(PREFILL_ROWS)
HALF = gl.constexpr(PREFILL_ROWS // 2)  # rows of a warpgroup
KEYS = gl.constexpr(PREFILL_KEYS)
STAGES = gl.constexpr(PREFILL_STAGES)
COLUMNS = gl.constexpr(64)  # 128 bytes of 16-bit numbers: the widest row that is swizzled
PIECE = gl.constexpr(16)  # query rows that are loaded together
SLOTS = gl.constexpr(2)  # tiles that are known, and whose queries have room

# 32-bit words of a known tile in shared memory
WORDS = gl.constexpr(8)
REQUEST = gl.constexpr(0)  # -1: there is no further tile
START = gl.constexpr(1)
COUNT = gl.constexpr(2)
LENGTH = gl.constexpr(3)
FIRST_ROW = gl.constexpr(4)
KV_HEAD = gl.constexpr(5)
PART = gl.constexpr(6)


@gluon.jit
def wait_full(ring, n, SLOTS: gl.constexpr):
    mbarrier.wait(ring[1].index(n % SLOTS), n // SLOTS & 1)


@gluon.jit
def wait_empty(ring, n, SLOTS: gl.constexpr):
    mbarrier.wait(ring[2].index(n % SLOTS), n // SLOTS & 1 ^ 1)


@gluon.jit
def fill(ring, n, SLOTS: gl.constexpr):
    mbarrier.arrive(ring[1].index(n % SLOTS), count=1)


@gluon.jit
def release(ring, n, SLOTS: gl.constexpr):
    mbarrier.arrive(ring[2].index(n % SLOTS), count=1)


@gluon.jit
def zero_tail(v_ring, n, length, B: gl.constexpr):
    """Zero the values after the context's last key: zero weights times NaN would be NaN.

    Where both warpgroups do it, neither waits for the other: they write the same.
    """
    chunks: gl.constexpr = v_ring[0].shape[2] // COLUMNS
    lanes: gl.constexpr = COLUMNS // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])
    memory: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    boxes = reshaped(v_ring[0], [STAGES * chunks * (KEYS // B), B, COLUMNS], memory)
    for c in gl.static_range(chunks):
        box = boxes.index((n % STAGES * chunks + c) * (KEYS // B) + length % KEYS // B)
        exists = gl.arange(0, B, gl.SliceLayout(1, layout)) < length % B
        box.store(gl.where(exists[:, None], box.load(layout), 0.0))
    fence_async_shared()


@gluon.jit
def _next_tile(batch, tickets, J: gl.constexpr, GROUP: gl.constexpr, SPLIT: gl.constexpr):
    """Take tickets until one is a tile with rows. Its request, or -1 where none is left, and it."""
    starts_ptr, lengths_ptr, counter_ptr, R = batch
    request = -1
    start = 0
    count = 0
    length = 0
    first_row = 0
    kv_head = 0
    part = 0
    searching = True
    while searching:
        ticket = gl.atomic_add(counter_ptr, 1, sem="relaxed")
        searching = ticket < tickets
        if searching:
            kv_head = ticket % J
            part = ticket // J % SPLIT
            # a request's last tile first: it sees most keys
            block = tickets // (J * SPLIT) - 1 - ticket // (J * SPLIT)
            low = 0
            high = R
            while low < high:
                middle = (low + high) // 2
                if gl.load(starts_ptr + middle) * GROUP // ROWS + middle <= block:
                    low = middle + 1
                else:
                    high = middle
            start = gl.load(starts_ptr + low - 1)
            count = gl.load(starts_ptr + low) - start
            length = gl.load(lengths_ptr + low - 1)
            first_row = (block - start * GROUP // ROWS - low + 1) * ROWS
            if first_row < count * GROUP:
                request = low - 1
                searching = False
        elif ticket == tickets + gl.num_programs(0) - 1:
            # the last ticket that any block takes: leave the counter as it was found
            gl.store(counter_ptr, 0)
    return request, (start, count, length, first_row, kv_head, part)


@gluon.jit
def _announce(tile_ring, n, request, tile):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    wait_empty(tile_ring, n, SLOTS)
    slot = n % SLOTS * WORDS
    tile_ring[0].index(slot + REQUEST).store(gl.full([1], request, gl.int32, layout))
    for word in gl.static_range(6):
        tile_ring[0].index(slot + START + word).store(gl.full([1], tile[word], gl.int32, layout))
    fill(tile_ring, n, SLOTS)


@gluon.jit
def word_of_tile(tile_ring, n, word):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(tile_ring[0].index(n % SLOTS * WORDS + word).load(layout), 0)


@gluon.jit
def wait_tile(tile_ring, n):
    """Whether there is an nth tile; its words can be read until its slot is released."""
    wait_full(tile_ring, n, SLOTS)
    return word_of_tile(tile_ring, n, REQUEST) >= 0


@gluon.jit
def steps_of(tile, window, GROUP: gl.constexpr, WINDOWED: gl.constexpr, SPLIT: gl.constexpr):
    """First key that the tile sees, and the range of its steps: at least one."""
    start, count, length, first_row, kv_head, part = tile
    before = length - count  # keys before the request's first row
    end = before + gl.minimum((first_row + ROWS - 1) // GROUP + 1, count)
    begin = 0
    if WINDOWED:
        begin = gl.maximum(0, before + first_row // GROUP - window + 1)
    first = begin // KEYS
    last = (end + KEYS - 1) // KEYS
    if SPLIT > 1:
        steps = (last - first + SPLIT - 1) // SPLIT
        first += part * steps
        last = gl.minimum(last, first + steps)
    return begin, first, gl.maximum(last, first + 1)


@gluon.jit
def _copy_step(desc, ring, n, pages, kv_head, B: gl.constexpr):
    """Ask the copy engine for one step's keys, or values: for slots n, n + 1 .. of the ring.

    A box is rows of a page and up to 128 bytes of a head.
    """
    BOX: gl.constexpr = desc.block_shape[1]
    WIDTH: gl.constexpr = desc.block_shape[3]
    NUM_SLOTS: gl.constexpr = ring[0].shape[0]
    SLOT_ROWS: gl.constexpr = ring[0].shape[1]
    PADDED_D: gl.constexpr = ring[0].shape[2]
    chunks: gl.constexpr = PADDED_D // WIDTH
    boxes_of_chunk: gl.constexpr = SLOT_ROWS // BOX
    layout: gl.constexpr = desc.layout
    # in the swizzled order, these columns of consecutive rows are contiguous
    boxes = reshaped(ring[0], [NUM_SLOTS * chunks * boxes_of_chunk, 1, BOX, 1, WIDTH], layout)
    for piece in gl.static_range(KEYS // SLOT_ROWS):
        slot = (n + piece) % NUM_SLOTS
        wait_empty(ring, n + piece, NUM_SLOTS)
        full = ring[1].index(slot)
        mbarrier.expect(full, SLOT_ROWS * PADDED_D * (desc.dtype.primitive_bitwidth // 8))
        for b in gl.static_range(boxes_of_chunk):
            for c in gl.static_range(chunks):
                box = boxes.index((slot * chunks + c) * boxes_of_chunk + b)
                page = pages[(piece * SLOT_ROWS + b * BOX) // B]
                row = (piece * SLOT_ROWS + b * BOX) % B
                tma_load(desc, [page, row, kv_head, c * WIDTH], full, box)


@gluon.jit
def _load_steps(
    k_desc,
    v_desc,
    k_ring,
    v_ring,
    n,
    first,
    last,
    count,
    seen,
    table,
    kv_head,
    B: gl.constexpr,
    SHARED: gl.constexpr,
):
    """Steps first..last of `count`, from the tile's last key on. `seen`: (first key, end)."""
    slots_of_step: gl.constexpr = KEYS // k_ring[0].shape[1]
    nowhere = k_desc.shape[0]
    for i in range(first, last):
        pages = ()
        for b in gl.static_range(KEYS // B):
            key = (count - 1 - i) * KEYS + b * B
            # Pages outside may be freed or never written. The engine writes zeros where a
            # coordinate is outside of the pool.
            page = nowhere
            if (key < seen[1]) & (key + B > seen[0]):
                page = gl.load(table + key // B)
            pages = pages + (page,)
        if SHARED:
            slot = (n + i) * (2 * slots_of_step)
            _copy_step(k_desc, k_ring, slot, pages, kv_head, B)
            _copy_step(v_desc, k_ring, slot + slots_of_step, pages, kv_head, B)
        else:
            _copy_step(k_desc, k_ring, n + i, pages, kv_head, B)
            _copy_step(v_desc, v_ring, n + i, pages, kv_head, B)


@gluon.jit
def load_pages(
    k_desc,
    v_desc,
    k_ring,
    v_ring,
    tile_ring,
    batch,
    tickets,
    tables_ptr,
    stride_table,
    window,
    B: gl.constexpr,
    J: gl.constexpr,
    GROUP: gl.constexpr,
    WINDOWED: gl.constexpr,
    SPLIT: gl.constexpr,
    SHARED: gl.constexpr,
):
    """One warp: takes tiles, tells the others of them, and loads their keys and values.

    SHARED: both rings are the same; each step's keys come before its values.
    """
    request, tile = _next_tile(batch, tickets, J, GROUP, SPLIT)
    _announce(tile_ring, 0, request, tile)
    tiles = 1
    n = 0
    while request >= 0:
        begin, first, last = steps_of(tile, window, GROUP, WINDOWED, SPLIT)
        seen = (begin, tile[2])
        table = tables_ptr + request.to(gl.int64) * stride_table
        steps = last - first
        # The next tile is looked up while the first steps of this one are on their way.
        soon = gl.minimum(1 if SHARED else STAGES, steps)
        _load_steps(
            k_desc, v_desc, k_ring, v_ring, n, 0, soon, last, seen, table, tile[4], B, SHARED
        )
        next_request, next_tile = _next_tile(batch, tickets, J, GROUP, SPLIT)
        _announce(tile_ring, tiles, next_request, next_tile)
        tiles += 1
        _load_steps(
            k_desc, v_desc, k_ring, v_ring, n, soon, steps, last, seen, table, tile[4], B, SHARED
        )
        n += steps
        request = next_request
        tile = next_tile


@gluon.jit
def load_queries(
    q_ptr,
    q_ring,
    tile_ring,
    stride_qt,
    stride_qh,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    PADDED_D: gl.constexpr,
):
    """One warp: loads the query rows of the tiles."""
    chunks: gl.constexpr = PADDED_D // COLUMNS
    pieces_of_half: gl.constexpr = chunks * (HALF // PIECE)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    memory: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    pieces = reshaped(q_ring[0], [SLOTS * 2 * pieces_of_half, PIECE, COLUMNS], memory)
    tile = 0
    while wait_tile(tile_ring, tile):
        start = word_of_tile(tile_ring, tile, START)
        count = word_of_tile(tile_ring, tile, COUNT)
        first_row = word_of_tile(tile_ring, tile, FIRST_ROW)
        kv_head = word_of_tile(tile_ring, tile, KV_HEAD)
        release(tile_ring, tile, SLOTS)
        wait_empty(q_ring, tile, SLOTS)
        for piece in range(2 * pieces_of_half):
            m = piece // pieces_of_half * HALF + piece % (HALF // PIECE) * PIECE
            row = first_row + m + gl.arange(0, PIECE, gl.SliceLayout(1, layout))
            column = piece // (HALF // PIECE) % chunks * COLUMNS
            d = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
            token = (start + row // GROUP).to(gl.int64)
            head = kv_head * GROUP + row % GROUP
            offset = gl.multiple_of(token * stride_qt + head * stride_qh, 8)
            load_elements(
                pieces.index(tile % SLOTS * 2 * pieces_of_half + piece),
                q_ptr + offset[:, None] + d[None, :],
                mask=(row < count * GROUP)[:, None] & (d < D)[None, :],
            )
        async_copy.commit_group()
        async_copy.wait_group(0)
        fence_async_shared()
        fill(q_ring, tile, SLOTS)
        tile += 1
