"""Layouts of images whose tiles and padded overview are one item (DeepSeek-OCR). Loads no torch."""

import math
from collections.abc import Callable, Iterator

import numpy as np

from qserve.multimodal.image_processors.kind import MAX_SIDE, MAX_TILES, Cut
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

WHOLE, TILES, GRID = "pixel_values", "pixel_values_local", "image_grid"
SHRINK = 4  # patches at a side of a square, for each output of SAM's last layers
# numbers of queries, the first one for tiles and the second one for the overview (DeepSeek-OCR-2)
FEW_QUERIES, MANY_QUERIES = 144, 256
# sides of overview and tiles, rows and columns of tiles, values of config.json -> embeddings
Count = Callable[[int, int, int, int, Values], int]


def _outputs(side: int, values: Values) -> int:
    """Return how many outputs SAM has for a side in pixels."""
    patch = side_of(values["vision_config"]["sam_config"], "patch_size")
    return math.ceil(side // patch / SHRINK)


def _count_rows(whole: int, tile: int, rows: int, columns: int, values: Values) -> int:
    """Count an embedding for each output, one at the end of each row, and one after the image."""
    large, small = _outputs(whole, values), _outputs(tile, values)
    return rows * small * (columns * small + 1) + large * (large + 1) + 1


def _count_queries(whole: int, tile: int, rows: int, columns: int, values: Values) -> int:
    """Count the queries of overview and tiles, and one embedding after the image."""

    def queries(side: int) -> int:
        return FEW_QUERIES if _outputs(side, values) ** 2 <= FEW_QUERIES else MANY_QUERIES

    return rows * columns * queries(tile) + queries(whole) + 1


def _layout(count: Count) -> Layout:
    def pieces(cut: Cut, values: Values) -> Iterator[Piece]:
        *tiles, whole_CHW = cut.tiles_CHW
        side, tile_side = whole_CHW.shape[-1], tiles[0].shape[-1] if tiles else 1
        empty = np.zeros((0, 3, tile_side, tile_side), np.uint8)
        yield Run(
            length=count(side, tile_side, *cut.grid, values),
            features=(
                Feature.of(WHOLE, whole_CHW),
                Feature.of(TILES, np.stack(tiles) if tiles else empty),
                Feature.of(GRID, np.array(cut.grid, np.int64)),
            ),
        )

    def inputs(item: MediaItem, values: Values) -> tuple[dict[str, Stated], int]:
        whole, tiles, grid = (feature_of(item, name) for name in (WHOLE, TILES, GRID))
        side = whole.shape[-1] if whole and whole.shape else 0
        tile_side = tiles.shape[-1] if tiles and tiles.shape else 0
        rows = columns = 0
        if grid and (grid.dtype, grid.shape) == ("int64", (2,)):
            rows, columns = grid.array().tolist()
        if not (0 < side <= MAX_SIDE and 0 < tile_side <= MAX_SIDE):
            side = tile_side = 1
        if not (0 <= rows <= MAX_TILES and 0 <= columns <= MAX_TILES) or not rows == columns == 0:
            rows, columns = max(rows, 1), max(columns, 1)
        rows, columns = min(rows, MAX_TILES), min(columns, MAX_TILES)
        stated: dict[str, Stated] = {
            WHOLE: ("uint8", (3, side, side)),
            TILES: ("uint8", (rows * columns, 3, tile_side, tile_side)),
            GRID: ("int64", (2,)),
        }
        return stated, count(side, tile_side, rows, columns, values)

    return Layout(pieces=pieces, inputs=inputs)


ROWS_OF_VIEWS = _layout(_count_rows)
QUERIES_OF_VIEWS = _layout(_count_queries)
