"""Layouts of images that are cut into tiles, one item each. Loads no torch."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from qserve.multimodal.layouts.layout import (
    Layout,
    Piece,
    Run,
    Stated,
    Values,
    feature_of,
    side_of,
)
from qserve.multimodal.media import Feature, MediaItem

FAKE, GLOBAL = "<fake_token_around_image>", "<global-img>"


def _idefics_pieces(found: Mapping[str, Any], values: Values) -> Iterator[Piece]:
    """Yield the tiles, with a newline after each row. The last tile is the whole image."""
    pixels_NCHW = np.asarray(found["pixel_values"])[0]
    rows, columns = int(found["rows"][0][0]), int(found["cols"][0][0])
    length, tiles = _idefics_length(values), iter(pixels_NCHW)

    def run() -> Run:
        return _tile(next(tiles), length)

    for row in range(1, rows + 1):
        for column in range(1, columns + 1):
            yield f"{FAKE}<row_{row}_col_{column}>"
            yield run()
        yield "\n"
    yield f"\n{FAKE}{GLOBAL}" if rows else f"{FAKE}{GLOBAL}"
    yield run()
    yield FAKE


def _tile(pixels_CHW: np.ndarray, length: int) -> Run:
    return Run(length=length, features=(Feature.of("pixel_values", pixels_CHW),))


def _idefics_length(values: Values) -> int:
    vision = values["vision_config"]
    side = vision["image_size"] // vision["patch_size"]
    return side**2 // values["scale_factor"] ** 2


def _idefics_inputs(item: MediaItem, values: Values) -> tuple[dict[str, Stated], int]:
    # Only squares of the tower's size have this number of embeddings.
    return _tile_inputs(values), _idefics_length(values)


def _tile_inputs(values: Values) -> dict[str, Stated]:
    size = side_of(values["vision_config"], "image_size")
    return {"pixel_values": ("uint8", (3, size, size))}


IDEFICS = Layout(
    pieces=_idefics_pieces,
    inputs=_idefics_inputs,
    options=lambda values: {"return_row_col_info": True},
    takes_samples=True,
)


def _idefics_2_pieces(found: Mapping[str, Any], values: Values) -> Iterator[Piece]:
    """Yield four quarters and the whole image, or the image alone, all between the same tokens.

    The processor pads them at the right and at the bottom to one size, which is undone here.
    """
    length = values["perceiver_config"]["resampler_n_latents"]
    yield FAKE
    for pixels_CHW, mask_HW in zip(
        np.asarray(found["pixel_values"])[0].astype(np.uint8),
        np.asarray(found["pixel_attention_mask"])[0],
        strict=True,
    ):
        yield _tile(pixels_CHW[:, : mask_HW[:, 0].sum(), : mask_HW[0].sum()], length)
        yield FAKE


def _idefics_2_inputs(item: MediaItem, values: Values) -> tuple[dict[str, Stated], int]:
    """Return the feature of a tile, whose sides are at most those that have positions."""
    vision = values["vision_config"]
    least, most = side_of(vision, "patch_size"), side_of(vision, "image_size")
    pixels = feature_of(item, "pixel_values")
    height, width = pixels.shape[1:] if pixels is not None and len(pixels.shape) == 3 else (0, 0)
    if not (least <= height <= most and least <= width <= most):
        height = width = most
    length = values["perceiver_config"]["resampler_n_latents"]
    return {"pixel_values": ("uint8", (3, height, width))}, length


IDEFICS_2 = Layout(
    pieces=_idefics_2_pieces,
    inputs=_idefics_2_inputs,
    options=lambda values: {"do_pad": True},
    takes_samples=True,
    shared_token=FAKE,
)


def _intern_pieces(found: Mapping[str, Any], values: Values) -> Iterator[Piece]:
    """Yield the tiles, with nothing between them. The last tile is the whole image."""
    yield "<img>"
    for pixels_CHW in np.asarray(found["pixel_values"]):
        yield _tile(pixels_CHW, _intern_length(values))
    yield "</img>"


def _aya_pieces(found: Mapping[str, Any], values: Values) -> Iterator[Piece]:
    """Yield the tiles, each after a token with its number. The last tile is the whole image."""
    *tiles, whole = np.asarray(found["pixel_values"])
    yield "<|START_OF_IMG|>"
    for number, pixels_CHW in enumerate(tiles, 1):
        yield f"TILE_{number}"
        yield _tile(pixels_CHW, _aya_length(values))
    yield "TILE_GLOBAL"
    yield _tile(whole, _aya_length(values))
    yield "<|END_OF_IMG|>"


def _aya_length(values: Values) -> int:
    vision = values["vision_config"]
    return (vision["image_size"] // (vision["patch_size"] * values["downsample_factor"])) ** 2


def _aya_inputs(item: MediaItem, values: Values) -> tuple[dict[str, Stated], int]:
    return _tile_inputs(values), _aya_length(values)


AYA = Layout(
    pieces=_aya_pieces,
    inputs=_aya_inputs,
    options=lambda values: {"crop_to_patches": True},
)


def _intern_length(values: Values) -> int:
    vision = values["vision_config"]
    side = side_of(vision, "image_size") // side_of(vision, "patch_size")
    return int(side * values["downsample_ratio"]) ** 2


def _intern_inputs(item: MediaItem, values: Values) -> tuple[dict[str, Stated], int]:
    return _tile_inputs(values), _intern_length(values)


INTERN = Layout(
    pieces=_intern_pieces,
    inputs=_intern_inputs,
    options=lambda values: {"crop_to_patches": True},
)
