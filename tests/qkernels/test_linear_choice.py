"""Which body takes a product: digits that are there already change where a ring pays."""

import pytest

from qkernels.linear_choice import chosen_linear_tile
from qkernels.tiles import LinearDigitsTile, LinearRingTile, LinearTile

H200 = 132


def kind(M, N, K, made, gluon=True, bits=4, group=128):
    tile = chosen_linear_tile(M, N, K, group, bits, H200, gluon, made)
    return type(tile), getattr(tile, "rows", None)


@pytest.mark.parametrize("M", [1, 4])
@pytest.mark.parametrize("made", [False, True])
def test_few_rows_are_columns_of_digits(M, made):
    assert kind(M, 4096, 4096, made) == (LinearDigitsTile, None)
    assert kind(M, 4096, 4096, made, bits=8) == (LinearDigitsTile, None)


@pytest.mark.parametrize("M", [5, 8])
def test_a_ring_takes_smaller_weights_where_its_digits_cost_nothing(M):
    assert kind(M, 4096, 4096, made=False) == (LinearTile, None)
    assert kind(M, 4096, 4096, made=True) == (LinearRingTile, 8)
    assert kind(M, 6144, 4096, made=False) == kind(M, 6144, 4096, made=True)
    assert kind(M, 2048, 4096, made=True) == (LinearTile, None)


def test_more_rows_pay_from_the_same_size_on():
    for made in (False, True):
        assert kind(16, 28672, 4096, made) == (LinearRingTile, 16)
        assert kind(16, 4096, 14336, made) == (LinearTile, None)


def test_without_gluon_or_in_other_groups_no_digits_are_asked_for():
    for M in (1, 8):
        assert kind(M, 28672, 4096, made=True, gluon=False) == (LinearTile, None)
        assert kind(M, 28672, 4096, made=True, group=64) == (LinearTile, None)
