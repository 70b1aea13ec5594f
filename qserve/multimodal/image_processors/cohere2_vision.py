"""Image processor of Cohere2 Vision: square tiles of a stretched image, and an overview."""

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
    split,
)
from qserve.multimodal.image_processors.scaling import scaled


def _cut(pixels_HWC: np.ndarray, options: Options) -> Cut:
    side, resample = side_of(options), options["resample"]
    whole = channels_first(scaled(pixels_HWC, side, side, resample))
    rows, columns = 1, 1
    if options["crop_to_patches"]:
        rows, columns = _shape(pixels_HWC.shape[:2], side, options["max_patches"])
    if rows * columns == 1:
        return Cut((whole,), (1, 1), True)
    large = scaled(pixels_HWC, rows * side, columns * side, resample)
    return Cut((*split(large, rows, columns), whole), (rows, columns), True)


def _shape(sides: Sequence[int], side: int, most: int) -> tuple[int, int]:
    """Return the rows and columns of tiles that enlarge an image least, or shrink it least."""
    shapes = [
        (columns, rows)
        for columns in range(1, most + 1)
        for rows in range(1, most + 1)
        if columns * rows <= most
    ]
    shapes.sort(key=lambda shape: shape[0] * shape[1])
    height, width = sides
    scales_N = (np.array(shapes) * side / np.array([width, height])).min(1)
    if (scales_N < 1).all():
        number = int(scales_N.argmax())
    else:
        number = int(np.where(scales_N < 1, np.inf, scales_N).argmin())
    columns, rows = shapes[number]
    return rows, columns


def _arguments(
    tiles: Sequence[Sequence[np.ndarray]], cuts: Sequence[Cut], options: Options
) -> dict[str, Any]:
    return {"pixel_values": np.stack([tile for of_image in tiles for tile in of_image])}


COHERE_2_VISION = Kind(
    defaults={
        "resample": 3,
        "image_mean": (0.48145466, 0.4578275, 0.40821073),
        "image_std": (0.26862954, 0.26130258, 0.27577711),
        "size": {"height": 512, "width": 512},
        "crop_to_patches": True,
        "max_patches": 12,
        "patch_size": 16,
    },
    sizes={"max_patches": MAX_TILES, "patch_size": MAX_SIDE},
    check=check_square,
    cut=_cut,
    arguments=_arguments,
)
