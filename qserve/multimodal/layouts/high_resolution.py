"""Layouts of an image that is encoded twice: as one square, and as tiles. Loads no torch.

All of this is one item. The model lists resolutions, and the one that fits the image best sets the
number of tiles. Padding has no embeddings. Each row of the other embeddings ends with that of a
newline.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from qserve.multimodal.layouts.layout import Layout, Piece, Run, Stated, Values, feature_of
from qserve.multimodal.layouts.squares import square_length
from qserve.multimodal.media import Feature, MediaItem

SIZES = "image_sizes"  # feature with the height and width of the image in pixels
MAX_SIDE = 2**24  # limit of an image's height and width


def _pieces(found: Mapping[str, Any], values: Values) -> Iterator[Piece]:
    pixels_PCHW = np.asarray(found["pixel_values"][0])
    size = np.asarray(found[SIZES][0], np.int64)
    height, width = size.tolist()
    features = Feature.of("pixel_values", pixels_PCHW), Feature.of(SIZES, size)
    yield Run(length=_length(height, width, len(pixels_PCHW), values), features=features)


def _length(height: int, width: int, num_squares: int, values: Values) -> int:
    """Return the number of embeddings of an image with this height and width."""
    base = square_length(values)
    if num_squares == 1:
        return base + 1
    vision = values["vision_config"]
    side = vision["image_size"] // vision["patch_size"]
    rows, columns = (number * side for number in _tiles(height, width, values))
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    # anyres_max_9: at most as many embeddings as 9 tiles have
    most = values.get("vision_aspect_ratio", "")
    if most:
        ratio = math.sqrt(rows * columns / (int(most.rpartition("_")[2]) * side**2))
        if ratio > 1.1:
            rows, columns = int(rows // ratio), int(columns // ratio)
    return base + rows * (columns + 1)


def _tiles(height: int, width: int, values: Values) -> tuple[int, int]:
    """Return the numbers of rows and columns of tiles of the resolution that fits an image best.

    This is the one that shows most of the image's pixels; among equals, the one that wastes fewest
    of its own pixels.
    """

    def rank(resolution: tuple[int, int]) -> tuple[int, int]:
        rows, columns = resolution
        scale = min(columns / width, rows / height)
        shown = min(int(width * scale) * int(height * scale), width * height)
        return shown, shown - rows * columns

    rows, columns = max(values["image_grid_pinpoints"], key=rank)
    side = values["vision_config"]["image_size"]
    return rows // side, columns // side


def _inputs(item: MediaItem, values: Values) -> tuple[dict[str, Stated], int]:
    size = values["vision_config"]["image_size"]
    sizes, pixels = feature_of(item, SIZES), feature_of(item, "pixel_values")
    height = width = 1
    if sizes is not None and (sizes.dtype, sizes.shape) == ("int64", (2,)):
        height, width = sizes.array().tolist()
    if not (0 < height < MAX_SIDE and 0 < width < MAX_SIDE):
        # shapes that no item has: the check fails
        return {"pixel_values": ("uint8", (0,)), SIZES: ("int64", (2,))}, 0
    is_alone = pixels is None or pixels.shape[:1] != (1,) or not values.get("vision_aspect_ratio")
    num_squares = 1 + math.prod(_tiles(height, width, values)) if is_alone else 1
    expected = {
        "pixel_values": ("uint8", (num_squares, 3, size, size)),
        SIZES: ("int64", (2,)),
    }
    return expected, _length(height, width, num_squares, values)


NEXT = Layout(pieces=_pieces, inputs=_inputs)  # LLaVA-NeXT
# LLaVA-OneVision: where a prompt has several images, they have no tiles.
ONE_VISION = Layout(pieces=_pieces, inputs=_inputs, takes_samples=True, sees_others=True)
