"""Image processor of DeepSeek-OCR: square tiles of a stretched image, and the whole image, padded.

Pillow scales. The code in the model's folder has the options; a file of the image processor may
change them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from formats.errors import CheckpointError
from qserve.multimodal.image_processors.internvl import closest_shape, stretched
from qserve.multimodal.image_processors.kind import (
    MAX_SIDE,
    MAX_TILES,
    Cut,
    Kind,
    Options,
    channels_first,
    side_of,
    split,
)
from qserve.multimodal.image_processors.stated_options import COPY_OPTIONS

CHANNEL_MAX = 255


def _cut(pixels_HWC: np.ndarray, options: Options) -> Cut:
    """Cut an image into tiles, followed by the whole image. Small images have no tiles."""
    whole = channels_first(_padded(pixels_HWC, side_of(options), options["image_mean"]))
    side, sides = options["tile_size"], pixels_HWC.shape[:2]
    if max(sides) <= side:
        return Cut((whole,), (0, 0), True)
    rows, columns = closest_shape(sides, side, options["min_patches"], options["max_patches"])
    tiles = split(stretched(pixels_HWC, rows * side, columns * side), rows, columns)
    return Cut((*tiles, whole), (rows, columns), True)


def _padded(pixels_HWC: np.ndarray, side: int, mean: Sequence[float]) -> np.ndarray:
    """Scale an image into the middle of a square of the mean's color."""
    from PIL import Image, ImageOps

    color = tuple(int(each * CHANNEL_MAX) for each in mean)
    image = Image.fromarray(pixels_HWC)
    return np.asarray(ImageOps.pad(image, (side, side), Image.Resampling.BICUBIC, color))


def _arguments(
    tiles: Sequence[Sequence[np.ndarray]], cuts: Sequence[Cut], options: Options
) -> dict[str, Any]:
    """Return the arguments of transformers' models, which want lists of integers."""
    found: dict[str, Any] = {
        "pixel_values": np.stack([of_image[-1] for of_image in tiles]),
        "num_local_patches": [len(of_image) - 1 for of_image in tiles],
    }
    local = [tile for of_image in tiles for tile in of_image[:-1]]
    return {**found, "pixel_values_local": np.stack(local)} if local else found


def _arguments_with_grids(
    tiles: Sequence[Sequence[np.ndarray]], cuts: Sequence[Cut], options: Options
) -> dict[str, Any]:
    grids = [list(cut.grid[::-1]) for cut in cuts]  # transformers states columns first
    return {**_arguments(tiles, cuts, options), "patches_grid": grids}


def _check(options: Options) -> None:
    side_of(options)
    if options["min_patches"] > options["max_patches"]:
        raise CheckpointError(
            "min_patches of the image processor",
            f"expected at most max_patches {options['max_patches']},"
            f" found {options['min_patches']}",
            COPY_OPTIONS,
        )
    if not options["crop_to_patches"]:
        raise CheckpointError(
            "crop_to_patches of the image processor",
            "expected true: images without tiles are not supported",
            COPY_OPTIONS,
        )


DEEPSEEK_OCR = Kind(
    defaults={
        "image_mean": (0.5, 0.5, 0.5),
        "image_std": (0.5, 0.5, 0.5),
        "size": {"height": 1024, "width": 1024},
        "tile_size": 640,
        "min_patches": 2,
        "max_patches": 9,
        "crop_to_patches": True,
    },
    sizes={"tile_size": MAX_SIDE, "min_patches": MAX_TILES, "max_patches": MAX_TILES},
    check=_check,
    cut=_cut,
    arguments=_arguments_with_grids,
    needs_options=False,
)
DEEPSEEK_OCR_2 = replace(
    DEEPSEEK_OCR,
    defaults={**DEEPSEEK_OCR.defaults, "tile_size": 768, "max_patches": 6},
    arguments=_arguments,
)
UNLIMITED_OCR = replace(DEEPSEEK_OCR, defaults={**DEEPSEEK_OCR.defaults, "max_patches": 32})
