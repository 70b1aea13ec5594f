"""Image processors of Kimi-K2.5 and Kimi-VL: an image of any size, filled up with black.

Black rows and columns are added at the lower and right side. Kimi-K2.5 scales as torchvision does,
Kimi-VL with Pillow.
"""

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
    equal_sides,
)
from qserve.multimodal.image_processors.scaling import mode_of, scaled
from qserve.multimodal.image_processors.stated_options import COPY_OPTIONS


def _cut(pixels_HWC: np.ndarray, options: Options) -> Cut:
    height, width = _sides(pixels_HWC.shape[:2], options)
    return _filled(scaled(pixels_HWC, height, width, options["resample"]), options)


def _cut_with_pillow(pixels_HWC: np.ndarray, options: Options) -> Cut:
    from PIL import Image

    height, width = _sides(pixels_HWC.shape[:2], options, least=0)
    if (height, width) != pixels_HWC.shape[:2]:
        image = Image.fromarray(pixels_HWC).resize((width, height), options["resample"])
        pixels_HWC = np.asarray(image)
    return _filled(pixels_HWC, options)


def _filled(pixels_HWC: np.ndarray, options: Options) -> Cut:
    """Fill an image up to whole embeddings."""
    height, width = pixels_HWC.shape[:2]
    unit = options["patch_size"] * options["merge_size"]
    filled = np.zeros((-(-height // unit) * unit, -(-width // unit) * unit, 3), np.uint8)
    filled[:height, :width] = pixels_HWC
    return Cut((channels_first(filled),), (1, 1), True)


def _sides(sides: Sequence[int], options: Options, least: int = 1) -> tuple[int, int]:
    """Return the scaled height and width of an image. Images never grow.

    `least`: number of patches for which a side counts that is shorter than one.
    """
    longest, patch = _longest(options), options["patch_size"]
    num_patches = math.prod(max(least, side // patch) for side in sides)
    scale = math.sqrt(options["max_patches"] / max(num_patches, options["max_patches"]))
    scale = min(scale, *(longest * patch / side for side in sides))
    height, width = (min(max(1, int(side * scale)), longest * patch) for side in sides)
    return height, width


def _longest(options: Options) -> int:
    """Return the largest number of patches on a side. Raises CheckpointError."""
    return equal_sides(options["size"], ("max_height", "max_width"), "size of the image processor")


def _check(options: Options) -> None:
    _longest(options)
    mode_of(options["resample"])


def _arguments(
    tiles: Sequence[Sequence[np.ndarray]], cuts: Sequence[Cut], options: Options
) -> dict[str, Any]:
    """Return the patches of all images, row by row."""
    size, patches, grids = options["patch_size"], [], []
    for (tile_CHW,) in tiles:
        channels, height, width = tile_CHW.shape
        rows, columns = height // size, width // size
        found = tile_CHW.reshape(channels, rows, size, columns, size).transpose(1, 3, 0, 2, 4)
        patches.append(found.reshape(-1, channels, size, size))
        grids.append((1, rows, columns))
    return {
        "pixel_values": np.concatenate(patches),
        "image_grid_thw": np.array(grids, np.int64),
    }


def _renamed(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of Moonshot's own file with the names of transformers."""
    own = options.pop("media_proc_cfg", None)
    if isinstance(own, dict):
        longest = own.get("patch_limit_on_one_side")
        found = {
            "max_patches": own.get("in_patch_limit"),
            "patch_size": own.get("patch_size"),
            "merge_size": own.get("merge_kernel_size"),
            "image_mean": own.get("image_mean"),
            "image_std": own.get("image_std"),
            "size": longest and {"max_height": longest, "max_width": longest},
        }
        options |= {key: value for key, value in found.items() if value is not None}
    return options


def _renamed_vl(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of Kimi-VL's file with the names of Kimi-K2.5."""
    if not options.pop("pad_input", True):
        raise CheckpointError(
            "pad_input of the image processor",
            "expected true: published models fill images up",
            COPY_OPTIONS,
        )
    names = {"in_token_limit": "max_patches", "merge_kernel_size": "merge_size"}
    found = {names.get(key, key): value for key, value in options.items()}
    merge = found.get("merge_size")
    if isinstance(merge, list) and merge and all(side == merge[0] for side in merge):
        found["merge_size"] = merge[0]
    return found


_DEFAULTS = {
    "resample": 3,
    "image_mean": (0.5, 0.5, 0.5),
    "image_std": (0.5, 0.5, 0.5),
    "size": {"max_height": 512, "max_width": 512},
    "max_patches": 16384,
    "patch_size": 14,
    "merge_size": 2,
}
_SIZES = {"max_patches": MAX_TOKENS, "patch_size": MAX_SIDE, "merge_size": MAX_SIDE}
KIMI_K25 = Kind(
    defaults=_DEFAULTS,
    sizes=_SIZES,
    check=_check,
    cut=_cut,
    arguments=_arguments,
    renamed=_renamed,
)
KIMI_VL = Kind(
    defaults={**_DEFAULTS, "max_patches": 4096},
    sizes=_SIZES,
    check=_check,
    cut=_cut_with_pillow,
    arguments=_arguments,
    renamed=_renamed_vl,
)
