"""Tiny random vision-language models: their configs, by family group, and their files."""

from tests.tiny_vision.model import (
    VISION_FAMILIES,
    rename_tensors,
    write_tiny_tokenizer,
    write_tiny_vision,
)
from tests.tiny_vision.pictures import film, picture
from tests.tiny_vision.tiles import INTERNVL

__all__ = [
    "INTERNVL",
    "VISION_FAMILIES",
    "film",
    "picture",
    "rename_tensors",
    "write_tiny_tokenizer",
    "write_tiny_vision",
]
