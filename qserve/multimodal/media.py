"""MediaItem: one image, video or sound of a prompt. Loads no torch."""

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from formats.errors import InputError
from qserve.errors import ParameterError
from qserve.multimodal.settings import KINDS

DIGEST = re.compile(r"[0-9a-f]{64}")  # SHA-256; a shorter digest would make wrong cache hits likely
PROCESSOR = "let MediaProcessor (qserve.multimodal.processor) make the item"  # remedy
MAX_FRAME_STEP = 1e6
FEATURE_DTYPES = ("uint8", "int64", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """An input of the encoder: an array that a processor made from a medium, as bytes.

    Raises ParameterError.
    """

    name: str  # name of the encoder's argument, such as pixel_values
    dtype: str  # one of FEATURE_DTYPES
    shape: tuple[int, ...]
    data: bytes = field(repr=False)  # values in C order, little-endian

    def __post_init__(self) -> None:
        if self.dtype not in FEATURE_DTYPES:
            raise ParameterError(
                f"media feature {self.name}",
                f"expected {', '.join(FEATURE_DTYPES)}, found {self.dtype!r}",
                "convert the array with .astype",
            )
        size = math.prod(self.shape) * np.dtype(self.dtype).itemsize
        if min(self.shape, default=0) < 0 or len(self.data) != size:
            raise ParameterError(
                f"media feature {self.name}",
                f"expected {size} bytes for {list(self.shape)}, found {len(self.data)}",
                "use Feature.of, which copies an array",
            )

    @classmethod
    def of(cls, name: str, array: np.ndarray) -> "Feature":
        """Copy an array whose dtype is one of FEATURE_DTYPES."""
        data = np.ascontiguousarray(array).tobytes()
        return cls(name=name, dtype=str(array.dtype), shape=array.shape, data=data)

    def array(self) -> np.ndarray:
        """Return the values as a read-only array."""
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaItem:
    """A range of positions in a prompt whose embeddings come from an encoder.

    The prompt has a placeholder token at each of these positions. Where `is_embed` is 0 it has an
    ordinary token instead, such as the one that ends a row of patches. Raises ParameterError.
    """

    kind: str  # one of KINDS
    digest: str  # SHA-256 of the content and of all processor options, as 64 hex digits
    offset: int  # first position in the prompt
    length: int  # number of positions
    # a byte for each position, 1 where it has an embedding, else 0; empty: all positions have one
    is_embed: bytes = b""
    is_mutual: bool = False  # True: the positions attend to each other in both directions
    # numbers of frames, rows and columns of embeddings, where positions have three axes; else ()
    grid: tuple[int, ...] = ()
    # number of embeddings before those of `grid`, and of those after
    num_outer: int = 0
    frame_step: float = 1.0  # distance between two frames on the first axis
    # inputs of the encoder; empty only where no encoder runs
    features: tuple[Feature, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ParameterError(
                "media kind",
                f"expected {', '.join(KINDS)}, found {self.kind!r}",
                "use the kind of the part that the item stands for",
            )
        if not DIGEST.fullmatch(self.digest):
            raise ParameterError(
                "media digest",
                f"expected 64 hex digits in lower case, found {self.digest!r:.80}",
                "use hashlib.sha256(content).hexdigest()",
            )
        if self.offset < 0 or self.length < 1:
            raise ParameterError(
                "media position",
                "expected an offset of at least 0 and a length of at least 1,"
                f" found {self.offset} and {self.length}",
                PROCESSOR,
            )
        if self.is_embed and (
            len(self.is_embed) != self.length or not {1} <= set(self.is_embed) <= {0, 1}
        ):
            raise ParameterError(
                "media is_embed",
                f"expected {self.length} bytes of 0 or 1, not all of them 0, found"
                f" {len(self.is_embed)} bytes: {self.is_embed[:16]!r}",
                "leave it out if every position has an embedding",
            )

        inner = self.length - 2 * self.num_outer
        if self.num_outer < 0 or self.num_outer and not self.grid:
            raise ParameterError(
                "media num_outer", f"expected 0, found {self.num_outer}", PROCESSOR
            )
        if self.grid and (len(self.grid) != 3 or math.prod(self.grid) != inner):
            raise ParameterError(
                "media grid", f"expected 3 numbers of product {inner}, found {self.grid}", PROCESSOR
            )
        if not 0 <= self.frame_step < MAX_FRAME_STEP:
            raise ParameterError(
                "media frame_step",
                f"expected 0 to {MAX_FRAME_STEP:.0f}, found {self.frame_step}",
                PROCESSOR,
            )

    @property
    def num_embeds(self) -> int:
        """Number of embeddings."""
        return sum(self.is_embed) if self.is_embed else self.length

    def embed_positions(self) -> np.ndarray:
        """Return the positions in the prompt of the embeddings, in order, as int64."""
        if not self.is_embed:
            return np.arange(self.offset, self.end)
        return self.offset + np.flatnonzero(np.frombuffer(self.is_embed, np.uint8))

    @property
    def end(self) -> int:
        """Position after the last one."""
        return self.offset + self.length

    def key(self, start: int) -> bytes:
        """Return this item's part of the key of a cache page that begins at token `start`.

        It contains the offset from `start`: the same items at other places must give another key.
        Each field has a fixed length or a separator, so that different items have different bytes.
        """
        return f"\0{self.kind}\0{self.digest}\0{self.offset - start}\0".encode()


def digest_of(*fields: str | bytes | memoryview) -> str:
    """Return the SHA-256 of some fields as hex digits.

    Each field is hashed with its length, so that different lists have different bytes.
    """
    hashed = hashlib.sha256()
    for each in fields:
        data = each.encode() if isinstance(each, str) else each
        hashed.update(len(data).to_bytes(8, "little") + data)
    return hashed.hexdigest()


def check_media(subject: str, items: Sequence[MediaItem], num_tokens: int) -> None:
    """Raise InputError if items overlap, are not in order, or end after the prompt."""
    end = 0
    for number, item in enumerate(items):
        if item.offset < end:
            raise InputError(
                f"{subject} media item {number}",
                f"begins at token {item.offset}, before the end of the item before it, {end}",
                "give items in the order of their positions, without overlap",
            )
        end = item.end
        if end > num_tokens:
            raise InputError(
                f"{subject} media item {number}",
                f"ends at token {end}; the prompt has {num_tokens} tokens",
                "put placeholder tokens for all of its embeddings into the prompt",
            )
