"""MediaReader: reads the images and videos of a conversation, and turns them into media items.

Its calls block, for seconds with large images, so it runs in a worker process of the server.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from formats.errors import CheckpointError, InputError
from qserve.multimodal.decode import decode_image
from qserve.multimodal.decode_video import DecodeLimits, decode_video
from qserve.multimodal.media import MediaItem
from qserve.multimodal.settings import LIMIT_FLAG, MediaLimits
from qserve.multimodal.sources import read_source
from qserve.multimodal.video import Video

if TYPE_CHECKING:
    from PIL.Image import Image

    from qserve.multimodal.processor import MediaProcessor

# limit for the features of one prompt: a message to the engine has at most 96 MiB
MAX_FEATURE_BYTES = 88 * 2**20
MAX_SOURCE_BYTES = 128 * 2**20  # limit for the files of one prompt together
MAX_FRAME_PIXELS = 2**25  # limit for one frame of a video file, before scaling


class ReadImage(NamedTuple):
    image: "Image"
    digest: str  # SHA-256 of the file, as hex digits


class MediaUrl(NamedTuple):
    kind: str  # image or video
    url: str


ReadMedia = dict[MediaUrl, ReadImage | Video]


class MediaReader:
    """Reads the images and videos of requests to one vision-language model."""

    def __init__(
        self,
        folder: str,
        encode: Callable[[str, bool], list[int]],
        limits: MediaLimits,
        kinds: Sequence[str] = ("image",),
    ) -> None:
        """Store the arguments; the first image or video loads the processors.

        `encode`: the model's tokenizer. `kinds`: kinds of media that the model takes.
        """
        self._folder, self._encode, self.limits, self.kinds = folder, encode, limits, kinds
        self._processor: MediaProcessor | None = None

    def load(self) -> "MediaProcessor":
        """Load the model's processors, which takes seconds. Raises InputError."""
        if self._processor is None:
            from qserve.multimodal.processor import MediaProcessor  # loads torch
            from qserve.multimodal.video_processor import VideoLimits

            most = VideoLimits(self.limits.max_video_frames, self.limits.max_video_pixels)
            self._processor = MediaProcessor(self._folder, self._encode, most)
        return self._processor

    def prepare(
        self, token_ids: Sequence[int], urls: Sequence[MediaUrl], known: ReadMedia
    ) -> tuple[list[int], tuple[MediaItem, ...]]:
        """Read the media of `urls` and replace each placeholder in `token_ids` by its tokens.

        Return the token ids and the media items. Raises InputError.
        `known`: media of the request that were read before; this call adds the others.
        """
        for kind, most in (("image", self.limits.max_images), ("video", self.limits.max_videos)):
            count = sum(url.kind == kind for url in urls)
            if count > most:
                raise InputError(
                    "messages",
                    f"expected at most {most} {kind}s, found {count}",
                    f"send fewer, or raise the server's {LIMIT_FLAG}",
                )
        self._read([url for url in dict.fromkeys(urls) if url not in known], known)
        ids, items = self._processed(token_ids, [(url.kind, known[url]) for url in urls])
        size = sum(len(each.data) for item in items for each in item.features)
        if size > MAX_FEATURE_BYTES:
            raise InputError(
                "images and videos",
                f"become {size} bytes of pixels, at most {MAX_FEATURE_BYTES} in one request",
                "send fewer or smaller ones",
            )
        return ids, items

    def _read(self, urls: Sequence[MediaUrl], known: ReadMedia) -> None:
        ends = time.monotonic() + self.limits.fetch_seconds
        room = MAX_SOURCE_BYTES
        pixels = self.limits.max_pixels  # for all images, which are in memory together
        for url in urls:
            data = read_source(url.url, self.limits, ends, url.kind)
            room -= len(data)
            if room < 0:
                raise InputError(
                    "images and videos",
                    f"have more than {MAX_SOURCE_BYTES} bytes together",
                    "send fewer",
                )
            if url.kind == "video":
                most = min(self.limits.max_pixels, MAX_FRAME_PIXELS)
                seconds = self.limits.video_seconds
                known[url] = decode_video(data, DecodeLimits(max_pixels=most, seconds=seconds))
                continue
            image = decode_image(data, pixels)
            pixels -= image.width * image.height
            # MediaProcessor combines this digest with its options.
            known[url] = ReadImage(image, hashlib.sha256(data).hexdigest())

    def _processed(
        self, token_ids: Sequence[int], media: Sequence[tuple[str, ReadImage | Video]]
    ) -> tuple[list[int], tuple[MediaItem, ...]]:
        images = [cast(ReadImage, each) for kind, each in media if kind == "image"]
        videos = [cast(Video, each) for kind, each in media if kind == "video"]
        try:
            return self.load().prepare(
                token_ids,
                [each.image for each in images],
                [each.digest for each in images],
                videos,
            )
        except CheckpointError:
            raise
        except InputError as error:
            if error.__cause__ is None:
                raise
            # transformers' own message is left out: it may contain a memory address.
            raise InputError(
                "image", "cannot be processed for this model", "send an image of another size"
            ) from None
