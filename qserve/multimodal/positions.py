"""Positions of three axes (M-RoPE): frame, row and column of an embedding. Loads no torch.

A text token has three equal positions. An item that begins at position p has p + frame * step, p +
row and p + column; the token after it has p + the larger of its rows and columns. All of this is as
transformers counts it, also where the frames of a long video go beyond the token after them.
"""

from collections.abc import Sequence

import numpy as np

from qserve.multimodal.media import MediaItem


def positions_of(items: Sequence[MediaItem]) -> tuple[np.ndarray, int]:
    """Return the positions int64 [3, N] of a prompt up to the end of its last item, and what is
    added to the index of each later token.
    """
    found, shift, end = [], 0, 0
    for item in items:
        found.append(np.tile(np.arange(end, item.offset) + shift, (3, 1)))
        first, (_, rows, columns) = item.offset + shift, item.grid
        places = np.indices(item.grid).reshape(3, -1)
        # in float32, as in transformers: another rounding is another position
        places[0] = places[0].astype(np.float32) * np.float32(item.frame_step)
        found.append(first + places)
        shift += max(rows, columns) - item.length
        end = item.end
    return np.concatenate(found, axis=1) if found else np.zeros((3, 0), np.int64), shift
