"""MediaReader: from the URLs of a conversation's images to token ids and media items.

It blocks, for seconds with large images, so it runs in a worker process of the server.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from formats.errors import CheckpointError, InputError
from qserve.multimodal.decode import decode_image
from qserve.multimodal.media import MediaItem
from qserve.multimodal.settings import LIMIT_FLAG, MediaLimits
from qserve.multimodal.sources import read_source

if TYPE_CHECKING:
    from PIL.Image import Image

    from qserve.multimodal.processor import MediaProcessor

MAX_FEATURE_BYTES = 56 * 2**20  # of one prompt; a message to the engine has at most 64 MiB
MAX_SOURCE_BYTES = 128 * 2**20  # files of one prompt's images


class ReadImage(NamedTuple):
    image: "Image"
    digest: str  # SHA-256 of the file, in hexadecimal


ReadImages = dict[str, ReadImage]  # by URL


class MediaReader:
    """Images of requests to one vision-language model."""

    def __init__(
        self, folder: str, encode: Callable[[str, bool], list[int]], limits: MediaLimits
    ) -> None:
        """`encode`: the model's tokenizer. The image processor is loaded with the first image."""
        self._folder, self._encode, self.limits = folder, encode, limits
        self._processor: MediaProcessor | None = None

    def load(self) -> "MediaProcessor":
        """Load the model's image processor, which takes seconds. Raises InputError."""
        if self._processor is None:
            from qserve.multimodal.processor import MediaProcessor  # loads torch

            self._processor = MediaProcessor(self._folder, self._encode)
        return self._processor

    def prepare(
        self, token_ids: Sequence[int], urls: Sequence[str], known: ReadImages
    ) -> tuple[list[int], tuple[MediaItem, ...]]:
        """Return token ids with each image's tokens, and the media items. Raises InputError.

        `known`: images of the request that have been read; others are added.
        """
        most = self.limits.max_images
        if len(urls) > most:
            raise InputError(
                "messages",
                f"expected at most {most} images, found {len(urls)}",
                f"send fewer; the server's flag is {LIMIT_FLAG}",
            )
        self._read([url for url in dict.fromkeys(urls) if url not in known], known)
        chosen = [known[url] for url in urls]
        ids, items = self._processed(token_ids, chosen)
        size = sum(len(each.data) for item in items for each in item.features)
        if size > MAX_FEATURE_BYTES:
            raise InputError(
                "images",
                f"become {size} bytes of pixels, at most {MAX_FEATURE_BYTES} in one request",
                "send fewer or smaller images",
            )
        return ids, items

    def _read(self, urls: Sequence[str], known: ReadImages) -> None:
        ends = time.monotonic() + self.limits.fetch_seconds
        room = MAX_SOURCE_BYTES
        pixels = self.limits.max_pixels  # of all images: they are in memory together
        for url in urls:
            data = read_source(url, self.limits, ends)
            room -= len(data)
            if room < 0:
                raise InputError(
                    "images", f"have more than {MAX_SOURCE_BYTES} bytes together", "send fewer"
                )
            image = decode_image(data, pixels)
            pixels -= image.width * image.height
            # MediaProcessor adds its options, and frames each field by its length.
            known[url] = ReadImage(image, hashlib.sha256(data).hexdigest())

    def _processed(
        self, token_ids: Sequence[int], images: Sequence[ReadImage]
    ) -> tuple[list[int], tuple[MediaItem, ...]]:
        try:
            return self.load().prepare(
                token_ids, [each.image for each in images], [each.digest for each in images]
            )
        except CheckpointError:
            raise
        except InputError as error:
            if error.__cause__ is None:
                raise
            # Without the text of the library, which may contain an address of memory.
            raise InputError(
                "image", "cannot be processed for this model", "send one of another size"
            ) from None
