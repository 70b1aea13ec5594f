"""Layouts of images of any size, or of videos, that are cut into patches. Loads no torch.

Each square of patches has one embedding.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from qserve.multimodal.layouts.layout import Layout, Piece, Run, Stated, Values, feature_of
from qserve.multimodal.media import Feature, MediaItem
from qserve.multimodal.video_processor import Clip

# the frames of one video, values of config.json -> the video's pieces
VideoLayout = Callable[[Clip, Values], Iterator[Piece]]


def _pieces(found: Mapping[str, Any], values: Values) -> Iterator[Piece]:
    """Yield the item of an image. In Qwen and GLM the chat template writes the tokens around it."""
    grid = np.asarray(found["image_grid_thw"])[0]
    merged = _merged(grid.tolist(), values)
    pixels = np.asarray(found["pixel_values"]).astype(np.uint8)  # whole numbers, as floats
    pixels = pixels.reshape(len(pixels), -1)
    features = Feature.of("pixel_values", pixels), Feature.of("image_grid_thw", grid)
    yield Run(length=math.prod(merged), features=features, grid=merged)


def _merged(grid: Sequence[int], values: Values) -> tuple[int, int, int]:
    frames, rows, columns = grid
    size = _merge_size(values)
    return frames, rows // size, columns // size


def _merge_size(values: Values) -> int:
    """Return the side, in patches, of the square that becomes one embedding.

    VideoLLaMA 3 states none: each patch of an image is one.
    """
    return values["vision_config"].get("spatial_merge_size", 1)


def _inputs(item: MediaItem, values: Values) -> tuple[dict[str, Stated], int]:
    vision, size = values["vision_config"], _merge_size(values)
    # numbers of frames, rows and columns of patches, according to the item's positions
    grid = np.array(item.grid or (0, 0, 0)) * (1, size, size)
    stated = feature_of(item, "image_grid_thw")
    if stated is None or not np.array_equal(stated.array(), grid):
        grid = np.zeros(3, np.int64)  # a shape that no feature has: the check fails
    values_of_patch = (
        vision.get("in_channels", vision.get("in_chans", vision.get("num_channels", 3)))
        * vision.get("temporal_patch_size", 1)
        * vision["patch_size"] ** 2
    )
    expected = {
        "pixel_values": ("uint8", (int(grid.prod()), values_of_patch)),
        "image_grid_thw": ("int64", (3,)),
    }
    return expected, math.prod(item.grid)


GRID = Layout(pieces=_pieces, inputs=_inputs)


def _bracketed_pieces(found: Mapping[str, Any], values: Values) -> Iterator[Piece]:
    """Yield the item of an image, and the tokens around it (MiniMax-M3)."""
    yield "]<]start of image[>["
    yield from _pieces(found, values)
    yield "]<]end of image[>["


BRACKETED = Layout(pieces=_bracketed_pieces, inputs=_inputs)


def _line_pieces(found: Mapping[str, Any], values: Values) -> Iterator[Piece]:
    """Yield the item of an image, whose rows end with an embedding (Hunyuan).

    One embedding precedes the rows, and one follows them.
    """
    (run,) = _pieces(found, values)
    assert isinstance(run, Run)
    frames, rows, columns = run.grid
    grid = frames, rows, columns + 1
    yield replace(run, length=math.prod(grid) + 2, grid=grid, num_outer=1)


def _line_inputs(item: MediaItem, values: Values) -> tuple[dict[str, Stated], int]:
    frames, rows, columns = item.grid or (0, 0, 0)
    plain = replace(item, grid=(), num_outer=0)
    if columns > 1:
        inner = frames, rows, columns - 1
        plain = replace(plain, length=math.prod(inner), is_embed=b"", grid=inner)
    return _inputs(plain, values)[0], math.prod(item.grid) + 2


LINES = Layout(pieces=_line_pieces, inputs=_line_inputs)


def whole_clip(clip: Clip, values: Values) -> Iterator[Piece]:
    """Yield the one item of a video, whose first axis is the time (Qwen2-VL, Qwen2.5-VL).

    Qwen2.5-VL measures this time in seconds. Qwen2-VL counts the groups of frames.
    """
    per_second, step = values["vision_config"].get("tokens_per_second"), 1.0
    if per_second is not None:
        step = float(np.float32(per_second) * np.float32(clip.seconds_per_group))
    yield _clip_run(np.concatenate(clip.patches_GPV), clip.grid, values, step)


def stamped_groups(clip: Clip, values: Values) -> Iterator[Piece]:
    """Yield an item for each group of frames, after a text with its time (Qwen3-VL, Qwen3.5)."""
    for seconds, patches_PV in zip(clip.seconds, clip.patches_GPV, strict=True):
        yield f"<{seconds:.1f} seconds><|vision_start|>"
        yield _clip_run(patches_PV, (1, *clip.grid[1:]), values)
        yield "<|vision_end|>"


def _clip_run(patches: np.ndarray, grid: tuple[int, ...], values: Values, step: float = 1.0) -> Run:
    merged = _merged(grid, values)
    features = (
        Feature.of("pixel_values", patches),
        Feature.of("image_grid_thw", np.array(grid, np.int64)),
    )
    return Run(length=math.prod(merged), features=features, grid=merged, frame_step=step)
