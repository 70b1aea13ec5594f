"""Layouts of Gemma 4: images of any size in patches. Loads no torch.

Its tower pools embeddings of squares of patches. Gemma 4 12B has no tower: a patch of the square's
size becomes an embedding.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from qserve.multimodal.image_processors.gemma4_unified import patches_of
from qserve.multimodal.image_processors.kind import Cut
from qserve.multimodal.layouts.layout import Layout, Piece, Run, Stated, Values, feature_of
from qserve.multimodal.media import Feature, MediaItem

CHANNELS = 3


def _pieces(found: Mapping[str, Any], values: Values) -> Iterator[Piece]:
    """Yield the item of an image, between the start and end tokens of images (Gemma 4)."""
    length = int(found["num_soft_tokens_per_image"][0])
    num_patches = length * values["vision_config"]["pooling_kernel_size"] ** 2
    patches = np.asarray(found["pixel_values"][0])[:num_patches]
    columns, rows = 1 + np.asarray(found["image_position_ids"][0])[:num_patches].max(0)
    # channels first, as other features have them
    pixels = patches.reshape(num_patches, -1, CHANNELS).transpose(2, 0, 1)
    features = (
        Feature.of("pixel_values", pixels.astype(np.uint8)),
        Feature.of("image_grid", np.array([rows, columns], np.int64)),
    )
    yield values["boi_token_id"]
    yield Run(length=length, features=features)
    yield values["eoi_token_id"]


def _inputs(item: MediaItem, values: Values) -> tuple[dict[str, Stated], int]:
    vision = values["vision_config"]
    size, most = vision["pooling_kernel_size"], vision["position_embedding_size"]
    stated, rows, columns = feature_of(item, "image_grid"), 0, 0
    if stated is not None and (stated.dtype, stated.shape) == ("int64", (2,)):
        rows, columns = stated.array().tolist()
    if not (0 < rows <= most and 0 < columns <= most) or rows % size or columns % size:
        rows = columns = 0  # a shape that no feature has: the check fails
    expected = {
        "pixel_values": ("uint8", (CHANNELS, rows * columns, vision["patch_size"] ** 2)),
        "image_grid": ("int64", (2,)),
    }
    return expected, rows * columns // size**2


POOLED = Layout(pieces=_pieces, inputs=_inputs)


def _large_pieces(cut: Cut, values: Values) -> Iterator[Piece]:
    """Yield the item of an image, between the start and end tokens of images (Gemma 4 12B)."""
    (tile_CHW,), size = cut.tiles_CHW, _large_size(values)
    _, height, width = tile_CHW.shape
    features = (
        Feature.of("pixel_values", patches_of(tile_CHW, size)),
        Feature.of("image_grid", np.array([height // size, width // size], np.int64)),
    )
    yield values["boi_token_id"]
    yield Run(length=(height // size) * (width // size), features=features)
    yield values["eoi_token_id"]


def _large_size(values: Values) -> int:
    """Return the side in pixels of a patch."""
    return values["vision_config"]["patch_size"] * values["vision_config"]["pooling_kernel_size"]


def _large_inputs(item: MediaItem, values: Values) -> tuple[dict[str, Stated], int]:
    most = values["vision_config"]["mm_posemb_size"]
    stated, rows, columns = feature_of(item, "image_grid"), 0, 0
    if stated is not None and (stated.dtype, stated.shape) == ("int64", (2,)):
        rows, columns = stated.array().tolist()
    if not (0 < rows <= most and 0 < columns <= most):
        rows = columns = 0  # a shape that no feature has: the check fails
    expected = {
        "pixel_values": ("uint8", (CHANNELS, rows * columns, _large_size(values) ** 2)),
        "image_grid": ("int64", (2,)),
    }
    return expected, rows * columns


LARGE_PATCHES = Layout(pieces=_large_pieces, inputs=_large_inputs)
