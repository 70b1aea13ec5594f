"""Image processor of Step-3.7: square tiles, whose side depends on the shape, and an overview."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from qserve.multimodal.image_processors.kind import (
    MAX_SIDE,
    MAX_TILES,
    Cut,
    Kind,
    Options,
    channels_first,
    check_square,
    side_of,
)
from qserve.multimodal.image_processors.scaling import scaled

NARROW, LONG = 32, 4  # an image with a shorter side and a larger ratio of sides becomes a square
FLAT = 1.5  # ratio of sides from which a small image has tiles
SNAP = 0.2  # part of a tile that is stretched to a whole one


def _cut(pixels_HWC: np.ndarray, options: Options) -> Cut:
    side, tile, resample = side_of(options), options["patch_size"], options["resample"]
    height, width = pixels_HWC.shape[:2]
    if min(height, width) < NARROW and max(height, width) > LONG * min(height, width):
        height = width = max(height, width)
        filled = np.zeros((height, width, 3), np.uint8)
        filled[: pixels_HWC.shape[0], : pixels_HWC.shape[1]] = pixels_HWC
        pixels_HWC = filled
    longest = options["max_image_size"]
    if max(height, width) > longest:
        scale = longest / max(height, width)
        height, width = int(height * scale), int(width * scale)
    overview = scaled(scaled(pixels_HWC, height, width, resample), side, side, resample)
    window = _window(height, width, side, tile)
    if not window:
        return Cut((channels_first(overview),), (0, 0), True)
    large = scaled(pixels_HWC, _snapped(height, window), _snapped(width, window), resample)
    tiles = [
        large[top : top + window, left : left + window]
        for top in range(0, large.shape[0], window)
        for left in range(0, large.shape[1], window)
    ]
    rows, columns = (max(1, length // window) for length in large.shape[:2])
    found = (channels_first(scaled(each, tile, tile, resample)) for each in tiles)
    return Cut((*found, channels_first(overview)), (rows, columns), True)


def _window(height: int, width: int, side: int, tile: int) -> int:
    """Return the side of a tile before it is scaled; 0: the image has no tiles."""
    short, long = min(height, width), max(height, width)
    if long <= side:
        return short if long / short > FLAT else 0
    return min(short, tile) if long / short > LONG else tile


def _snapped(length: int, window: int) -> int:
    """Return the multiple of a window to which a side is scaled; short sides stay."""
    if length < window:
        return length
    return window * (length // window + (length % window > SNAP * window))


def _arguments(
    tiles: Sequence[Sequence[np.ndarray]], cuts: Sequence[Cut], options: Options
) -> dict[str, Any]:
    """Return overviews and tiles, and the number of tiles of each image."""
    found: dict[str, Any] = {
        "pixel_values": np.stack([of_image[-1] for of_image in tiles]),
        "num_local_patches": [len(of_image) - 1 for of_image in tiles],
    }
    local = [tile for of_image in tiles for tile in of_image[:-1]]
    return {**found, "pixel_values_local": np.stack(local)} if local else found


STEP = Kind(
    defaults={
        "resample": 2,
        "image_mean": (0.48145466, 0.4578275, 0.40821073),
        "image_std": (0.26862954, 0.26130258, 0.27577711),
        "size": {"height": 728, "width": 728},
        "patch_size": 504,
        "max_image_size": 3024,
    },
    sizes={"patch_size": MAX_SIDE, "max_image_size": MAX_SIDE * MAX_TILES},
    check=check_square,
    cut=_cut,
    arguments=_arguments,
)
