"""CalibrationChats: reads the chats with images in calibration data, for transformers' model.

`qserve quantize` passes it to the package calibrate, which reads the rest of the data itself.
"""

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from formats.checkpoint import CheckpointReader
from formats.errors import CHECK_ACCESS, InputError, one_line
from qserve.multimodal.decode import decode_image
from qserve.multimodal.layouts.table import layout_of
from qserve.multimodal.media import MediaItem
from qserve.multimodal.sources import read_data_url
from qserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from qserve.multimodal.processor import MediaProcessor

SUBJECT = "calibration data"
# type of a content part with an image -> fields that may hold its URL, path or base64 text; the
# first one found counts
IMAGE_FIELDS = {
    "image_url": ("image_url",),
    "input_image": ("image_url",),
    "image": ("image", "url", "path"),
}
# Values that an image processor returns only for its own multimodal processor: they are no
# arguments of the model.
NO_ARGUMENTS = ("rows", "cols", "num_crops", "num_patches", "num_soft_tokens_per_image")
NO_ARGUMENTS += ("grids", "num_patches_per_image")
# argument of ERNIE's model in transformers: nonzero for tokens that have other experts than text
EXPERTS_ARGUMENT = "moe_mm_token_type_ids"
MAX_PATH_CHARS = 4096
MAX_BYTES, MAX_PIXELS = 2**28, 2**28


class PicturedChat(NamedTuple):
    ids: list[int]
    is_image: list[bool]  # True: the token's embedding comes from the vision tower
    images: "list[Image]"
    media: tuple[MediaItem, ...]  # the same images in the form that the engine takes


class Window(Protocol):
    """Images of one window of calibration data."""

    @property
    def is_image_S(self) -> "torch.Tensor": ...

    @property
    def images(self) -> "tuple[Image, ...]": ...


class CalibrationChats:
    """Chats with images for one vision-language model."""

    def __init__(self, folder: str | Path) -> None:
        """Store the model's folder; the first chat loads the processor."""
        self._folder = folder
        self._loaded: tuple[Tokenizer, MediaProcessor, Any] | None = None

    def read(
        self,
        messages: Sequence[Mapping[str, Any]],
        folder: Path,
        *,
        add_generation_prompt: bool = False,
    ) -> PicturedChat:
        """Read a chat. Paths of images are relative to `folder`. Raises InputError.

        `add_generation_prompt`: end the prompt with the start of the assistant's turn.
        """
        from qserve.multimodal.processor import image_digest  # loads transformers

        plain, images = without_images(messages, folder)
        tokenizer, processor, _ = self._load()
        ids = _encode_chat(tokenizer, plain, add_generation_prompt)
        answer: list[int] = []
        if processor.config.family.has_mutual_prompt and plain[-1].get("role") == "assistant":
            # The answer is no part of the prompt, whose tokens see each other.
            asked = _encode_chat(tokenizer, plain[:-1], True)
            if ids[: len(asked)] == asked:
                ids, answer = asked, ids[len(asked) :]
        ids, items = processor.prepare(ids, images, list(map(image_digest, images)))
        ids += answer
        is_image = np.zeros(len(ids), bool)
        for item in items:
            is_image[item.embed_positions()] = True
        return PicturedChat(ids, is_image.tolist(), images, items)

    def inputs(self, window: Window, ids_S: "torch.Tensor") -> "dict[str, torch.Tensor]":
        """Return the arguments of transformers' model for one window with images."""
        import torch

        _, processor, pixels_of = self._load()
        config = processor.config
        layout = layout_of(config)
        found = pixels_of(images=layout.given(window.images), **layout.options(config.values))
        inputs = {
            name: torch.from_numpy(np.array(value))
            for name, value in found.items()
            if name not in NO_ARGUMENTS
        }
        kinds_1S = window.is_image_S[None].int()
        if config.family.kinds_argument:
            inputs[config.family.kinds_argument] = kinds_1S
        if config.expert_tokens:
            is_media_S = torch.isin(ids_S, torch.tensor(config.expert_tokens))
            inputs[EXPERTS_ARGUMENT] = is_media_S[None].int()
        return {
            **inputs,
            "input_ids": ids_S[None],
            "attention_mask": torch.ones(1, len(ids_S), dtype=torch.long),
        }

    def tower(
        self, device: str, dtype: "torch.dtype"
    ) -> "Callable[[Sequence[Image]], torch.Tensor] | None":
        """Load the vision tower, unless transformers' model has a text model of its own.

        Return a function: images of a window -> their embeddings [R, D]; R image tokens of the
        window, D hidden size. Return None if it has. Raises CheckpointError.
        """
        tokenizer, processor, _ = self._load()
        config, reader = processor.config, CheckpointReader(self._folder)
        is_known = reader.whole_config.get("model_type") == config.values["model_type"]
        if is_known and "text_config" in config.values:
            return None
        import torch

        from qserve.multimodal.processor import image_digest
        from qserve.multimodal.tower import Tower

        tower = Tower.load(
            config, self._folder, reader.other_parts, device=torch.device(device), dtype=dtype
        )
        placeholder = config.placeholder_of(tokenizer.encode)

        def encode(images: "Sequence[Image]") -> torch.Tensor:
            ids = [placeholder] * len(images)
            _, items = processor.prepare(ids, images, list(map(image_digest, images)))
            return torch.cat(tower.encode(items)).clone()  # not a tensor of inference mode

        return encode

    def _load(self) -> "tuple[Tokenizer, MediaProcessor, Any]":
        if self._loaded is None:
            from qserve.multimodal.processor import MediaProcessor, load_image_processor

            tokenizer = Tokenizer(str(self._folder))
            processor = MediaProcessor(self._folder, tokenizer.encode)
            self._loaded = tokenizer, processor, load_image_processor(self._folder)
        return self._loaded


def _encode_chat(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool
) -> list[int]:
    """Return the tokens of a chat. Raises InputError."""
    try:
        return tokenizer.encode_chat(messages, add_generation_prompt=add_generation_prompt)
    except InputError:
        raise
    except Exception as error:  # a template raises exceptions of any kind
        raise InputError(
            SUBJECT,
            f"the chat template rejects it: {one_line(error)}",
            "send roles and an order of messages that the template supports",
        ) from None


def without_images(
    messages: Sequence[Mapping[str, Any]], folder: Path
) -> "tuple[list[dict[str, Any]], list[Image]]":
    """Take the images out of a chat: its image parts become empty ones.

    Return the chat and the images in order. Paths are relative to `folder`. Raises InputError.
    """
    images: list[Image] = []
    return [_without_images(each, folder, images) for each in messages], images


def _without_images(
    message: Mapping[str, Any], folder: Path, images: "list[Image]"
) -> dict[str, Any]:
    """Return a message with empty image parts, and append its images to `images`."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in IMAGE_FIELDS:
            images.append(_image_of(part, IMAGE_FIELDS[kind], folder))
            part = {"type": "image"}
        parts.append(part)
    return {**message, "content": parts}


def _image_of(part: Mapping[str, Any], fields: Sequence[str], folder: Path) -> "Image":
    """Decode the image of a content part. Raises InputError."""
    found = next((part[name] for name in fields if part.get(name) is not None), None)
    if isinstance(found, Mapping):
        found = found.get("url")
    if not isinstance(found, str) or not found:
        raise InputError(
            SUBJECT,
            f"has a content part of type {part['type']} without a path, a data: URL or base64 in"
            f" {fields[0]}",
            "give one of these",
        )
    try:
        return decode_image(_bytes_of(found, folder), MAX_PIXELS)
    except InputError as error:
        raise InputError(f"{SUBJECT} image {found:.100}", error.problem, error.remedy) from None


def _bytes_of(text: str, folder: Path) -> bytes:
    if text[:5].lower() == "data:":
        return read_data_url(text, MAX_BYTES)
    if text[:7].lower() in ("http://", "https:/"):
        raise InputError("URL", "is not fetched", "download it, and give its path")
    if len(text) <= MAX_PATH_CHARS:
        path = folder / text.removeprefix("file://")
        try:
            if path.is_file():
                return path.read_bytes()
        except (OSError, ValueError) as error:
            raise InputError("file", f"cannot be read: {one_line(error)}", CHECK_ACCESS) from None
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InputError(
            "text",
            f"is no file below {folder}, no data: URL and no base64",
            "give the path relative to the file of chats",
        ) from None
