"""Image processor of Gemma 4 12B: an image of any shape, in at most a number of large patches."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from formats.errors import CheckpointError, InputError
from qserve.multimodal.image_processors.kind import (
    MAX_SIDE,
    Cut,
    Kind,
    Options,
    channels_first,
)
from qserve.multimodal.image_processors.scaling import mode_of, scaled
from qserve.multimodal.image_processors.stated_options import COPY_OPTIONS

TOKENS = (70, 140, 280, 560, 1120)  # numbers of embeddings that transformers accepts


def patches_of(pixels_CHW: np.ndarray, size: int) -> np.ndarray:
    """Return patches [C, P, size * size], row by row."""
    channels, height, width = pixels_CHW.shape
    cut = pixels_CHW.reshape(channels, height // size, size, width // size, size)
    return cut.transpose(0, 1, 3, 2, 4).reshape(channels, -1, size * size)


def _cut(pixels_HWC: np.ndarray, options: Options) -> Cut:
    height, width = _sides(*pixels_HWC.shape[:2], options)
    return Cut(
        (channels_first(scaled(pixels_HWC, height, width, options["resample"])),), (1, 1), True
    )


def _sides(height: int, width: int, options: Options) -> tuple[int, int]:
    """Return the scaled height and width: the largest of this shape that have few enough patches.

    Raises InputError for an image that is too narrow.
    """
    most, size = options["max_soft_tokens"], _size(options)
    factor = math.sqrt(most * size**2 / (height * width))
    rows, columns = (math.floor(factor * side / size) for side in (height, width))
    if not rows:
        rows, columns = 1, min(width // height, most)
    elif not columns:
        rows, columns = min(height // width, most), 1
    if not 0 < rows * columns <= most:
        raise InputError(
            "image",
            f"of {width} x {height} pixels becomes {columns} x {rows} patches, at most {most}",
            "send an image of another size",
        )
    return rows * size, columns * size


def _size(options: Options) -> int:
    """Return the side in pixels of a patch that becomes one embedding."""
    return options["patch_size"] * options["pooling_kernel_size"]


def _check(options: Options) -> None:
    mode_of(options["resample"])
    if options["max_soft_tokens"] not in TOKENS:
        raise CheckpointError(
            "max_soft_tokens of the image processor",
            f"expected one of {', '.join(map(str, TOKENS))}, found {options['max_soft_tokens']}",
            COPY_OPTIONS,
        )


def _arguments(
    tiles: Sequence[Sequence[np.ndarray]], cuts: Sequence[Cut], options: Options
) -> dict[str, Any]:
    """Return patches with their columns and rows, filled up to the largest number of patches."""
    most, size = options["max_soft_tokens"], _size(options)
    pixels, places, counts = [], [], []
    for (tile_CHW,) in tiles:
        patches = patches_of(tile_CHW, size).transpose(1, 2, 0)
        count, columns = len(patches), tile_CHW.shape[2] // size
        numbers = np.arange(count)
        place = np.stack([numbers % columns, numbers // columns], -1)
        pixels.append(np.pad(patches.reshape(count, -1), ((0, most - count), (0, 0))))
        places.append(np.pad(place, ((0, most - count), (0, 0)), constant_values=-1))
        counts.append(count)
    return {
        "pixel_values": np.stack(pixels),
        "image_position_ids": np.stack(places),
        "num_soft_tokens_per_image": counts,
    }


GEMMA_4_UNIFIED = Kind(
    defaults={
        "resample": 3,
        "do_normalize": False,
        "image_mean": (0.0, 0.0, 0.0),
        "image_std": (1.0, 1.0, 1.0),
        "patch_size": 16,
        "pooling_kernel_size": 3,
        "max_soft_tokens": 280,
    },
    sizes={"patch_size": MAX_SIDE, "pooling_kernel_size": 64, "max_soft_tokens": TOKENS[-1]},
    check=_check,
    cut=_cut,
    arguments=_arguments,
    rounds_to="float32",
)
