"""The producer warps of sm90_prefill.py, in Gluon: they take tiles and load pages and queries."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from qkernels.attention.sm90_prefill_structs import (
    COLUMNS,
    CONSUMER_ROWS,
    COUNT,
    FIRST_ROW,
    KV_HEAD,
    LENGTH,
    REQUEST,
    ROWS,
    SPLIT,
    START,
    TILE_WORDS,
    Tile,
    tile_word,
    wait_tile,
)
from qkernels.gpu.gluon_compat import load_elements, reshaped, tma_load

QUERY_ROWS = gl.constexpr(16)  # query rows that are loaded together


@gluon.jit
def zero_tail(v, count, length, B: gl.constexpr):
    """Zero the values after the context's last key, in step `count`: 0 times NaN would be NaN.

    Both consumers may call it without a barrier, because they write the same values.
    """
    KEYS: gl.constexpr = v.mem.shape[1]
    chunks: gl.constexpr = v.mem.shape[2] // COLUMNS
    lanes: gl.constexpr = COLUMNS // 8
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 // lanes, lanes], [gl.num_warps(), 1], [1, 0]
    )
    memory: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    boxes = reshaped(v.mem, [v.num_stages * chunks * (KEYS // B), B, COLUMNS], memory)
    for c in gl.static_range(chunks):
        box = (v.consumer_at(count).stage * chunks + c) * (KEYS // B) + length % KEYS // B
        box = boxes.index(box)
        exists = gl.arange(0, B, gl.SliceLayout(1, layout)) < length % B
        box.store(gl.where(exists[:, None], box.load(layout), 0.0))
    fence_async_shared()


@gluon.jit
def _next_tile(attention):
    """Take work tiles until one has rows. Return its request and the tile; -1 if none is left."""
    J: gl.constexpr = attention.J
    GROUP: gl.constexpr = attention.GROUP
    NUM_SPLITS: gl.constexpr = attention.NUM_SPLITS
    request = -1
    start = 0
    count = 0
    length = 0
    first_row = 0
    kv_head = 0
    split = 0
    searching = True
    while searching:
        work = gl.atomic_add(attention.counter_ptr, 1, sem="relaxed")
        searching = work < attention.num_computed_tiles
        if searching:
            kv_head = work % J
            split = work // J % NUM_SPLITS
            # a request's last tile comes first, because it sees the most keys
            block = attention.num_work_tiles // (J * NUM_SPLITS) - 1 - work // (J * NUM_SPLITS)
            low = 0
            high = attention.R
            while low < high:
                middle = (low + high) // 2
                if gl.load(attention.starts_ptr + middle) * GROUP // ROWS + middle <= block:
                    low = middle + 1
                else:
                    high = middle
            start = gl.load(attention.starts_ptr + low - 1)
            count = gl.load(attention.starts_ptr + low) - start
            length = gl.load(attention.lengths_ptr + low - 1)
            first_row = (block - start * GROUP // ROWS - low + 1) * ROWS
            if first_row < count * GROUP:
                request = low - 1
                searching = False
        elif work == attention.num_computed_tiles + gl.num_programs(0) - 1:
            # No block takes a later number: reset the counter for the next launch.
            gl.store(attention.counter_ptr, 0)
    tile = Tile(
        start=start, count=count, length=length, first_row=first_row, kv_head=kv_head, split=split
    )
    return request, tile


@gluon.jit
def _store_word(tiles, word, value):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    tiles.mem.index(word).store(gl.full([1], value, gl.int32, layout))


@gluon.jit
def _announce(tiles, count, request, tile):
    """Publish tile number `count` to the other warps."""
    state = tiles.producer_at(count)
    tiles.producer_acquire(state)
    words = state.stage * TILE_WORDS
    _store_word(tiles, words + REQUEST, request)
    _store_word(tiles, words + START, tile.start)
    _store_word(tiles, words + COUNT, tile.count)
    _store_word(tiles, words + LENGTH, tile.length)
    _store_word(tiles, words + FIRST_ROW, tile.first_row)
    _store_word(tiles, words + KV_HEAD, tile.kv_head)
    _store_word(tiles, words + SPLIT, tile.split)
    tiles.producer_commit(state)


@gluon.jit
def load_step(desc, pipeline, count, pages, kv_head, KEYS: gl.constexpr, B: gl.constexpr):
    """Start the TMA loads of one step's keys or values into the stages from `count` on."""
    BOX_ROWS: gl.constexpr = desc.block_shape[1]
    WIDTH: gl.constexpr = desc.block_shape[3]
    NUM_STAGES: gl.constexpr = pipeline.num_stages
    STAGE_ROWS: gl.constexpr = pipeline.mem.shape[1]
    PADDED_D: gl.constexpr = pipeline.mem.shape[2]
    BYTES: gl.constexpr = STAGE_ROWS * PADDED_D * (desc.dtype.primitive_bitwidth // 8)
    chunks: gl.constexpr = PADDED_D // WIDTH
    boxes_of_chunk: gl.constexpr = STAGE_ROWS // BOX_ROWS
    layout: gl.constexpr = desc.layout
    # in the swizzled order, these columns of consecutive rows are contiguous
    shape: gl.constexpr = [NUM_STAGES * chunks * boxes_of_chunk, 1, BOX_ROWS, 1, WIDTH]
    boxes = reshaped(pipeline.mem, shape, layout)
    for i in gl.static_range(KEYS // STAGE_ROWS):
        state = pipeline.producer_at(count + i)
        pipeline.producer_acquire(state)
        pipeline.producer_expect(state, BYTES)
        for b in gl.static_range(boxes_of_chunk):
            for c in gl.static_range(chunks):
                box = boxes.index((state.stage * chunks + c) * boxes_of_chunk + b)
                page = pages[(i * STAGE_ROWS + b * BOX_ROWS) // B]
                row = (i * STAGE_ROWS + b * BOX_ROWS) % B
                barrier = pipeline.full_barrier(state)
                tma_load(desc, [page, row, kv_head, c * WIDTH], barrier, box)


@gluon.jit
def _load_steps(attention, shared, count, first, last, tile, steps, table):
    """Load the steps first..last of a tile; step 0 has the last keys. `count`: number of step 0."""
    KEYS: gl.constexpr = attention.KEYS
    B: gl.constexpr = attention.B
    nowhere = attention.k_desc.shape[0]
    for i in range(first, last):
        pages = ()
        for b in gl.static_range(KEYS // B):
            key = (steps.last - 1 - i) * KEYS + b * B
            # Pages outside the visible keys may be freed or never written: TMA writes zeros if a
            # coordinate is outside of the pool.
            page = nowhere
            if (key < tile.length) & (key + B > steps.first_key):
                page = gl.load(table + key // B)
            pages = pages + (page,)
        if attention.KV_8BIT:
            stages_of_step: gl.constexpr = KEYS // shared.codes.mem.shape[1]
            stage = (count + i) * (2 * stages_of_step)
            load_step(attention.k_desc, shared.codes, stage, pages, tile.kv_head, KEYS, B)
            stage += stages_of_step
            load_step(attention.v_desc, shared.codes, stage, pages, tile.kv_head, KEYS, B)
        else:
            load_step(attention.k_desc, shared.k, count + i, pages, tile.kv_head, KEYS, B)
            load_step(attention.v_desc, shared.v, count + i, pages, tile.kv_head, KEYS, B)


@gluon.jit
def load_pages(attention, shared):
    """Run the warp that takes tiles, announces them to the others, and loads their keys and values.

    With 8-bit KV one pipeline carries both: the keys of each step, then its values.
    """
    request, tile = _next_tile(attention)
    _announce(shared.tiles, gl.to_tensor(0), request, tile)
    tiles = 1
    count = 0
    while request >= 0:
        steps = tile.steps(attention)
        table = attention.tables_ptr + request.to(gl.int64) * attention.stride_table
        num_steps = steps.last - steps.first
        # The next tile is looked up while the first steps of this one are in flight.
        soon = gl.minimum(1 if attention.KV_8BIT else shared.k.num_stages, num_steps)
        _load_steps(attention, shared, count, 0, soon, tile, steps, table)
        next_request, next_tile = _next_tile(attention)
        _announce(shared.tiles, tiles, next_request, next_tile)
        tiles += 1
        _load_steps(attention, shared, count, soon, num_steps, tile, steps, table)
        count += num_steps
        request = next_request
        tile = next_tile


@gluon.jit
def load_queries(attention, shared):
    """Run the warp that loads the query rows of the tiles."""
    PADDED_D: gl.constexpr = attention.PADDED_D
    GROUP: gl.constexpr = attention.GROUP
    chunks: gl.constexpr = PADDED_D // COLUMNS
    blocks_of_consumer: gl.constexpr = chunks * (CONSUMER_ROWS // QUERY_ROWS)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    memory: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    shape: gl.constexpr = [shared.q.num_stages * 2 * blocks_of_consumer, QUERY_ROWS, COLUMNS]
    blocks = reshaped(shared.q.mem, shape, memory)
    tile = 0
    while wait_tile(shared.tiles, tile):
        start = tile_word(shared.tiles, tile, START)
        count = tile_word(shared.tiles, tile, COUNT)
        first_row = tile_word(shared.tiles, tile, FIRST_ROW)
        kv_head = tile_word(shared.tiles, tile, KV_HEAD)
        shared.tiles.consumer_release(shared.tiles.consumer_at(tile))
        state = shared.q.producer_at(tile)
        shared.q.producer_acquire(state)
        for i in range(2 * blocks_of_consumer):
            m = i // blocks_of_consumer * CONSUMER_ROWS
            m += i % (CONSUMER_ROWS // QUERY_ROWS) * QUERY_ROWS
            row = first_row + m + gl.arange(0, QUERY_ROWS, gl.SliceLayout(1, layout))
            column = i // (CONSUMER_ROWS // QUERY_ROWS) % chunks * COLUMNS
            d = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
            token = (start + row // GROUP).to(gl.int64)
            head = kv_head * GROUP + row % GROUP
            offset = token * attention.stride_qt + head * attention.stride_qh
            offset = gl.multiple_of(offset, 8)
            load_elements(
                blocks.index(state.stage * 2 * blocks_of_consumer + i),
                attention.q_ptr + offset[:, None] + d[None, :],
                mask=(row < count * GROUP)[:, None] & (d < attention.D)[None, :],
            )
        async_copy.commit_group()
        async_copy.wait_group(0)
        fence_async_shared()
        shared.q.producer_commit(state)
        tile += 1
