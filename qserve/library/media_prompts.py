"""Images in prompts of the Python API: multi_modal_data, and the parts of messages."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from formats.errors import InputError
from qserve.multimodal.decode import decode_image
from qserve.multimodal.settings import MediaLimits
from qserve.multimodal.sources import read_data_url

if TYPE_CHECKING:
    from qserve.multimodal.media import MediaItem
    from qserve.multimodal.processor import MediaProcessor
    from qserve.text.tokenizer import Tokenizer

MEDIA = "multi_modal_data"
# type of a message's part -> its key of an image
IMAGE_PARTS = {"image": "image", "image_pil": "image_pil"}
IMAGE_URL = "image_url"  # OpenAI's part, with a data: URL


class ImagePrompts:
    """Prompts with images for one model. Any thread may use it."""

    def __init__(self, folder: str, *, takes_images: bool, no_vision: str) -> None:
        """`no_vision`: remedy for a model that takes no images here; "": it has no tower."""
        self._folder = folder
        self._takes_images, self._no_vision = takes_images, no_vision
        self._processor: MediaProcessor | None = None
        self._lock = threading.Lock()

    def prepare(
        self, prompt: Any, ids: list[int], get_tokenizer: "Callable[[], Tokenizer]"
    ) -> "tuple[list[int], tuple[MediaItem, ...]]":
        """Return token ids with an image's tokens for each placeholder, and the media items.

        Raises InputError.
        """
        images = images_of(prompt)
        if not images:
            return ids, ()
        from qserve.multimodal.processor import image_digest  # loads Pillow

        with self._lock:
            processor = self._load(get_tokenizer)
            return processor.prepare(ids, images, [image_digest(image) for image in images])

    def _load(self, get_tokenizer: "Callable[[], Tokenizer]") -> "MediaProcessor":
        """Load the image processor, once. Raises InputError for a model without a tower."""
        if self._processor is None:
            from qserve.multimodal.processor import MediaProcessor  # loads transformers

            if not self._takes_images:
                raise InputError(
                    "images",
                    f"are not taken by {self._folder}",
                    self._no_vision or "use a vision-language model with its vision tower",
                )
            self._processor = MediaProcessor(self._folder, get_tokenizer().encode)
        return self._processor


def images_of(prompt: Any) -> list[Any]:
    """Return the images of a prompt's multi_modal_data. Raises InputError."""
    stated = prompt.get(MEDIA) if isinstance(prompt, Mapping) else None
    if stated is None:
        return []
    if not isinstance(stated, Mapping) or set(stated) - {"image"}:
        found = sorted(map(str, stated)) if isinstance(stated, Mapping) else type(stated).__name__
        raise InputError(MEDIA, f"expected {{'image': an image or a list of them}}, found {found}")
    images = stated.get("image")
    images = list(images) if isinstance(images, list | tuple) else [images]
    return [_checked(MEDIA, image) for image in images if image is not None]


def split_images(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return messages whose image parts have no image, and the images. Raises InputError."""
    images: list[Any] = []
    return [_without_images(message, images) for message in messages], images


def _without_images(message: Mapping[str, Any], images: list[Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return dict(message)
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        key = IMAGE_PARTS.get(kind) if isinstance(kind, str) else None
        if kind == IMAGE_URL:
            images.append(_image_of(part.get(IMAGE_URL)))
        elif key is not None:
            images.append(_checked(f"messages part of type {kind!r}", part.get(key)))
        else:
            parts.append(part)
            continue
        parts.append({"type": "image"})
    return {**message, "content": parts}


def _image_of(value: Any) -> Any:
    """Decode the image of a part of type image_url. Raises InputError."""
    url = value.get("url") if isinstance(value, Mapping) else value
    if not isinstance(url, str) or not url[:5].lower() == "data:":
        raise InputError(
            "messages part of type 'image_url'",
            f"expected a data: URL, found {url!r:.100}",
            "fetch the image, and give it as {'type': 'image', 'image': ...}",
        )
    limits = MediaLimits()
    return decode_image(read_data_url(url, limits.max_bytes), limits.max_pixels)


def _checked(subject: str, image: Any) -> Any:
    if not all(hasattr(image, name) for name in ("size", "mode", "convert")):
        raise InputError(
            subject,
            f"expected a PIL image, found {type(image).__name__}",
            "open it with PIL.Image.open",
        )
    return image
