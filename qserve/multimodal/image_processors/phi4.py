"""Image processor of Phi-4-multimodal: square tiles of an image with white at two of its sides.

The tower makes the overview of an image from its normalized tiles.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from formats.errors import CheckpointError, InputError
from qserve.multimodal.image_processors.kind import (
    MAX_SIDE,
    MAX_TILES,
    Cut,
    Kind,
    Options,
    check_square,
    side_of,
    split,
)
from qserve.multimodal.image_processors.scaling import mode_of, scaled
from qserve.multimodal.image_processors.stated_options import COPY_OPTIONS

if TYPE_CHECKING:
    import torch

BILINEAR, BICUBIC = 2, 3
MIN_SIDE = 10  # in pixels, after scaling; transformers refuses less
WHITE = 255


def _check(options: Options) -> None:
    check_square(options)
    if mode_of(options["resample"]) != "bicubic":
        raise CheckpointError(
            "resample of the image processor",
            f"expected {BICUBIC}, found {options['resample']!r:.100}",
            COPY_OPTIONS,
        )
    if side_of(options) % options["patch_size"]:
        raise CheckpointError(
            "size of the image processor",
            f"expected a multiple of patch_size {options['patch_size']}, found {side_of(options)}",
            COPY_OPTIONS,
        )


def _cut(pixels_HWC: np.ndarray, options: Options) -> Cut:
    (height, width), side = pixels_HWC.shape[:2], side_of(options)
    rows, columns = _shape(height, width, side, options["dynamic_hd"])
    high, wide = rows * side, columns * side
    if wide / width < high / height:
        new = int(height * (wide / width)), wide
    else:
        new = high, int(width * (high / height))
    if min(new) < MIN_SIDE:
        raise InputError(
            "image",
            f"of {width} x {height} pixels becomes {new[1]} x {new[0]}; the model takes sides of at"
            f" least {MIN_SIDE}",
            "send an image whose sides differ less",
        )
    filled = np.full((high, wide, pixels_HWC.shape[2]), WHITE, np.uint8)
    filled[: new[0], : new[1]] = scaled(pixels_HWC, *new, BILINEAR)
    patch = options["patch_size"]
    useful = tuple(
        most // patch - (most - own) // patch for most, own in zip((high, wide), new, strict=True)
    )
    return Cut(split(filled, rows, columns), (rows, columns), False, useful)


def _shape(height: int, width: int, side: int, most: int) -> tuple[int, int]:
    """Return the rows and columns of tiles that cover an image, or those of the nearest ratio."""
    rows, columns = math.ceil(height / side), math.ceil(width / side)
    if rows * columns <= most:
        return rows, columns
    # in the order of transformers: if several are equal, the last one is used for large images
    shapes = {
        (across, down)
        for number in range(1, most + 1)
        for across in range(1, number + 1)
        for down in range(1, number + 1)
        if across * down <= most
    }
    best, least = (1, 1), math.inf
    for across, down in sorted(shapes, key=lambda shape: shape[0] * shape[1]):
        distance = abs(width / height - across / down)
        is_large = width * height > 0.5 * side * side * across * down
        if distance < least or (distance == least and is_large):
            best, least = (across, down), distance
    return best[1], best[0]


def overview(tiles_TCHW: "torch.Tensor", grid: Sequence[int]) -> "torch.Tensor":
    """Return the whole image [C, H, W], scaled to the size of a tile, from its normalized tiles."""
    import torch

    (rows, columns), (channels, height, width) = grid, tiles_TCHW.shape[1:]
    whole_CHW = tiles_TCHW.view(rows, columns, channels, height, width).permute(2, 0, 3, 1, 4)
    found = torch.nn.functional.interpolate(
        whole_CHW.reshape(1, channels, rows * height, columns * width).float(),
        size=(height, width),
        mode="bicubic",
        align_corners=False,
    )
    return found[0].to(tiles_TCHW.dtype)


def patch_mask(grid: Sequence[int], useful: Sequence[int], size: int) -> "torch.Tensor":
    """Return the mask [1 + T, P, P] of patches of the overview and the tiles that are no padding.

    `useful`: numbers of such rows and columns of patches. `size`: P, patches at a tile's side.
    """
    import torch

    (rows, columns), (high, wide) = grid, useful
    mask = torch.zeros(rows * size, columns * size, dtype=torch.bool)
    mask[:high, :wide] = True
    tiles = mask.view(rows, size, columns, size).transpose(1, 2).reshape(-1, size, size)
    return torch.cat([torch.ones(1, size, size, dtype=torch.bool), tiles])


def _arguments(
    tiles: Sequence[Sequence[np.ndarray]], cuts: Sequence[Cut], options: Options
) -> dict[str, Any]:
    """Return transformers' arguments: images with fewer tiles are filled up with zeros."""
    import torch

    side, most = side_of(options), max(len(each) for each in tiles) + 1
    size = side // options["patch_size"]
    pixels = np.zeros((len(cuts), most, 3, side, side), np.float32)
    masks = np.ones((len(cuts), most, size, size), np.float32)
    for number, (of_image, cut) in enumerate(zip(tiles, cuts, strict=True)):
        stacked_TCHW = torch.from_numpy(np.stack(of_image))
        pixels[number, 0] = overview(stacked_TCHW, cut.grid).numpy()
        pixels[number, 1 : 1 + len(of_image)] = stacked_TCHW.numpy()
        masks[number, : 1 + len(of_image)] = patch_mask(cut.grid, cut.useful, size).numpy()
    return {
        "image_pixel_values": pixels,
        "image_sizes": np.array([cut.grid for cut in cuts], np.int64) * side,
        "image_attention_mask": masks,
    }


PHI_4 = Kind(
    defaults={
        "resample": BICUBIC,
        "image_mean": (0.5, 0.5, 0.5),
        "image_std": (0.5, 0.5, 0.5),
        "size": {"height": 448, "width": 448},
        "patch_size": 14,
        "dynamic_hd": 36,
    },
    sizes={"patch_size": MAX_SIDE, "dynamic_hd": MAX_TILES},
    check=_check,
    cut=_cut,
    arguments=_arguments,
)
