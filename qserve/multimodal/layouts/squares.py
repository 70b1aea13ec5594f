"""Layouts of images that are scaled to one square. Loads no torch."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from qserve.multimodal.layouts.layout import Layout, Piece, Run, Stated, Values, feature_of
from qserve.multimodal.media import Feature, MediaItem


def _pieces(found: Mapping[str, Any], values: Values) -> Iterator[Piece]:
    """Yield the square, with nothing around it (LLaVA)."""
    pixels_CHW = np.asarray(found["pixel_values"])[0]
    yield Run(length=square_length(values), features=(Feature.of("pixel_values", pixels_CHW),))


def _framed_pieces(found: Mapping[str, Any], values: Values) -> Iterator[Piece]:
    """Yield the square, between the start and end tokens of images and empty lines (Gemma 3)."""
    yield "\n\n<start_of_image>"
    yield from _pieces(found, values)
    yield "<end_of_image>\n\n"


def _janus_pieces(found: Mapping[str, Any], values: Values) -> Iterator[Piece]:
    """Yield the square, between the start and end tokens of images."""
    yield "<begin_of_image>"
    yield from _pieces(found, values)
    yield "<end_of_image>"


def square_length(values: Values) -> int:
    """Return the number of embeddings of a square."""
    if "mm_tokens_per_image" in values:
        return values["mm_tokens_per_image"]
    vision = values["vision_config"]
    if vision["model_type"] == "got_ocr2_vision":  # two convolutions halve each side
        return (vision["image_size"] // vision["patch_size"] // 4) ** 2
    has_class = vision["model_type"] == "clip_vision_model"
    length = (vision["image_size"] // vision["patch_size"]) ** 2 + has_class
    # ViP-LLaVA states no strategy, and drops the class
    strategy = values.get("vision_feature_select_strategy", "default" if has_class else "full")
    return length - (strategy == "default")


def _inputs(item: MediaItem, values: Values) -> tuple[dict[str, Stated], int]:
    size = values["vision_config"]["image_size"]
    return {"pixel_values": ("uint8", (3, size, size))}, square_length(values)


def _prompt_inputs(item: MediaItem, values: Values) -> tuple[dict[str, Stated], int]:
    """Return the features of a whole prompt: those of all its images, stacked."""
    pixels, size = feature_of(item, "pixel_values"), values["vision_config"]["image_size"]
    count = pixels.shape[0] if pixels is not None and len(pixels.shape) == 4 else 1
    stated = {"pixel_values": ("uint8", (count, 3, size, size))}
    return stated, count * square_length(values)


SQUARE = Layout(pieces=_pieces, inputs=_inputs)
JANUS = Layout(pieces=_janus_pieces, inputs=_inputs)
FRAMED_SQUARE = Layout(pieces=_framed_pieces, inputs=_inputs)
PROMPT_SQUARES = Layout(pieces=_pieces, inputs=_prompt_inputs)
