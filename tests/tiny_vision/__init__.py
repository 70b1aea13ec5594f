"""Tiny random vision-language models: their configs, by family group, and their files."""

from tests.tiny_vision.model import (
    ALL_FAMILIES,
    VISION_FAMILIES,
    loaded,
    rename_tensors,
    write_tiny_tokenizer,
    write_tiny_vision,
)
from tests.tiny_vision.pictures import film, picture
from tests.tiny_vision.tiles import INTERNVL

__all__ = [
    "ALL_FAMILIES",
    "INTERNVL",
    "VISION_FAMILIES",
    "film",
    "loaded",
    "picture",
    "rename_tensors",
    "write_tiny_tokenizer",
    "write_tiny_vision",
]
