"""Calibration data: read texts or chats and cut them into full windows of token ids.

Texts are shuffled by the seed and cut into excerpts of about one window. The data has one excerpt
of each text, then a second one of each, and so on, so that even few windows contain many texts. The
package's own texts are drawn by default_texts.py.

BOS precedes the beginning of a text. Excerpts are joined and cut into windows, which begin as the
model's tokenizer begins a text; the remainder is dropped. The same source, tokenizer and seed give
the same ids, and the report records their hash. Chats with images are cut by image_windows.py.
"""

import hashlib
import json
import logging
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from calibrate.float_model import FloatModel
from calibrate.texts.default_texts import default_excerpts, endless_excerpts, excerpt_chars
from calibrate.texts.documents import read_documents
from calibrate.texts.evaluate import CHARS_PER_TOKEN, Excerpt, make_windows, text_opening
from calibrate.texts.excerpts import excerpts, render
from calibrate.texts.image_windows import (
    ChatReader,
    ImageWindow,
    has_images,
    image_windows,
    images_digest,
)
from formats.errors import InputError

DEFAULT_SAMPLES = 128
DEFAULT_LENGTH = 2048
WITHOUT_IMAGES = (
    "the vision part stays in float; calibration is on texts without images: give chats with images"
    " as calibration data"
)
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationData:
    """Calibration windows of token ids, and their source."""

    ids_WS: torch.Tensor  # int64
    source: str
    seed: int
    warnings: tuple[str, ...] = ()
    images_W: tuple[ImageWindow, ...] = ()  # images of each window; (): no images
    chats: ChatReader | None = None  # the reader of these images

    def first(self, count: int) -> "CalibrationData":
        """Return the first windows."""
        return replace(self, ids_WS=self.ids_WS[:count], images_W=self.images_W[:count])

    @property
    def num_images(self) -> int:
        return sum(len(window.images) for window in self.images_W)

    @property
    def sha256(self) -> str:
        """SHA-256 of the ids' shape, the ids as little-endian int64, and the images."""
        digest = hashlib.sha256(json.dumps(list(self.ids_WS.shape)).encode())
        digest.update(self.ids_WS.contiguous().numpy().astype("<i8").tobytes())
        if self.images_W:
            digest.update(images_digest(self.images_W).encode())
        return digest.hexdigest()

    def facts(self) -> dict[str, Any]:
        """Return a description of the data for reports and journals."""
        return {
            "source": self.source,
            "windows": self.ids_WS.shape[0],
            "sequence_length": self.ids_WS.shape[1],
            "seed": self.seed,
            **({"images": self.num_images} if self.images_W else {}),
            # Last, because errors name the first difference, and a hash explains nothing
            "sha256": self.sha256,
        }


def read_calibration(
    source: str | None,
    tokenizer: Any,
    *,
    samples: int = DEFAULT_SAMPLES,
    sequence_length: int = DEFAULT_LENGTH,
    seed: int = 0,
    bos: bool = True,
    chats: ChatReader | None = None,
) -> CalibrationData:
    """Read windows from a file or a data set; `source` None: the default texts of the package.

    `bos` False: a window has BOS only where a text starts. `chats` reads chats with images; None:
    such chats are refused. Raises InputError if the source is unreadable or does not fill a window.
    """
    warnings = []
    documents: list[Any] = []
    if source is not None:
        documents = read_documents(source)
        random.Random(seed).shuffle(documents)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False, verbose=False)

    num_chars, opening = CHARS_PER_TOKEN * sequence_length, text_opening(tokenizer) if bos else ()
    images_W: tuple[ImageWindow, ...] = ()
    if source is not None and any(map(has_images, documents)):
        if chats is None:
            raise InputError(
                source, "has images, which are not supported here", "remove the chats with images"
            )
        folder, reader = Path(source).absolute().parent, chats
        pieces = excerpts(
            documents,
            num_chars,
            seed,
            lambda chat: render(chat, tokenizer),
            lambda chat: reader.read(chat, folder) if has_images(chat) else None,
        )
        bos_id = tokenizer.bos_token_id
        ids_WS, images_W, num_too_long = image_windows(
            pieces,
            encode,
            endless_excerpts(tokenizer, num_chars, seed),
            before=opening or ([] if bos_id is None else [bos_id]),
            opening=opening,
            length=sequence_length,
            count=samples,
            source=source,
        )
        if num_too_long:
            warnings.append(
                f"{num_too_long} chats were left out, whose images exceed a window of"
                f" {sequence_length} tokens"
            )
    else:
        texts: Iterable[Excerpt]
        if source is None:
            warnings.append(
                "calibrated on the small text set in the package; texts like those of the "
                "application give better results (--calibration, or `calibration` in Python)"
            )
            own_chars = excerpt_chars(samples, sequence_length)
            texts = default_excerpts(tokenizer, own_chars, seed)
        else:
            texts = excerpts(documents, num_chars, seed, lambda chat: render(chat, tokenizer))
        ids_WS = make_windows(
            texts,
            encode,
            tokenizer.bos_token_id,
            sequence_length,
            samples,
            opening=opening,
            source="default texts" if source is None else source,
        )
    if len(ids_WS) < samples:
        warnings.append(f"the calibration data fills {len(ids_WS)} windows, not {samples}")
    return CalibrationData(
        ids_WS=ids_WS,
        source="default texts" if source is None else source,
        seed=seed,
        warnings=tuple(warnings),
        images_W=images_W,
        chats=chats if images_W else None,
    )


def read_for_model(
    model: FloatModel,
    calibration: str | CalibrationData | None,
    samples: int,
    sequence_length: int,
    seed: int,
    bos: bool,
    chats: ChatReader | None = None,
) -> CalibrationData:
    """Call `read_calibration` with a model's tokenizer and length limit, and log the warnings.

    `calibration` that is CalibrationData already is returned unchanged.
    """
    if isinstance(calibration, CalibrationData):
        return calibration
    data = read_calibration(
        calibration,
        model.tokenizer(),
        samples=samples,
        sequence_length=min(sequence_length, model.num_positions or DEFAULT_LENGTH),
        seed=seed,
        bos=bos,
        chats=chats,
    )
    if model.reader.other_parts and not data.images_W:
        data = replace(data, warnings=(*data.warnings, WITHOUT_IMAGES))
    for warning in data.warnings:
        log.warning("%s", warning)
    return data


def endless_batches(
    windows: torch.Tensor, size: int, generator: torch.Generator
) -> Iterator[torch.Tensor]:
    """Yield shuffled batches of window numbers; no window repeats before all have been used."""
    order = windows[:0]
    while True:
        while len(order) < size:
            order = torch.cat([order, windows[torch.randperm(len(windows), generator=generator)]])
        yield order[:size]
        order = order[size:]
