"""Positions with three axes (M-RoPE): frame, row and column of an embedding. Loads no torch.

A text token has three equal positions. In an item that begins at position p, an embedding has the
positions p + frame * step, p + row and p + column. The token after the item has p plus the number
of rows or of columns, whichever is larger. transformers counts in the same way, also for a long
video, whose frames may have higher positions than the token after it.
"""

from collections.abc import Sequence

import numpy as np

from qserve.multimodal.media import MediaItem


def positions_of(items: Sequence[MediaItem]) -> tuple[np.ndarray, int]:
    """Return the positions of a prompt up to the end of its last item, and an offset.

    The positions are int64 [3, N]. Each later token has its index plus the offset as position.
    """
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
