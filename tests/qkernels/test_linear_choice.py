"""Which body takes a product: digits that are there already change where a ring pays."""

from dataclasses import replace

import pytest
import torch

from qkernels import digit_ops, ops
from qkernels.digits import DigitForm
from qkernels.errors import KernelError
from qkernels.linear_choice import chosen_linear_tile
from qkernels.tiles import LinearDigitsTile, LinearRingTile, LinearTile

w4a16 = pytest.importorskip("qkernels.w4a16", exc_type=ImportError)

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


@pytest.mark.parametrize(
    "tile, form",
    [
        (LinearDigitsTile(), DigitForm(bits=4, with_sums=True)),
        (LinearRingTile(rows=8), DigitForm(bits=4, rows=8, with_sums=True)),
        (LinearTile(block_m=16, block_n=64, split=1), None),
        (None, None),
    ],
)
def test_a_weight_takes_the_digits_of_its_body_and_no_other(monkeypatch, make_weight, tile, form):
    """Where they run is stood in for: what they are handed, with which tile."""
    packed = make_weight(64, 256, 128, symmetric=False).to("cpu")
    weight = ops.prepare_weight(packed, torch.float16, "cpu", kernel="reference")
    weight = replace(weight, kernel="triton_w4a16")
    monkeypatch.setattr(w4a16, "_chosen_tile", lambda *_, made: tile if made else None)
    handed = []
    monkeypatch.setattr(w4a16, "_linear_digits", lambda *given: handed.append(given))
    assert digit_ops.digit_form(weight, 3) == form
    assert digit_ops.digit_form(weight, 17) is None
    x = torch.zeros(3, 256, dtype=torch.float16)
    for asked in (DigitForm(bits=4, with_sums=True), DigitForm(bits=4, rows=8, with_sums=True)):
        digits = digit_ops.input_digits(x, asked, kernel="reference")
        if asked == form:
            digit_ops.linear_digits(digits, weight)
            assert handed == [(digits, weight, None, tile)]
        else:
            with pytest.raises(KernelError, match="linear_digits digits: expected"):
                digit_ops.linear_digits(digits, weight)
