"""Images and videos in the Python API: `multi_modal_data` of prompts, content parts of messages."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from formats.errors import InputError
from qserve.multimodal.decode import decode_image
from qserve.multimodal.decode_video import DecodeLimits, decode_video
from qserve.multimodal.settings import MediaLimits
from qserve.multimodal.sources import read_data_url
from qserve.multimodal.video import OPTIONS, Video, video_of_frames

if TYPE_CHECKING:
    from qserve.multimodal.media import MediaItem
    from qserve.multimodal.processor import MediaProcessor
    from qserve.text.tokenizer import Tokenizer

MEDIA = "multi_modal_data"
EXPECTED = "expected {'image': an image or a list of them, 'video': a video or a list of them}"
# type of a content part -> key of the image in the part
IMAGE_PARTS = {"image": "image", "image_pil": "image_pil"}
# type of a content part with a data: URL -> media type
URL_PARTS = {"image_url": "image", "video_url": "video"}
VIDEO = "video"


class Media(NamedTuple):
    """Images and videos of one prompt, both in the order of their placeholders."""

    images: list[Any]  # PIL images
    videos: list[Video]


class MediaPrompts:
    """Preprocessor of a model's image and video prompts. Thread-safe."""

    def __init__(self, folder: str, *, takes_media: bool, no_vision: str) -> None:
        """`no_vision`: remedy to show if media are refused; "": the model has no vision tower."""
        self._folder = folder
        self._takes_media, self._no_vision = takes_media, no_vision
        self._processor: MediaProcessor | None = None
        self._lock = threading.Lock()

    def prepare(
        self, prompt: Any, ids: list[int], get_tokenizer: "Callable[[], Tokenizer]"
    ) -> "tuple[list[int], tuple[MediaItem, ...]]":
        """Return token ids with placeholders expanded to media tokens, and the media items.

        Raises InputError.
        """
        images, videos = media_of(prompt)
        if not images and not videos:
            return ids, ()
        from qserve.multimodal.processor import image_digest  # loads Pillow

        with self._lock:
            processor = self._load(get_tokenizer, "images" if images else "videos")
            digests = [image_digest(image) for image in images]
            return processor.prepare(ids, images, digests, videos)

    def _load(self, get_tokenizer: "Callable[[], Tokenizer]", media: str) -> "MediaProcessor":
        """Load the media processor once. Raises InputError if the model takes no media."""
        if self._processor is None:
            from qserve.multimodal.processor import MediaProcessor  # loads transformers

            if not self._takes_media:
                raise InputError(
                    media,
                    f"are not taken by {self._folder}",
                    self._no_vision or "use a vision-language model with its vision tower",
                )
            self._processor = MediaProcessor(self._folder, get_tokenizer().encode)
        return self._processor


def media_of(prompt: Any) -> Media:
    """Return the images and videos in a prompt's multi_modal_data. Raises InputError."""
    stated = prompt.get(MEDIA) if isinstance(prompt, Mapping) else None
    if stated is None:
        return Media([], [])
    if not isinstance(stated, Mapping) or set(stated) - {"image", VIDEO}:
        found = sorted(map(str, stated)) if isinstance(stated, Mapping) else type(stated).__name__
        raise InputError(
            MEDIA,
            f"{EXPECTED}, found {found}",
            f"for example {{'prompt': '...', {MEDIA!r}: {{'image': image}}}}",
        )
    images = stated.get("image")
    images = list(images) if isinstance(images, list | tuple) else [images]
    return Media(
        [_checked(MEDIA, image) for image in images if image is not None],
        list(map(_video_of, _videos_of(stated.get(VIDEO)))),
    )


def _videos_of(stated: Any) -> list[Any]:
    """Return one video or a list of videos as a list.

    One video is a list of images or of 3-dimensional arrays, or a (frames, options) pair.
    """
    if stated is None or not isinstance(stated, list):
        return [] if stated is None else [stated]
    is_one = any(hasattr(each, "convert") or getattr(each, "ndim", 0) == 3 for each in stated)
    return [stated] if is_one else stated


def _video_of(stated: Any) -> Video:
    return stated if isinstance(stated, Video) else video_of_frames(stated)


def split_media(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], dict[str, list[Any]]]:
    """Split messages into messages with empty media parts, and multi_modal_data.

    Raises InputError.
    """
    media: dict[str, list[Any]] = {"image": [], VIDEO: []}
    return [_without_media(message, media) for message in messages], media


def _without_media(message: Mapping[str, Any], media: dict[str, list[Any]]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return dict(message)
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        found = _medium_of(kind, part) if isinstance(kind, str) else None
        if found is None:
            parts.append(part)
            continue
        name, medium = found
        media[name].append(medium)
        parts.append({"type": name})
    return {**message, "content": parts}


def _medium_of(kind: str, part: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Return the media type and the medium of a content part; None: not a media part."""
    if kind in URL_PARTS:
        return URL_PARTS[kind], _decoded(kind, part.get(kind))
    if kind == VIDEO:
        options = {name: part[name] for name in OPTIONS if part.get(name) is not None}
        return VIDEO, video_of_frames((part.get(VIDEO), options))
    if kind in IMAGE_PARTS:
        subject = f"messages part of type {kind!r}"
        return "image", _checked(subject, part.get(IMAGE_PARTS[kind]))
    return None


def _decoded(part: str, value: Any) -> Any:
    """Decode the image or video in a content part with a data: URL. Raises InputError."""
    kind = URL_PARTS[part]
    url = value.get("url") if isinstance(value, Mapping) else value
    if not isinstance(url, str) or not url[:5].lower() == "data:":
        raise InputError(
            f"messages part of type {part!r}",
            f"expected a data: URL, found {url!r:.100}",
            f"download it, and give it as {{'type': {kind!r}, {kind!r}: ...}}",
        )
    limits = MediaLimits()
    data = read_data_url(url, limits.num_bytes(kind), kind)
    if kind == VIDEO:
        most = DecodeLimits(max_pixels=limits.max_pixels, seconds=limits.video_seconds)
        return decode_video(data, most)
    return decode_image(data, limits.max_pixels)


def _checked(subject: str, image: Any) -> Any:
    if not all(hasattr(image, name) for name in ("size", "mode", "convert")):
        raise InputError(
            subject,
            f"expected a PIL image, found {type(image).__name__}",
            "open it with PIL.Image.open",
        )
    return image
