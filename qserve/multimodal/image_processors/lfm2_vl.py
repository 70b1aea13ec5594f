"""Image processor of LFM2-VL: one image of any size, or square tiles and an overview."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from formats.errors import CheckpointError
from qserve.multimodal.image_processors.kind import (
    MAX_SIDE,
    MAX_TILES,
    MAX_TOKENS,
    Cut,
    Kind,
    Options,
    channels_first,
    is_number,
    split,
)
from qserve.multimodal.image_processors.scaling import mode_of, scaled
from qserve.multimodal.image_processors.stated_options import COPY_OPTIONS


def _cut(pixels_HWC: np.ndarray, options: Options) -> Cut:
    height, width = pixels_HWC.shape[:2]
    low, high = 1, 1
    if options["do_image_splitting"]:
        low, high = options["min_tiles"], options["max_tiles"]
    whole = scaled(pixels_HWC, *_fitted(height, width, options), options["resample"])
    if not _is_large(height, width, options) or low == high == 1:
        return Cut((channels_first(whole),), (1, 1), True)
    side = options["tile_size"]
    columns, rows = _closest_shape(width, height, low, high, side)
    large = scaled(pixels_HWC, rows * side, columns * side, options["resample"])
    tiles = split(large, rows, columns)
    has_overview = options["use_thumbnail"] and rows * columns != 1
    if has_overview:
        tiles += (channels_first(whole),)
    return Cut(tiles, (rows, columns), has_overview)


def _check(options: Options) -> None:
    mode_of(options["resample"])
    low, high = options["min_tiles"], options["max_tiles"]
    if low > high:
        raise CheckpointError(
            "min_tiles of the image processor",
            f"is {low}, and max_tiles is {high}",
            COPY_OPTIONS,
        )
    tolerance = options["max_pixels_tolerance"]
    if not is_number(tolerance, above=0):
        raise CheckpointError(
            "max_pixels_tolerance of the image processor",
            f"expected a number above 0, found {tolerance!r:.100}",
            COPY_OPTIONS,
        )


def _unit(options: Options) -> int:
    """Return the side in pixels of the square that becomes one embedding."""
    return options["encoder_patch_size"] * options["downsample_factor"]


def _is_large(height: int, width: int, options: Options) -> bool:
    """Return True if an image is cut into tiles."""
    unit, least = _unit(options), options["encoder_patch_size"]
    area = math.prod(max(least, round(side / unit) * unit) for side in (height, width))
    return area > options["max_image_tokens"] * unit**2 * options["max_pixels_tolerance"]


def _fitted(height: int, width: int, options: Options) -> tuple[int, int]:
    """Return sides that are multiples of the unit, with an allowed number of embeddings."""
    unit, sides = _unit(options), (height, width)
    low, high = (options[f"{end}_image_tokens"] * unit**2 for end in ("min", "max"))
    found = [max(unit, round(side / unit) * unit) for side in sides]
    if math.prod(found) > high:
        shrink = math.sqrt(height * width / high)
        found = [max(unit, math.floor(side / shrink / unit) * unit) for side in sides]
    elif math.prod(found) < low:
        grow = math.sqrt(low / (height * width))
        found = [math.ceil(side * grow / unit) * unit for side in sides]
    return found[0], found[1]


def _closest_shape(width: int, height: int, low: int, high: int, side: int) -> tuple[int, int]:
    """Return the columns and rows of tiles whose ratio is closest to the image's.

    Among equals the last one counts whose tiles have less than twice the area of the image. Their
    order is that of a Python set, as in transformers.
    """
    shapes = {
        (columns, rows)
        for number in range(low, high + 1)
        for columns in range(1, number + 1)
        for rows in range(1, number + 1)
        if low <= columns * rows <= high
    }
    best, least = (1, 1), math.inf
    for shape in sorted(shapes, key=math.prod):
        distance = abs(width / height - shape[0] / shape[1])
        is_filled = width * height > 0.5 * side**2 * math.prod(shape)
        if distance < least or (distance == least and is_filled):
            best, least = shape, distance
    return best


def _arguments(
    tiles: Sequence[Sequence[np.ndarray]], cuts: Sequence[Cut], options: Options
) -> dict[str, Any]:
    """Return patches of all tiles, filled up with zeros to one number."""
    size = options["encoder_patch_size"]
    sizes = [tile[0].size // size**2 for of_image in tiles for tile in of_image]
    most = options["max_image_tokens"] * options["downsample_factor"] ** 2
    if options["do_image_splitting"]:
        most = max(most, (options["tile_size"] // size) ** 2)
    most = max(most, *sizes)  # very wide images have more
    patches, masks, shapes = [], [], []
    for tile_CHW in (tile for of_image in tiles for tile in of_image):
        channels, height, width = tile_CHW.shape
        rows, columns = height // size, width // size
        found = tile_CHW.reshape(channels, rows, size, columns, size).transpose(1, 3, 2, 4, 0)
        filled = np.zeros((most, channels * size**2), np.float32)
        filled[: rows * columns] = found.reshape(rows * columns, -1)
        patches.append(filled)
        masks.append(np.arange(most) < rows * columns)
        shapes.append((rows, columns))
    return {
        "pixel_values": np.stack(patches),
        "pixel_attention_mask": np.stack(masks).astype(np.int32),
        "spatial_shapes": np.array(shapes, np.int64),
    }


LFM2_VL = Kind(
    defaults={
        "resample": 2,
        "image_mean": (0.5, 0.5, 0.5),
        "image_std": (0.5, 0.5, 0.5),
        "downsample_factor": 2,
        "do_image_splitting": True,
        "min_tiles": 2,
        "max_tiles": 10,
        "use_thumbnail": True,
        "min_image_tokens": 64,
        "max_image_tokens": 256,
        "encoder_patch_size": 16,
        "tile_size": 512,
        "max_pixels_tolerance": 2.0,
    },
    sizes={
        **dict.fromkeys(("min_tiles", "max_tiles"), MAX_TILES),
        **dict.fromkeys(("min_image_tokens", "max_image_tokens"), MAX_TOKENS),
        **dict.fromkeys(("downsample_factor", "encoder_patch_size", "tile_size"), MAX_SIDE),
    },
    check=_check,
    cut=_cut,
    arguments=_arguments,
)
