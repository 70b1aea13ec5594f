"""Tables of the layouts of images and videos, and the check of an item's features.

Loads no torch.
"""

from qserve.multimodal.families import VisionConfig
from qserve.multimodal.layouts import (
    cuts,
    grids,
    high_resolution,
    pooled,
    rows,
    squares,
    tiles,
    views,
    whole_image,
)
from qserve.multimodal.layouts.layout import Layout, Stated
from qserve.multimodal.media import MediaItem

LAYOUTS: dict[str, Layout] = {
    "tiles": tiles.IDEFICS,
    "idefics2": tiles.IDEFICS_2,
    "intern_tiles": tiles.INTERN,
    "intern_cuts": cuts.INTERN,
    "aya_tiles": tiles.AYA,
    "square": squares.SQUARE,
    "janus": squares.JANUS,
    "framed_square": squares.FRAMED_SQUARE,
    "prompt_squares": squares.PROMPT_SQUARES,
    "grid": grids.GRID,
    "bracketed": grids.BRACKETED,
    "lines": grids.LINES,
    "rows": rows.ROWS,
    "plain_rows": rows.PLAIN_ROWS,
    "pooled": pooled.POOLED,
    "large_patches": pooled.LARGE_PATCHES,
    "lfm2": cuts.LFM_2,
    "llama4": cuts.LLAMA_4,
    "cohere2": cuts.COHERE_2,
    "minicpm": cuts.MINICPM,
    "kimi": cuts.KIMI,
    "muse": cuts.MUSE,
    "nemotron": cuts.NEMOTRON,
    "step": cuts.STEP,
    "phi4": whole_image.WHOLE_IMAGE,
    "deepseek_ocr": views.ROWS_OF_VIEWS,
    "unlimited_ocr": views.ROWS_OF_VIEWS,
    "deepseek_ocr_2": views.QUERIES_OF_VIEWS,
    "next": high_resolution.NEXT,
    "one_vision": high_resolution.ONE_VISION,
}
VIDEO_LAYOUTS: dict[str, grids.VideoLayout] = {
    "qwen2": grids.whole_clip,
    "qwen3": grids.stamped_groups,
}


def layout_of(vision: VisionConfig) -> Layout:
    """Return the layout of a model's images."""
    return LAYOUTS[vision.family.layout]


def check_features(item: MediaItem, vision: VisionConfig) -> str:
    """Return why an item's features do not fit the encoder or its embeddings; "" if they do."""
    expected, num_embeds = layout_of(vision).inputs(item, vision.values)
    found = {each.name: (each.dtype, each.shape) for each in item.features}
    if found.keys() != expected.keys():
        return f"expected the features {', '.join(expected)}, found {', '.join(found) or 'none'}"
    for name, stated in expected.items():
        if found[name] != stated:
            return f"expected {name} as {_text(stated)}, found {_text(found[name])}"
    if item.frame_step != 1.0 and vision.family.video != "qwen2":
        return f"expected frame_step 1, found {item.frame_step}"
    num_outer = int(vision.axes.counts_images) if vision.axes else 0
    if item.num_outer != num_outer:
        return f"expected num_outer {num_outer}, found {item.num_outer}"
    if item.is_mutual != vision.is_mutual:
        return f"expected is_mutual {vision.is_mutual}, found {item.is_mutual}"
    if item.num_embeds != num_embeds:
        return f"expected {num_embeds} embeddings for its features, found {item.num_embeds}"
    return ""


def _text(stated: Stated) -> str:
    return f"{stated[0]} {list(stated[1])}"
