"""Layouts: the tokens that an image or a video becomes, and which of them have embeddings.

Loads no torch.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from qserve.multimodal.families import VisionConfig
from qserve.multimodal.media import Feature, MediaItem
from qserve.multimodal.video_processor import Clip


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Tokens that one item covers."""

    length: int  # number of image tokens
    features: tuple[Feature, ...]
    grid: tuple[int, ...] = ()
    frame_step: float = 1.0  # of MediaItem
    # texts of tokens without an embedding, by their place among the tokens
    other_tokens: Mapping[int, str] = field(default_factory=dict)


Piece = str | Run  # a text around items, or an item
# of what an image processor returned for one image, and config.json
Layout = Callable[[Mapping[str, Any], Mapping[str, Any]], Iterator[Piece]]
# of the frames of one video, and config.json
VideoLayout = Callable[[Clip, Mapping[str, Any]], Iterator[Piece]]

FAKE, GLOBAL = "<fake_token_around_image>", "<global-img>"


def _tiles(found: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[Piece]:
    """Idefics3, SmolVLM: each tile is an item, rows of tiles end with a newline; the whole image
    is the last tile.
    """
    pixels_NCHW = np.asarray(found["pixel_values"])[0]
    rows, columns = int(found["rows"][0][0]), int(found["cols"][0][0])
    length, tiles = _tile_length(values), iter(pixels_NCHW)

    def run() -> Run:
        return Run(length=length, features=(Feature.of("pixel_values", next(tiles)),))

    for row in range(1, rows + 1):
        for column in range(1, columns + 1):
            yield f"{FAKE}<row_{row}_col_{column}>"
            yield run()
        yield "\n"
    yield f"\n{FAKE}{GLOBAL}" if rows else f"{FAKE}{GLOBAL}"
    yield run()
    yield FAKE


def _tile_length(values: Mapping[str, Any]) -> int:
    vision = values["vision_config"]
    side = vision["image_size"] // vision["patch_size"]
    return side**2 // values["scale_factor"] ** 2


def _square(found: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[Piece]:
    """LLaVA: every image is scaled to one square."""
    pixels_CHW = np.asarray(found["pixel_values"])[0]
    yield Run(length=_square_length(values), features=(Feature.of("pixel_values", pixels_CHW),))


def _framed_square(found: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[Piece]:
    """Gemma 3: a square between tokens of its begin and end, and empty lines."""
    yield "\n\n<start_of_image>"
    yield from _square(found, values)
    yield "<end_of_image>\n\n"


def _square_length(values: Mapping[str, Any]) -> int:
    if "mm_tokens_per_image" in values:
        return values["mm_tokens_per_image"]
    vision = values["vision_config"]
    has_class = vision["model_type"] == "clip_vision_model"
    length = (vision["image_size"] // vision["patch_size"]) ** 2 + has_class
    return length - (values["vision_feature_select_strategy"] == "default")


def _grid(found: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[Piece]:
    """Qwen: patches of an image of any size, of which a square has one embedding."""
    grid = np.asarray(found["image_grid_thw"])[0]
    merged = _merged(grid.tolist(), values)
    pixels = np.asarray(found["pixel_values"]).astype(np.uint8)  # whole numbers, as floats
    features = Feature.of("pixel_values", pixels), Feature.of("image_grid_thw", grid)
    yield Run(length=math.prod(merged), features=features, grid=merged)


def _merged(grid: Sequence[int], values: Mapping[str, Any]) -> tuple[int, int, int]:
    frames, rows, columns = grid
    size = values["vision_config"]["spatial_merge_size"]
    return frames, rows // size, columns // size


def _rows(found: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[Piece]:
    """Mistral 3: rows of an image of any size, each with a token at its end."""
    height, width = (int(size) for size in found["image_sizes"][0])
    pixels_CHW = np.asarray(found["pixel_values"])[0][:, :height, :width]
    size = _row_size(values)
    rows, columns = height // size, width // size
    ends = {row * (columns + 1) - 1: "[IMG_BREAK]" for row in range(1, rows)}
    length = rows * (columns + 1)
    yield Run(
        length=length,
        features=(Feature.of("pixel_values", pixels_CHW),),
        other_tokens={**ends, length - 1: "[IMG_END]"},
    )


def _row_size(values: Mapping[str, Any]) -> int:
    """Height and width in pixels of the square of an embedding."""
    return values["vision_config"]["patch_size"] * values["spatial_merge_size"]


LAYOUTS: dict[str, Layout] = {
    "tiles": _tiles,
    "square": _square,
    "framed_square": _framed_square,
    "grid": _grid,
    "rows": _rows,
}


def _whole_clip(clip: Clip, values: Mapping[str, Any]) -> Iterator[Piece]:
    """Qwen2.5-VL: one item, whose first axis has the time."""
    per_second = np.float32(values["vision_config"]["tokens_per_second"])
    step = float(per_second * np.float32(clip.seconds_per_group))
    yield _clip_run(np.concatenate(clip.patches_GPV), clip.grid, values, step)


def _stamped_groups(clip: Clip, values: Mapping[str, Any]) -> Iterator[Piece]:
    """Qwen3-VL, Qwen3.5: each group of frames is an item after a text with its time."""
    for seconds, patches_PV in zip(clip.seconds, clip.patches_GPV, strict=True):
        yield f"<{seconds:.1f} seconds><|vision_start|>"
        yield _clip_run(patches_PV, (1, *clip.grid[1:]), values)
        yield "<|vision_end|>"


def _clip_run(
    patches: np.ndarray, grid: tuple[int, ...], values: Mapping[str, Any], step: float = 1.0
) -> Run:
    merged = _merged(grid, values)
    features = (
        Feature.of("pixel_values", patches),
        Feature.of("image_grid_thw", np.array(grid, np.int64)),
    )
    return Run(length=math.prod(merged), features=features, grid=merged, frame_step=step)


VIDEO_LAYOUTS: dict[str, VideoLayout] = {"qwen2": _whole_clip, "qwen3": _stamped_groups}


def processor_options(layout: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of the image processor that the model's own processor sets."""
    if layout == "tiles":
        return {"return_row_col_info": True}
    if layout == "rows":
        return {"patch_size": {"height": _row_size(values), "width": _row_size(values)}}
    return {}


def check_features(item: MediaItem, vision: VisionConfig) -> str:
    """Return why an encoder would not make an item's embeddings of its features; "" if it does."""
    expected, num_embeds = INPUTS[vision.family.layout](item, vision.values)
    found = {each.name: (each.dtype, each.shape) for each in item.features}
    if found.keys() != expected.keys():
        return f"expected the features {', '.join(expected)}, found {', '.join(found) or 'none'}"
    for name, stated in expected.items():
        if found[name] != stated:
            return f"expected {name} as {_text(stated)}, found {_text(found[name])}"
    if item.frame_step != 1.0 and vision.family.video != "qwen2":
        return f"expected frame_step 1, found {item.frame_step}"
    if item.is_mutual != vision.family.is_mutual:
        return f"expected is_mutual {vision.family.is_mutual}, found {item.is_mutual}"
    if item.num_embeds != num_embeds:
        return f"expected {num_embeds} embeddings for its features, found {item.num_embeds}"
    return ""


Stated = tuple[str, tuple[int, ...]]  # dtype and shape


def _text(stated: Stated) -> str:
    return f"{stated[0]} {list(stated[1])}"


def _tile_inputs(item: MediaItem, values: Mapping[str, Any]) -> tuple[dict[str, Stated], int]:
    # Tiles are squares of the tower's size, or the number of embeddings is another one.
    size = values["vision_config"]["image_size"]
    return {"pixel_values": ("uint8", (3, size, size))}, _tile_length(values)


def _square_inputs(item: MediaItem, values: Mapping[str, Any]) -> tuple[dict[str, Stated], int]:
    size = values["vision_config"]["image_size"]
    return {"pixel_values": ("uint8", (3, size, size))}, _square_length(values)


def _grid_inputs(item: MediaItem, values: Mapping[str, Any]) -> tuple[dict[str, Stated], int]:
    vision = values["vision_config"]
    size = vision["spatial_merge_size"]
    # the frames, rows and columns of patches that the item's positions say
    grid = np.array(item.grid or (0, 0, 0)) * (1, size, size)
    stated = [each.array() for each in item.features if each.name == "image_grid_thw"]
    if not stated or not np.array_equal(stated[0], grid):
        grid = np.zeros(3, np.int64)  # no feature has this shape
    values_of_patch = (
        vision.get("in_channels", vision.get("in_chans", 3))
        * vision["temporal_patch_size"]
        * vision["patch_size"] ** 2
    )
    expected = {
        "pixel_values": ("uint8", (int(grid.prod()), values_of_patch)),
        "image_grid_thw": ("int64", (3,)),
    }
    return expected, math.prod(item.grid)


def _row_inputs(item: MediaItem, values: Mapping[str, Any]) -> tuple[dict[str, Stated], int]:
    size = _row_size(values)
    longest = values["vision_config"]["image_size"]  # the tower has no position beyond it
    shapes = [each.shape for each in item.features if each.name == "pixel_values"]
    height, width = shapes[0][1:] if shapes and len(shapes[0]) == 3 else (0, 0)
    if not (0 < height <= longest and 0 < width <= longest) or height % size or width % size:
        height = width = size
    return {"pixel_values": ("uint8", (3, height, width))}, (height // size) * (width // size)


# the features that an item must have, and the number of its embeddings
INPUTS = {
    "tiles": _tile_inputs,
    "square": _square_inputs,
    "framed_square": _square_inputs,
    "grid": _grid_inputs,
    "rows": _row_inputs,
}
