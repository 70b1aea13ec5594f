"""The pool of KV pages."""

import pytest

from qserve.engine.kv_cache.block_pool import NULL_PAGE, BlockPool


def test_pool_detects_a_page_owned_twice():
    pool = BlockPool(4, 2)
    table = []
    pool.grow_(table, 4)
    with pytest.raises(AssertionError):
        pool.check_integrity([table, table])


def test_last_freed_page_is_allocated_last():
    """Its keys are the most likely to be reused from the prefix cache."""
    pool = BlockPool(4, 2)
    first, second, third = [], [], []
    pool.grow_(first, 4)
    pool.grow_(second, 2)
    pool.release_(second)
    pool.release_(first)
    pool.grow_(third, 8)
    assert third == [3, 2, 1, 0]


def test_released_pages_in_a_table_evict_no_other_page():
    """NULL_PAGE is -1: as an index it would be the last page, which another may hold."""
    pool = BlockPool(3, 2)
    table, other = [], []
    pool.grow_(table, 4)
    pool.grow_(other, 2)
    for page, key in zip([*table, *other], (b"a", b"b", b"c"), strict=True):
        pool.insert(page, key)
    pool.release_before_(table, first_visible=2)
    assert table == [NULL_PAGE, 1] and other == [2]
    pool.invalidate(table)
    assert pool.match([b"c"]) == [2] and not pool.match([b"b"])
    pool.release_(other)
    pool.check_integrity([table])
    pool.release_(table)
    pool.grow_(table, 6)
    assert sorted(table) == [0, 1, 2]
