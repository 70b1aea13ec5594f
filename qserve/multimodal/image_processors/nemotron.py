"""Image processor of Nemotron Nano Omni: an image of any size, whose number of patches has limits.

Pixels stay floats, because transformers does not round them after scaling.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from formats.architecture.sizes import is_size
from formats.errors import CheckpointError
from qserve.multimodal.image_processors.kind import (
    MAX_SIDE,
    MAX_TOKENS,
    Cut,
    Kind,
    Options,
    is_number,
)
from qserve.multimodal.image_processors.scaling import mode_of
from qserve.multimodal.image_processors.stated_options import COPY_OPTIONS

MAX_MERGE = 64
RESERVED = 4  # tokens of a context that are not left to images


def _cut(pixels_HWC: np.ndarray, options: Options) -> Cut:
    import torch

    size = options["patch_size"]
    height, width = pixels_HWC.shape[:2]
    rows, columns = _grid(height, width, options)
    plain = torch.from_numpy(pixels_HWC.transpose(2, 0, 1).astype(np.float32))
    if (height, width) != (rows * size, columns * size):
        plain = torch.nn.functional.interpolate(
            plain[None],
            size=(rows * size, columns * size),
            mode=mode_of(options["resample"]),
            align_corners=False,
            antialias=True,
        )[0]
    return Cut((plain.numpy(),), (1, 1), True)


def _grid(height: int, width: int, options: Options) -> tuple[int, int]:
    """Return the numbers of rows and columns of patches to which an image is scaled."""
    least, most, merge = options["min_num_patches"], _most(options), _merge(options)
    sides = [round(length / options["patch_size"] + 0.5) for length in (height, width)]
    factor = min(math.sqrt(most / math.prod(sides)), 1.0)
    sides = [math.floor(factor * side) for side in sides]
    if most > least and 0 < math.prod(sides) < least:
        factor = math.sqrt(least / math.prod(sides))
        sides = [math.ceil(factor * side) for side in sides]
    for axis in (0, 1):
        rest = sides[axis] % merge
        larger = sides[axis] + merge - rest
        if rest and larger * sides[1 - axis] <= most:
            sides[axis] = larger
        elif rest or not sides[axis]:
            sides[axis] = max(merge, sides[axis] - rest)
    return sides[0], sides[1]


def _merge(options: Options) -> int:
    """Return the rows, and columns, of patches that have one embedding together."""
    return round(1 / options["downsample_ratio"])


def _most(options: Options) -> int:
    """Return the largest number of patches of an image."""
    least, most = options["min_num_patches"], options["max_num_patches"]
    found = max((options["max_model_len"] - RESERVED) * _merge(options) ** 2, least)
    return max(least, min(found, most) if most else found)


def _check(options: Options) -> None:
    mode_of(options["resample"])
    ratio, most = options["downsample_ratio"], options["max_num_patches"]
    if not is_number(ratio, above=0) or not 1 <= _merge(options) <= MAX_MERGE:
        raise CheckpointError(
            "downsample_ratio of the image processor",
            f"expected a number from {1 / MAX_MERGE} to 1, found {ratio!r:.100}",
            COPY_OPTIONS,
        )
    if most != 0 and not (is_size(most) and most <= MAX_TOKENS):
        raise CheckpointError(
            "max_num_patches of the image processor",
            f"expected a whole number up to {MAX_TOKENS}, found {most!r:.100}",
            COPY_OPTIONS,
        )


def _renamed(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with transformers' names of the mean and standard deviation."""
    found = {f"image_{name}": options.get(f"norm_{name}") for name in ("mean", "std")}
    return {**{key: each for key, each in found.items() if each is not None}, **options}


def _arguments(
    tiles: Sequence[Sequence[np.ndarray]], cuts: Sequence[Cut], options: Options
) -> dict[str, Any]:
    """Return the patches of all images, row by row, and the grid of each image."""
    size, patches, grids = options["patch_size"], [], []
    for (tile_CHW,) in tiles:
        channels, height, width = tile_CHW.shape
        rows, columns = height // size, width // size
        cut = tile_CHW.reshape(channels, rows, size, columns, size).transpose(1, 3, 0, 2, 4)
        patches.append(cut.reshape(rows * columns, -1))
        grids.append((rows, columns))
    return {"pixel_values": np.concatenate(patches), "image_grid_hw": np.array(grids, np.int64)}


NEMOTRON = Kind(
    defaults={
        "resample": 3,
        "image_mean": (0.48145466, 0.4578275, 0.40821073),
        "image_std": (0.26862954, 0.26130258, 0.27577711),
        "patch_size": 16,
        "downsample_ratio": 0.5,
        "min_num_patches": 1024,
        "max_num_patches": 13312,
        "max_model_len": 16384,
    },
    sizes={"patch_size": MAX_SIDE, "min_num_patches": MAX_TOKENS, "max_model_len": 2**30},
    check=_check,
    cut=_cut,
    arguments=_arguments,
    renamed=_renamed,
)
