"""Positions with several axes (M-RoPE). Loads no torch.

A text token has equal positions on all axes. Most models have three axes: frame, row and column of
an embedding. In an item that begins at position p, an embedding has the
positions p + frame * step, p + row and p + column. The token after the item has p plus the number
of rows or of columns, whichever is larger. transformers counts in the same way, also for a long
video, whose frames may have higher positions than the token after it.

In Hunyuan's models the last three axes of an embedding are its column, its row and the number of
images before it. All other positions are indices in the prompt.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from qserve.multimodal.media import MediaItem


class Axes(NamedTuple):
    """Axes of a model's positions."""

    count: int = 3  # A
    counts_images: bool = False  # True: Hunyuan's


THREE_AXES = Axes()


def positions_of(items: Sequence[MediaItem], axes: Axes = THREE_AXES) -> tuple[np.ndarray, int]:
    """Return the positions of a prompt up to the end of its last item, and an offset.

    The positions are int64 [A, N]. Each later token has its index plus the offset as position.
    """
    if axes.counts_images:
        return _in_images(items, axes.count), 0
    found, shift, end = [], 0, 0
    for item in items:
        found.append(np.tile(np.arange(end, item.offset) + shift, (3, 1)))
        first, (_, rows, columns) = item.offset + shift, item.grid
        places = np.indices(item.grid).reshape(3, -1)
        # float32, as in transformers: another rounding would give another position
        places[0] = places[0].astype(np.float32) * np.float32(item.frame_step)
        found.append(first + places)
        shift += max(rows, columns) - item.length
        end = item.end
    return np.concatenate(found, axis=1) if found else np.zeros((3, 0), np.int64), shift


def _in_images(items: Sequence[MediaItem], count: int) -> np.ndarray:
    end = items[-1].end if items else 0
    found_AN = np.tile(np.arange(end), (count, 1))
    for number, item in enumerate(items):
        _, rows, columns = item.grid
        first = item.offset + item.num_outer
        places = slice(first, first + rows * columns)
        row_P, column_P = np.indices((rows, columns)).reshape(2, -1)
        found_AN[-3:, places] = column_P, row_P, np.full_like(row_P, number)
    return found_AN
