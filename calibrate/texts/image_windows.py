"""Cut chats with images into calibration windows.

The images of a chat stay in one window. A chat that does not fit into the rest of a window begins
the next window, and the rest is filled with the default texts. A chat longer than a window is cut
off at the end of the window, after its last image.

Legend: W windows, S tokens of a window.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from calibrate.texts.evaluate import Excerpt
from formats.errors import InputError

# Types of message parts that are images
IMAGE_PARTS = ("image", "image_url", "input_image")


class Chat(Protocol):
    """A tokenized chat with images."""

    @property
    def ids(self) -> Sequence[int]: ...

    @property
    def is_image(self) -> Sequence[bool]:
        """True for tokens whose embeddings come from the vision tower."""
        ...

    @property
    def images(self) -> Sequence[Any]:
        """The Pillow images, in order."""
        ...


class ChatReader(Protocol):
    """Reads chats with images for one model."""

    def read(
        self,
        messages: Sequence[Mapping[str, Any]],
        folder: Path,
        *,
        add_generation_prompt: bool = False,
    ) -> Chat:
        """Read a chat. Raises InputError.

        `folder`: base of relative image paths. `add_generation_prompt`: append the beginning of an
        answer.
        """
        ...

    def inputs(self, window: "ImageWindow", ids_S: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the arguments of transformers' model for one window with images."""
        ...

    def tower(
        self, device: str, dtype: torch.dtype
    ) -> Callable[[Sequence[Any]], torch.Tensor] | None:
        """Load the vision tower of a model that transformers cannot load. Raises CheckpointError.

        Return a function: images of a window -> their embeddings [R, D]; R image tokens of the
        window, D hidden size. Return None if transformers can load the model.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageWindow:
    """Images of one window; empty for a window of text."""

    is_image_S: torch.Tensor  # bool
    images: tuple[Any, ...]  # Pillow images


def has_images(document: Any) -> bool:
    """Return True for a chat with an image part."""
    messages = document if isinstance(document, list) else ()
    contents = [each.get("content") for each in messages if isinstance(each, dict)]
    parts = [part for each in contents if isinstance(each, list) for part in each]
    return any(isinstance(part, dict) and part.get("type") in IMAGE_PARTS for part in parts)


def images_digest(windows: Sequence[ImageWindow]) -> str:
    """Return the SHA-256 of the positions and pixels of all images, in hexadecimal."""
    digest = hashlib.sha256()
    for window in windows:
        digest.update(window.is_image_S.numpy().tobytes())
        for image in window.images:
            digest.update(repr(image.size).encode() + image.convert("RGB").tobytes())
    return digest.hexdigest()


class _Windows:
    """Collects tokens into windows of fixed length."""

    def __init__(self, length: int, opening: Sequence[int]) -> None:
        """`opening`: ids that begin a window which does not begin with a new text."""
        self.length, self.opening = length, list(opening)
        self.ids_WS: list[list[int]] = []
        self.images_W: list[ImageWindow] = []
        self._ids: list[int] = []
        self._is_image: list[bool] = []
        self._images: list[Any] = []

    @property
    def room(self) -> int:
        """Number of tokens that still fit into the current window."""
        return self.length - len(self._ids)

    @property
    def has_images(self) -> bool:
        return bool(self._images)

    def add_text(self, ids: Sequence[int], begins: bool) -> int:
        """Add as many ids of a text as fit into the current window, and return their number."""
        if not self._ids and not begins:
            self._add(self.opening)
        count = min(len(ids), self.room)
        self._add(ids[:count])
        return count

    def add_chat(self, ids: Sequence[int], is_image: Sequence[bool], images: Iterable[Any]) -> None:
        self._images += images
        self._add(ids, is_image)

    def _add(self, ids: Sequence[int], is_image: Sequence[bool] = ()) -> None:
        self._ids += ids
        self._is_image += is_image or [False] * len(ids)
        if self.room:
            return
        self.ids_WS.append(self._ids)
        window = ImageWindow(is_image_S=torch.tensor(self._is_image), images=tuple(self._images))
        self.images_W.append(window)
        self._ids, self._is_image, self._images = [], [], []


def image_windows(
    pieces: Iterable[Excerpt | Chat],
    encode: Callable[[str], list[int]],
    fillers: Iterator[Excerpt],
    *,
    before: Sequence[int],
    opening: Sequence[int],
    length: int,
    count: int,
    source: str,
) -> tuple[torch.Tensor, tuple[ImageWindow, ...], int]:
    """Return (ids [W, S], images of each window, number of chats that were too long).

    `before`: ids in front of each text and chat. `opening`: see make_windows. `fillers`: endless
    texts that fill the rest of a window. Raises InputError if no window has an image.
    """
    windows, num_too_long = _Windows(length, opening), 0

    def add_text(text: Excerpt, most: int | None = None) -> None:
        ids = [*(before if text.begins else ()), *encode(text.text)][:most]
        begins = text.begins
        while ids and len(windows.ids_WS) < count:
            ids, begins = ids[windows.add_text(ids, begins) :], False

    def fill() -> None:
        done = len(windows.ids_WS)
        while len(windows.ids_WS) == done:
            add_text(next(fillers), windows.room)

    for piece in pieces:
        if len(windows.ids_WS) >= count:
            break
        if isinstance(piece, Excerpt):
            add_text(piece)
            continue
        ids, is_image = list(piece.ids), list(piece.is_image)
        if list(before) != ids[: len(before)]:
            ids, is_image = [*before, *ids], [*([False] * len(before)), *is_image]
        last = max((place for place, found in enumerate(is_image) if found), default=-1)
        if last >= length:
            num_too_long += 1
            continue
        if len(ids) > windows.room and windows.room < length:
            fill()
            if len(windows.ids_WS) >= count:
                break
        windows.add_chat(ids[:length], is_image[:length], piece.images)
    if windows.has_images and len(windows.ids_WS) < count:
        fill()
    if not any(window.images for window in windows.images_W):
        raise InputError(
            source,
            f"none of its images fits into a window of {length} tokens with its chat",
            "raise the sequence length, or give smaller images",
        )
    return torch.tensor(windows.ids_WS), tuple(windows.images_W), num_too_long
