"""Kind: the options and functions of one image processor, and what it makes of an image.

Suffixes of array names: T tiles of an image, H height, W width, C channels.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from formats.architecture.sizes import is_size
from formats.errors import CheckpointError

Options = Mapping[str, Any]


class Cut(NamedTuple):
    """The tiles of one image."""

    tiles_CHW: tuple[np.ndarray, ...]  # uint8; several sizes are possible
    grid: tuple[int, int]  # numbers of rows and columns of tiles, without the overview
    has_overview: bool  # True: the last tile is the whole image


def _no_renaming(options: dict[str, Any]) -> dict[str, Any]:
    return options


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Describes one image processor of transformers."""

    defaults: Options
    sizes: tuple[str, ...]  # options that are positive whole numbers
    # pixels [H, W, C] of an image, options -> its tiles
    cut: Callable[[np.ndarray, Options], Cut]
    # normalized tiles [C, H, W] of each image, its tiles, options -> arguments of the model
    arguments: Callable[[Sequence[Sequence[np.ndarray]], Sequence[Cut], Options], dict[str, Any]]
    # options as files state them -> options with the names in `defaults`
    renamed: Callable[[dict[str, Any]], dict[str, Any]] = field(default=_no_renaming)
    # values of config.json -> options; None: the options are in a file of the image processor
    from_config: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    rounds_to: str = ""  # dtype to which each step of the normalization rounds; "": float32


def side_of(options: Options, key: str = "size") -> int:
    """Return the side of a square, an option with height and width. Raises CheckpointError."""
    found = options[key]
    height, width = (found.get(each) for each in ("height", "width"))
    if not is_size(height) or height != width:
        raise CheckpointError(
            f"{key} of the image processor",
            f"expected a height and an equal width, found {found!r:.100}",
            "copy preprocessor_config.json from the original model",
        )
    return height


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
