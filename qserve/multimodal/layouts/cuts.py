"""Layouts of images that are cut into tiles, one item each. Loads no torch.

The tokens between tiles say where a tile is. Tiles of some families have several sizes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from qserve.multimodal.image_processors.kind import Cut
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

MAX_SIDE = 2**20  # limit of a tile's height and width in pixels
# values of config.json -> side in pixels of the square that becomes one embedding
Unit = Callable[[Values], int]


def _run(tile_CHW: np.ndarray, unit: int) -> Run:
    _, height, width = tile_CHW.shape
    features = (Feature.of("pixel_values", tile_CHW),)
    return Run(length=(height // unit) * (width // unit), features=features)


def _layout(
    pieces: Callable[[Any, Callable[[np.ndarray], Run]], Iterator[Piece]],
    unit_of: Unit,
    *,
    is_square: bool,
    dtype: str = "uint8",
) -> Layout:
    """Return a layout.

    `is_square`: all tiles have the size of the vision tower's square. `dtype`: of the pixels.
    """

    def inputs(item: MediaItem, values: Values) -> tuple[dict[str, Stated], int]:
        unit, pixels = unit_of(values), feature_of(item, "pixel_values")
        height, width = pixels.shape[1:] if pixels and len(pixels.shape) == 3 else (0, 0)
        if is_square:
            height = width = side_of(values["vision_config"], "image_size")
        elif not (0 < height < MAX_SIDE and 0 < width < MAX_SIDE) or height % unit or width % unit:
            height = width = unit
        return {"pixel_values": (dtype, (3, height, width))}, (height // unit) * (width // unit)

    return Layout(
        pieces=lambda cut, values: pieces(cut, lambda tile: _run(tile, unit_of(values))),
        inputs=inputs,
    )


def _lfm2_pieces(cut: Cut, run: Callable[[np.ndarray], Run]) -> Iterator[Piece]:
    """Yield the tiles, each after a token with its place. A lone tile has none."""
    rows, columns = cut.grid
    yield "<|image_start|>"
    for number, tile_CHW in enumerate(cut.tiles_CHW):
        if number < rows * columns and rows * columns > 1:
            yield f"<|img_row_{number // columns + 1}_col_{number % columns + 1}|>"
        elif rows * columns > 1:
            yield "<|img_thumbnail|>"
        yield run(tile_CHW)
    yield "<|image_end|>"


def _downsampled_unit(values: Values) -> int:
    return values["vision_config"]["patch_size"] * values["downsample_factor"]


def _llama4_pieces(cut: Cut, run: Callable[[np.ndarray], Run]) -> Iterator[Piece]:
    """Yield the tiles with separators, and the whole image after a token."""
    *tiles, whole = cut.tiles_CHW
    yield "<|image_start|>"
    for number, tile_CHW in enumerate(tiles, 1):
        yield run(tile_CHW)
        is_last = number % cut.grid[1] == 0
        yield "<|tile_y_separator|>" if is_last else "<|tile_x_separator|>"
    yield "<|image|>"
    yield run(whole)
    yield "<|image_end|>"


def _llama4_unit(values: Values) -> int:
    vision = values["vision_config"]
    return round(vision["patch_size"] / vision["pixel_shuffle_ratio"])


def _cohere2_pieces(cut: Cut, run: Callable[[np.ndarray], Run]) -> Iterator[Piece]:
    """Yield the tiles, each before a token that ends it. The last one is the whole image."""
    yield "<|START_OF_IMG|>"
    for tile_CHW in cut.tiles_CHW:
        yield run(tile_CHW)
        yield "<|IMG_LINE_BREAK|>"
    yield "<|END_OF_IMG|>"


def _kimi_pieces(cut: Cut, run: Callable[[np.ndarray], Run]) -> Iterator[Piece]:
    """Yield the one item. The chat template writes the tokens around it."""
    (whole,) = cut.tiles_CHW
    yield run(whole)


def _kimi_unit(values: Values) -> int:
    vision = values["vision_config"]
    return vision["patch_size"] * side_of(vision, "merge_kernel_size")


def _muse_pieces(cut: Cut, run: Callable[[np.ndarray], Run]) -> Iterator[Piece]:
    """Yield the one item, between the start and end tokens of images."""
    (whole,) = cut.tiles_CHW
    yield "<|image_start|>"
    yield run(whole)
    yield "<|image_end|>"


def _muse_unit(values: Values) -> int:
    return values["vision_config"]["patch_size"] * values["vision_config"]["merge_size"]


def _step_pieces(cut: Cut, run: Callable[[np.ndarray], Run]) -> Iterator[Piece]:
    """Yield the tiles, row by row, and the whole image, each between its tokens."""
    *tiles, whole = cut.tiles_CHW
    rows, columns = cut.grid
    for number, tile_CHW in enumerate(tiles):
        yield "<patch_start>"
        yield run(tile_CHW)
        yield "<patch_end>"
        row, column = divmod(number, columns)
        yield "<patch_newline>" if column == columns - 1 and row < rows - 1 else ""
    yield "<im_start>"
    yield run(whole)
    yield "<im_end>"


def _step_unit(values: Values) -> int:
    return values["vision_config"]["patch_size"] * 4  # two convolutions halve each side


def _nemotron_pieces(cut: Cut, run: Callable[[np.ndarray], Run]) -> Iterator[Piece]:
    """Yield the one item, between the start and end tokens of images."""
    (whole,) = cut.tiles_CHW
    yield "<img>"
    yield run(whole)
    yield "</img>"


def _nemotron_unit(values: Values) -> int:
    return round(values["vision_config"]["patch_size"] / values["downsample_ratio"])


def _intern_pieces(cut: Cut, run: Callable[[np.ndarray], Run]) -> Iterator[Piece]:
    """Yield the tiles, with nothing between them. The last one may be the whole image."""
    yield "<img>"
    for tile_CHW in cut.tiles_CHW:
        yield run(tile_CHW)
    yield "</img>"


def _intern_unit(values: Values) -> int:
    return round(side_of(values["vision_config"], "patch_size") / values["downsample_ratio"])


def _minicpm_pieces(found: Mapping[str, Any], run: Callable[[np.ndarray], Run]) -> Iterator[Piece]:
    """Yield the whole image and its slices, each between tokens; rows are on lines."""
    ((_, columns),) = found["grids"]
    for number, tile_CHW in enumerate(_unpacked(found)):
        slices = number - 1  # slices before this tile
        yield "\n" if slices > 0 and slices % columns == 0 else ""
        yield "<slice>" if number else "<image>"
        yield run(tile_CHW)
        yield "</slice>" if number else "</image>"


def _unpacked(found: Mapping[str, Any]) -> Iterator[np.ndarray]:
    """Yield the tiles [C, H, W], whose patches transformers' processor puts side by side."""
    packed_CHW = np.asarray(found["pixel_values"])[0].astype(np.uint8)  # whole numbers, as floats
    channels, size, _ = packed_CHW.shape
    start = 0
    for rows, columns in np.asarray(found["target_sizes"]).tolist():
        stop = start + rows * columns * size
        patches = packed_CHW[..., start:stop].reshape(channels, size, rows, columns, size)
        tile = patches.transpose(0, 2, 1, 3, 4).reshape(channels, rows * size, columns * size)
        yield np.ascontiguousarray(tile)
        start = stop


def _minicpm_unit(values: Values) -> int:
    vision = values["vision_config"]
    merged = side_of(values, "merge_kernel_size") ** values["merger_times"]
    before = 1 if values["downsample_mode"] == "4x" else side_of(vision, "window_kernel_size")
    return vision["patch_size"] * merged * before


LFM_2 = _layout(_lfm2_pieces, _downsampled_unit, is_square=False)
LLAMA_4 = _layout(_llama4_pieces, _llama4_unit, is_square=True)
COHERE_2 = _layout(_cohere2_pieces, _downsampled_unit, is_square=True)
INTERN = _layout(_intern_pieces, _intern_unit, is_square=True)
KIMI = _layout(_kimi_pieces, _kimi_unit, is_square=False)
MUSE = _layout(_muse_pieces, _muse_unit, is_square=False)
NEMOTRON = _layout(_nemotron_pieces, _nemotron_unit, is_square=False, dtype="float32")
STEP = _layout(_step_pieces, _step_unit, is_square=False)
MINICPM = replace(
    _layout(_minicpm_pieces, _minicpm_unit, is_square=False),
    number_text="<image_id>{}</image_id>",
    options=lambda values: {"downsample_mode": values["downsample_mode"]},
)
