"""Image processor of Llama 4: square tiles of an image whose ratio is kept, and an overview."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from qserve.multimodal.image_processors.kind import (
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
    sides, side, resample = pixels_HWC.shape[:2], side_of(options), options["resample"]
    canvas = _canvas(sides, side, options["max_patches"], options["resize_to_max_canvas"])
    limits = canvas
    if not options["resize_to_max_canvas"]:
        limits = tuple(min(max(own, side), most) for own, most in zip(sides, canvas, strict=True))
    filled = np.zeros((*canvas, pixels_HWC.shape[2]), np.uint8)
    height, width = _kept_ratio(sides, limits)
    filled[:height, :width] = scaled(pixels_HWC, height, width, resample)
    rows, columns = canvas[0] // side, canvas[1] // side
    tiles = split(filled, rows, columns)
    if rows * columns > 1:
        tiles += (channels_first(scaled(pixels_HWC, side, side, resample)),)
    return Cut(tiles, (rows, columns), True)


def _canvas(sides: Sequence[int], side: int, most: int, is_largest: bool) -> tuple[int, int]:
    """Return the height and width of whole tiles that fit an image best.

    This is the smallest canvas that does not shrink the image (or the largest one, with
    `is_largest`), or else the one that shrinks it least. Among equals the smallest area counts.
    """
    shapes: dict[float, list[tuple[int, int]]] = {}
    for number in range(most, 0, -1):
        for rows in (each for each in range(1, number + 1) if number % each == 0):
            columns = number // rows
            shapes.setdefault(rows / columns, []).append((rows * side, columns * side))
    canvases_N2 = np.array([shape for found in shapes.values() for shape in found])
    # float32, as in transformers: another rounding would give other equals
    scales_N = (canvases_N2.astype(np.float32) / np.array(sides, np.float32)).min(1)
    growing = scales_N[scales_N >= 1]
    chosen = scales_N.max()
    if len(growing) and not is_largest:
        chosen = growing.min()
    height, width = min(canvases_N2[scales_N == chosen].tolist(), key=math.prod)
    return height, width


def _kept_ratio(sides: Sequence[int], limits: Sequence[int]) -> tuple[int, int]:
    """Return the largest height and width within limits that keep the ratio of an image."""
    (height, width), (high, wide) = sides, limits
    if wide / width < high / height:
        return max(1, min(math.floor(height * (wide / width)), high)), wide
    return high, max(1, min(math.floor(width * (high / height)), wide))


def _arguments(
    tiles: Sequence[Sequence[np.ndarray]], cuts: Sequence[Cut], options: Options
) -> dict[str, Any]:
    return {"pixel_values": np.stack([tile for of_image in tiles for tile in of_image])}


LLAMA_4 = Kind(
    defaults={
        "resample": 2,
        "image_mean": (0.5, 0.5, 0.5),
        "image_std": (0.5, 0.5, 0.5),
        "size": {"height": 336, "width": 336},
        "max_patches": 16,
        "resize_to_max_canvas": False,
    },
    sizes={"max_patches": MAX_TILES},
    check=check_square,
    cut=_cut,
    arguments=_arguments,
    rounds_to="bfloat16",
)
