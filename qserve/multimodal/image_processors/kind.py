"""Kind: the options and functions of one image processor, and what it makes of an image.

Suffixes of array names: T tiles of an image, H height, W width, C channels.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from formats.architecture.sizes import is_size
from formats.errors import CheckpointError
from qserve.multimodal.image_processors.scaling import mode_of
from qserve.multimodal.image_processors.stated_options import COPY_OPTIONS

Options = Mapping[str, Any]
MAX_SIDE = 4096  # limit of the side in pixels of a patch, a tile or an embedding's square
MAX_TILES = 256  # limit of the tiles of one image; published models have at most 16
MAX_TOKENS = 2**20  # limit of the patches or embeddings of one image


class Cut(NamedTuple):
    """The tiles of one image."""

    tiles_CHW: tuple[np.ndarray, ...]  # uint8; several sizes are possible
    grid: tuple[int, int]  # numbers of rows and columns of tiles, without the overview
    has_overview: bool  # True: the last tile is the whole image
    # numbers of rows and columns of patches that are no padding, in all tiles; (0, 0): not counted
    useful: tuple[int, int] = (0, 0)


def _no_renaming(options: dict[str, Any]) -> dict[str, Any]:
    return options


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Describes one image processor of transformers."""

    defaults: Options
    sizes: Mapping[str, int]  # options that are positive whole numbers -> their largest values
    check: Callable[[Options], None]  # raises CheckpointError for other wrong options
    # pixels [H, W, C] of an image, options -> its tiles
    cut: Callable[[np.ndarray, Options], Cut]
    # normalized tiles [C, H, W] of each image, its tiles, options -> arguments of the model
    arguments: Callable[[Sequence[Sequence[np.ndarray]], Sequence[Cut], Options], dict[str, Any]]
    # options as files state them -> options with the names in `defaults`
    renamed: Callable[[dict[str, Any]], dict[str, Any]] = field(default=_no_renaming)
    # values of config.json -> options; None: the options are in a file of the image processor
    from_config: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    needs_options: bool = True  # False: a folder may have no file of the image processor
    rounds_to: str = ""  # dtype to which each step of the normalization rounds; "": float32


def is_number(value: Any, above: float = -math.inf) -> bool:
    """Return True for a finite number above a limit."""
    return type(value) in (int, float) and above < value < math.inf


def side_of(options: Options, key: str = "size") -> int:
    """Return the side of a square, an option with height and width. Raises CheckpointError."""
    return equal_sides(options[key], ("height", "width"), f"{key} of the image processor")


def equal_sides(stated: Any, keys: tuple[str, str], name: str) -> int:
    """Return the value of two keys that must be equal. Raises CheckpointError with `name`."""
    first, second = (stated.get(key) if isinstance(stated, dict) else None for key in keys)
    if not is_size(first) or first != second or first > MAX_SIDE:
        raise CheckpointError(
            name,
            f"expected {keys[0]} and an equal {keys[1]} up to {MAX_SIDE}, found {stated!r:.100}",
            COPY_OPTIONS,
        )
    return first


def check_square(options: Options) -> None:
    """Raise CheckpointError unless tiles are squares and the filter is known."""
    side_of(options)
    mode_of(options["resample"])


def channels_first(pixels_HWC: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(pixels_HWC.transpose(2, 0, 1))


def split(pixels_HWC: np.ndarray, rows: int, columns: int) -> tuple[np.ndarray, ...]:
    """Split an image into tiles [C, H, W], row by row."""
    height, width = pixels_HWC.shape[0] // rows, pixels_HWC.shape[1] // columns
    return tuple(
        channels_first(
            pixels_HWC[row * height : (row + 1) * height, column * width : (column + 1) * width]
        )
        for row in range(rows)
        for column in range(columns)
    )
