"""Layouts of images of any size that Pixtral's tower encodes. Loads no torch.

In Mistral 3 and Pixtral each row of embeddings ends with a token. In LightOnOCR nothing is between
them. In Pixtral each patch has an embedding, in the others a square of patches.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from formats.errors import InputError
from qserve.multimodal.layouts.layout import Layout, Piece, Run, Stated, Values, feature_of
from qserve.multimodal.media import Feature, MediaItem


def _pieces(found: Mapping[str, Any], values: Values) -> Iterator[Piece]:
    """Yield the item of an image, in which each row ends with a token."""
    height, width = (int(size) for size in found["image_sizes"][0])
    pixels_CHW = np.asarray(found["pixel_values"])[0][:, :height, :width]
    size = _square_size(values)
    rows, columns = height // size, width // size
    ends = {row * (columns + 1) - 1: "[IMG_BREAK]" for row in range(1, rows)}
    length = rows * (columns + 1)
    yield Run(
        length=length,
        features=(Feature.of("pixel_values", pixels_CHW),),
        other_tokens={**ends, length - 1: "[IMG_END]"},
    )


def _square_size(values: Values) -> int:
    """Return the side in pixels of the square that becomes one embedding."""
    return values["vision_config"]["patch_size"] * values.get("spatial_merge_size", 1)


def _inputs(item: MediaItem, values: Values) -> tuple[dict[str, Stated], int]:
    size = _square_size(values)
    longest = values["vision_config"]["image_size"]  # the tower has no positions beyond this side
    pixels = feature_of(item, "pixel_values")
    height, width = pixels.shape[1:] if pixels is not None and len(pixels.shape) == 3 else (0, 0)
    if not (0 < height <= longest and 0 < width <= longest) or height % size or width % size:
        height = width = size
    return {"pixel_values": ("uint8", (3, height, width))}, (height // size) * (width // size)


def _options(values: Values) -> dict[str, Any]:
    return {"patch_size": {"height": _square_size(values), "width": _square_size(values)}}


ROWS = Layout(pieces=_pieces, inputs=_inputs, options=_options)


def _plain_pieces(found: Mapping[str, Any], values: Values) -> Iterator[Piece]:
    """Yield the item of an image. Raises InputError if it has no embedding.

    A last row or column of patches that fills no square has no embedding.
    """
    height, width = (int(size) for size in found["image_sizes"][0])
    pixels_CHW = np.asarray(found["pixel_values"])[0][:, :height, :width]
    size = _square_size(values)
    length = (height // size) * (width // size)
    if not length:
        raise InputError(
            "image",
            f"is {width} x {height} pixels after scaling, less than one embedding",
            f"send an image of at least {size} x {size} pixels",
        )
    yield Run(length=length, features=(Feature.of("pixel_values", pixels_CHW),))


def _plain_inputs(item: MediaItem, values: Values) -> tuple[dict[str, Stated], int]:
    patch, size = values["vision_config"]["patch_size"], _square_size(values)
    longest = values["vision_config"]["image_size"]
    pixels = feature_of(item, "pixel_values")
    height, width = pixels.shape[1:] if pixels is not None and len(pixels.shape) == 3 else (0, 0)
    if not (size <= height <= longest and size <= width <= longest):
        height = width = size
    height, width = (side // patch * patch for side in (height, width))
    return {"pixel_values": ("uint8", (3, height, width))}, (height // size) * (width // size)


PLAIN_ROWS = Layout(pieces=_plain_pieces, inputs=_plain_inputs)
