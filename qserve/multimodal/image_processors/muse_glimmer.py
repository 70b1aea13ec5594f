"""Image processor of Muse Glimmer: an image of any size, in at most a number of embeddings."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from formats.errors import CheckpointError
from qserve.multimodal.image_processors.kind import (
    MAX_SIDE,
    MAX_TOKENS,
    Cut,
    Kind,
    Options,
    channels_first,
)
from qserve.multimodal.image_processors.scaling import scaled
from qserve.multimodal.image_processors.stated_options import COPY_OPTIONS

LANCZOS = 1  # Pillow's number of the filter


def _cut(pixels_HWC: np.ndarray, options: Options) -> Cut:
    height, width = _sides(*pixels_HWC.shape[:2], options)
    found = scaled(pixels_HWC, height, width, options["resample"])
    return Cut((channels_first(found),), (1, 1), True)


def _sides(height: int, width: int, options: Options) -> tuple[int, int]:
    """Return the scaled height and width: the grid of squares whose shape differs least."""
    size, most = options["patch_size"] * options["merge_size"], options["max_image_tokens"]
    rows, columns = height / size, width / size
    shape = columns / rows
    if rows * columns > most:
        rows = (most / shape) ** 0.5
        columns = rows * shape
    rounded = [(math.floor(side), math.ceil(side)) for side in (rows, columns)]
    # A set, because transformers takes the first of equal shapes in the order of a set.
    grids = [grid for grid in set(itertools.product(*rounded)) if 0 < math.prod(grid) <= most]
    if not grids:
        grids = [(max(1, round(rows)), max(1, round(columns)))]
    rows, columns = min(grids, key=lambda grid: abs(grid[0] / grid[1] - height / width))
    return rows * size, columns * size


def _check(options: Options) -> None:
    if options["resample"] != LANCZOS:
        raise CheckpointError(
            "resample of the image processor",
            f"expected {LANCZOS}, found {options['resample']!r:.100}",
            COPY_OPTIONS,
        )


def _arguments(
    tiles: Sequence[Sequence[np.ndarray]], cuts: Sequence[Cut], options: Options
) -> dict[str, Any]:
    """Return the patches of all images, row by row, each as often as it has frames."""
    size, frames, patches, grids = options["patch_size"], options["temporal_patch_size"], [], []
    for (tile_CHW,) in tiles:
        channels, height, width = tile_CHW.shape
        rows, columns = height // size, width // size
        cut = tile_CHW.reshape(channels, rows, size, columns, size).transpose(1, 3, 0, 2, 4)
        patches.append(np.tile(cut.reshape(rows * columns, -1), (1, frames)))
        grids.append((1, rows, columns))
    return {
        "pixel_values": np.concatenate(patches),
        "image_grid_thw": np.array(grids, np.int64),
    }


MUSE_GLIMMER = Kind(
    defaults={
        "resample": LANCZOS,
        "image_mean": (0.5, 0.5, 0.5),
        "image_std": (0.5, 0.5, 0.5),
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "max_image_tokens": 4096,
    },
    sizes={
        **{"patch_size": MAX_SIDE, "merge_size": 64, "temporal_patch_size": 64},
        "max_image_tokens": MAX_TOKENS,
    },
    check=_check,
    cut=_cut,
    arguments=_arguments,
)
