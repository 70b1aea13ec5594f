"""Layout: how an image of one kind of model becomes tokens and features. Loads no torch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from formats.errors import InputError
from qserve.multimodal.media import Feature, MediaItem


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Tokens that one item covers."""

    length: int  # number of image tokens
    features: tuple[Feature, ...]
    grid: tuple[int, ...] = ()
    frame_step: float = 1.0  # of MediaItem
    # texts of tokens without an embedding, by their place among the tokens
    other_tokens: Mapping[int, str] = field(default_factory=dict)


Piece = str | int | Run  # a text or a token around items, or an item
Values = Mapping[str, Any]  # of config.json, with transformers' defaults
Stated = tuple[str, tuple[int, ...]]  # dtype and shape


def _no_options(values: Values) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How an image becomes tokens and features."""

    # of what an image processor returned for one image, and config.json
    pieces: Callable[[Mapping[str, Any], Values], Iterator[Piece]]
    # the features that an item must have, and the number of its embeddings
    inputs: Callable[[MediaItem, Values], tuple[dict[str, Stated], int]]
    # options of the image processor that the model's own processor sets
    options: Callable[[Values], dict[str, Any]] = _no_options
    takes_samples: bool = False  # the image processor takes a list of the images of each prompt
    # an image becomes other tokens where its prompt has more of them
    sees_others: bool = False

    def given(self, images: Sequence[Any]) -> list[Any]:
        """Return the images of one prompt as the image processor takes them."""
        return [list(images)] if self.takes_samples else list(images)


def side_of(vision: Values, key: str) -> int:
    """Return a size in pixels, of a square. Raises InputError."""
    found = vision[key]
    sides = set(found) if isinstance(found, list | tuple) else {found}
    if len(sides) != 1:
        raise InputError(
            f"config.json vision_config.{key}",
            f"expected a square, found {found}",
            "serve the text alone: --language-model-only",
        )
    return sides.pop()


def feature_of(item: MediaItem, name: str) -> Feature | None:
    """Return an item's feature by its name; None: it has none."""
    return next((each for each in item.features if each.name == name), None)
