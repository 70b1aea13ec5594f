"""Image processor of InternVLChatModel: square tiles of a stretched image, and the whole image.

Pillow scales. config.json states the options; mean and standard deviation are ImageNet's.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from formats.errors import CheckpointError
from qserve.multimodal.image_processors.kind import (
    MAX_TILES,
    Cut,
    Kind,
    Options,
    channels_first,
    side_of,
    split,
)
from qserve.multimodal.image_processors.stated_options import COPY_OPTIONS
from qserve.multimodal.stored_forms.internvl_config import tile_options


def _cut(pixels_HWC: np.ndarray, options: Options) -> Cut:
    side = side_of(options)
    rows, columns = closest_shape(
        pixels_HWC.shape[:2], side, options["min_patches"], options["max_patches"]
    )
    tiles = split(stretched(pixels_HWC, rows * side, columns * side), rows, columns)
    if len(tiles) == 1 or not options["use_thumbnail"]:
        return Cut(tiles, (rows, columns), False)
    whole = channels_first(stretched(pixels_HWC, side, side))
    return Cut((*tiles, whole), (rows, columns), True)


def stretched(pixels_HWC: np.ndarray, height: int, width: int) -> np.ndarray:
    """Scale an image to a size, whatever its ratio."""
    from PIL import Image

    image = Image.fromarray(pixels_HWC)
    return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))


def closest_shape(sides: Sequence[int], side: int, least: int, most: int) -> tuple[int, int]:
    """Return the rows and columns of tiles whose shape is nearest to the image's.

    If several shapes are equally near, the largest one with less than twice the pixels of the image
    is used.
    """
    height, width = sides
    shapes = [
        (rows, columns)
        for columns in range(1, most + 1)
        for rows in range(1, most + 1)
        if least <= rows * columns <= most
    ]
    shapes.sort(key=lambda shape: shape[0] * shape[1])
    best, chosen = float("inf"), (1, 1)
    for rows, columns in shapes:
        distance = abs(width / height - columns / rows)
        fits = height * width > 0.5 * side * side * rows * columns
        if distance < best or (distance == best and fits):
            best, chosen = distance, (rows, columns)
    return chosen


def _arguments(
    tiles: Sequence[Sequence[np.ndarray]], cuts: Sequence[Cut], options: Options
) -> dict[str, Any]:
    return {"pixel_values": np.stack([tile for of_image in tiles for tile in of_image])}


def _check(options: Options) -> None:
    side_of(options)
    if options["min_patches"] > options["max_patches"]:
        raise CheckpointError(
            "config.json min_dynamic_patch",
            f"expected at most max_dynamic_patch {options['max_patches']},"
            f" found {options['min_patches']}",
            COPY_OPTIONS,
        )


INTERNVL_CHAT = Kind(
    defaults={
        "image_mean": (0.485, 0.456, 0.406),
        "image_std": (0.229, 0.224, 0.225),
    },
    sizes={"min_patches": MAX_TILES, "max_patches": MAX_TILES},
    check=_check,
    cut=_cut,
    arguments=_arguments,
    from_config=tile_options,
)
