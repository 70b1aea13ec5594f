"""Layout of images whose tiles are one item (Phi-4-multimodal). Loads no torch."""

from collections.abc import Iterator, Sequence

import numpy as np

from qserve.multimodal.image_processors.kind import MAX_TILES, Cut
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

GRID = "image_grid"  # rows and columns of tiles; useful rows and columns of patches


def _pieces(cut: Cut, values: Values) -> Iterator[Piece]:
    grid = (*cut.grid, *cut.useful)
    yield Run(
        length=_length(grid, values),
        features=(
            Feature.of("pixel_values", np.stack(cut.tiles_CHW)),
            Feature.of(GRID, np.array(grid, np.int64)),
        ),
    )


def _patches(values: Values) -> int:
    """Return the number of patches at a tile's side."""
    vision = values["vision_config"]
    return side_of(vision, "image_size") // side_of(vision, "patch_size")


def _length(grid: Sequence[int], values: Values) -> int:
    """Return the number of embeddings: 2 x 2 patches have one, and each row has one more.

    Another one separates the overview from the tiles.
    """
    patches, (high, wide) = _patches(values), grid[2:]
    side = -(-patches // 2)

    def pooled(count: int) -> int:
        tiles, rest = divmod(count, patches)
        return tiles * side + -(-rest // 2)

    return side * (side + 1) + 1 + pooled(high) * (pooled(wide) + 1)


def _inputs(item: MediaItem, values: Values) -> tuple[dict[str, Stated], int]:
    found = feature_of(item, GRID)
    grid = [1, 1, 1, 1]
    if found is not None and (found.dtype, found.shape) == ("int64", (4,)):
        grid = found.array().tolist()
    rows, columns, high, wide = grid
    patches, size = _patches(values), side_of(values["vision_config"], "image_size")
    is_valid = min(grid) > 0 and rows * columns <= MAX_TILES
    if not (is_valid and high <= rows * patches and wide <= columns * patches):
        rows = columns = 0  # no features fit
        grid = [1, 1, 1, 1]
    stated: dict[str, Stated] = {
        "pixel_values": ("uint8", (rows * columns, 3, size, size)),
        GRID: ("int64", (4,)),
    }
    return stated, _length(grid, values)


WHOLE_IMAGE = Layout(pieces=_pieces, inputs=_inputs)
