"""Positions of three axes: the published example, and transformers' for random prompts."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from formats.architecture.rope_types import axes_of_pairs
from formats.errors import InputError
from qserve.model.axis_ropes import AxisRopes
from qserve.model.blocks.rotary import Rotary
from qserve.multimodal.media import MediaItem
from qserve.multimodal.positions import positions_of

DIGEST = "0" * 64


def item(offset: int, rows: int, columns: int) -> MediaItem:
    grid = 1, rows, columns
    length = rows * columns
    return MediaItem(kind="image", digest=DIGEST, offset=offset, length=length, grid=grid)


def test_an_image_of_three_rows_after_three_tokens():
    found, shift = positions_of([item(3, 3, 4)])
    assert found.tolist() == [
        [0, 1, 2, *[3] * 12],
        [0, 1, 2, *[3] * 4, *[4] * 4, *[5] * 4],
        [0, 1, 2, *[3, 4, 5, 6] * 3],
    ]
    assert shift == -8, "the token after it has index 15 and position 7"
    assert positions_of([])[1] == 0


@settings(max_examples=30, deadline=None)
@given(
    texts=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    sides=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=4, max_size=4),
)
def test_positions_are_those_of_transformers(texts, sides, qwen):
    items, kinds = [], []
    for length, (rows, columns) in zip(texts, sides, strict=False):
        kinds += [0] * length
        items.append(item(len(kinds), rows, columns))
        kinds += [1] * (rows * columns)
    kinds += [0, 0]
    want, shift = qwen.get_rope_index(
        torch.zeros(1, len(kinds), dtype=torch.long),
        torch.tensor([kinds], dtype=torch.int),
        torch.tensor([[1, 2 * each.grid[1], 2 * each.grid[2]] for each in items]),
    )
    found, found_shift = positions_of(items)
    assert np.array_equal(found, want[:, 0, : items[-1].end].numpy())
    assert found_shift == int(shift) and want[0, 0, -1] == len(kinds) - 1 + found_shift


@pytest.fixture(scope="module")
def qwen(vision):
    return vision("qwen3_vl").model.model


@pytest.mark.parametrize(
    ("sections", "is_interleaved", "axes"),
    [
        ([1, 2, 1], False, [0, 1, 1, 2]),
        ([2, 1, 1], True, [0, 1, 2, 0]),
        ([4, 2, 2], True, [0, 1, 2, 0, 1, 2, 0, 0]),
    ],
)
def test_axis_of_each_pair(sections, is_interleaved, axes):
    assert axes_of_pairs(sections, len(axes), is_interleaved=is_interleaved) == axes
    with pytest.raises(InputError, match="mrope_section: expected three numbers that add up to 9"):
        axes_of_pairs(sections, 9, is_interleaved=is_interleaved)


def test_equal_axes_give_the_rotations_of_one_position():
    rotary = Rotary(torch.randn(20, 8))
    ropes = AxisRopes([rotary, rotary], [2, 1, 1], is_interleaved=True)
    positions_T = torch.tensor([3, 19, 0])
    found = ropes.of(positions_T.expand(3, -1))
    assert torch.equal(found.tables[rotary], rotary.cos_sin[positions_T])
    assert found.rows_T.tolist() == [0, 1, 2]
