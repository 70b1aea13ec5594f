"""The pool of KV pages."""

import pytest

from qserve.engine.kv_pages import PagePool


def test_pool_detects_a_page_owned_twice():
    pool = PagePool(4, 2)
    table = []
    pool.grow_(table, 4)
    with pytest.raises(AssertionError):
        pool.check_integrity([table, table])


def test_the_page_that_was_freed_last_is_handed_out_last():
    """Its keys are the likeliest to be asked for again, if anything keeps them."""
    pool = PagePool(4, 2)
    first, second, third = [], [], []
    pool.grow_(first, 4)
    pool.grow_(second, 2)
    pool.release_(second)
    pool.release_(first)
    pool.grow_(third, 8)
    assert third == [3, 2, 1, 0]
