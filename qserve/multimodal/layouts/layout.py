"""Layout: the tokens and features of an image, for one kind of model. Loads no torch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from formats.errors import InputError
from qserve.multimodal.media import Feature, MediaItem


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The tokens of one item. See MediaItem for the fields that have its names."""

    length: int  # number of tokens
    features: tuple[Feature, ...]
    grid: tuple[int, ...] = ()
    num_outer: int = 0
    frame_step: float = 1.0
    # place among the tokens -> text of a token that has no embedding
    other_tokens: Mapping[int, str] = field(default_factory=dict)


Piece = str | int | Run  # a text or a token id next to items, or an item
Values = Mapping[str, Any]  # config.json, completed with transformers' defaults
Stated = tuple[str, tuple[int, ...]]  # dtype and shape of a feature


def _no_options(values: Values) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The functions and options that turn an image into tokens and features."""

    # result of the image processor for one image (a mapping, or a Cut), values of config.json ->
    # the image's pieces
    pieces: Callable[[Any, Values], Iterator[Piece]]
    # item, values of config.json -> features that the item must have, number of its embeddings
    inputs: Callable[[MediaItem, Values], tuple[dict[str, Stated], int]]
    # values of config.json -> options of the image processor that the model's own processor sets
    options: Callable[[Values], dict[str, Any]] = _no_options
    # True: the image processor takes one list of images for each prompt
    takes_samples: bool = False
    # text of the token around an image that two adjacent images share; "": none
    shared_token: str = ""
    # text before an image, with {} for the number of images before it in the prompt; "": none
    number_text: str = ""
    # True: the tokens of an image are others where its prompt has several images
    sees_others: bool = False

    def given(self, images: Sequence[Any]) -> list[Any]:
        """Return the images of one prompt in the form that the image processor takes."""
        return [list(images)] if self.takes_samples else list(images)


def side_of(vision: Values, key: str) -> int:
    """Return the side of a square in pixels, from a key of vision_config. Raises InputError."""
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
    """Return the feature of an item with this name, or None."""
    return next((each for each in item.features if each.name == name), None)
