"""Windows with images to train a head on: chats of a file, and the target's own answers to them.

Legend: W windows, B windows of a batch, S tokens of a window.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from calibrate.heads.target import Target, TargetOutputs
from calibrate.texts.data import CalibrationData, read_calibration
from calibrate.texts.documents import read_documents
from calibrate.texts.image_windows import ChatReader, ImageWindow, has_images
from formats.errors import InputError

ALL = 2**31  # number of windows: no limit, as many as the file fills


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadWindows:
    """Windows of token ids, and the images of each window."""

    ids_WS: torch.Tensor  # int64
    images_W: tuple[ImageWindow, ...]  # (): no window has images
    chats: ChatReader | None

    @classmethod
    def of_data(cls, data: CalibrationData) -> "HeadWindows":
        """Return the windows of calibration data."""
        return cls(ids_WS=data.ids_WS, images_W=data.images_W, chats=data.chats)

    def __len__(self) -> int:
        return len(self.ids_WS)

    def of(self, numbers: Sequence[int]) -> "HeadWindows":
        """Return the windows with these numbers."""
        return HeadWindows(
            ids_WS=self.ids_WS[list(numbers)],
            images_W=tuple(self.images_W[number] for number in numbers) if self.images_W else (),
            chats=self.chats,
        )

    def joined(self, other: "HeadWindows") -> "HeadWindows":
        """Return these windows, followed by those of `other`."""
        return HeadWindows(
            ids_WS=torch.cat([self.ids_WS, other.ids_WS]),
            images_W=(*self._all_image_windows(), *other._all_image_windows()),
            chats=self.chats or other.chats,
        )

    @property
    def num_images(self) -> int:
        return sum(len(window.images) for window in self.images_W)

    def _all_image_windows(self) -> tuple[ImageWindow, ...]:
        without = ImageWindow(
            is_image_S=torch.zeros(self.ids_WS.shape[1], dtype=torch.bool), images=()
        )
        return self.images_W or (without,) * len(self)

    def seen(self, target: Target) -> TargetOutputs:
        """Run the target on the windows."""
        if not self.num_images:
            return target.see(self.ids_WS)
        return target.see_images(
            [
                (_inputs(self.chats, window, ids_S), window.is_image_S)
                for window, ids_S in zip(self.images_W, self.ids_WS, strict=True)
            ]
        )


def chat_windows(
    source: str,
    target: Target,
    chats: ChatReader,
    length: int,
    *,
    most: int | None = None,
    seed: int = 0,
) -> HeadWindows:
    """Cut windows from a file's chats and texts. Raises InputError."""
    found = read_calibration(
        source,
        target.tokenizer,
        samples=most or ALL,
        sequence_length=length,
        seed=seed,
        chats=chats,
    )
    return HeadWindows.of_data(found)


def answer_windows(
    source: str,
    target: Target,
    chats: ChatReader,
    length: int,
    count: int,
    *,
    temperature: float,
    seconds: float,
    seed: int = 0,
    progress: bool = True,
) -> HeadWindows:
    """Make up to `count` windows: a chat with images, whose last answer the target generates.

    The chats are used in turn, with a new answer each time. An answer continues to the end of its
    window, past end tokens. Stops after `seconds`, but makes at least one window. Raises InputError
    if no chat leaves room for an answer.
    """
    documents = [each for each in read_documents(source) if has_images(each)]
    random.Random(seed).shuffle(documents)
    folder, started = Path(source).absolute().parent, time.monotonic()
    ids: list[torch.Tensor] = []
    images_W: list[ImageWindow] = []
    torch.manual_seed(seed)
    prompts = [_prompt(each, chats, folder) for each in documents]
    prompts = [each for each in prompts if len(each.ids) < length]
    if not prompts:
        raise InputError(
            source,
            f"no chat with images leaves room for an answer in a window of {length} tokens",
            "use a larger --length, or smaller images",
        )
    with tqdm(total=count, unit="window", desc="Answering", disable=not progress) as bar:
        for number in range(count):
            if ids and time.monotonic() - started > seconds:
                break
            chat = prompts[number % len(prompts)]
            window = ImageWindow(is_image_S=torch.tensor(chat.is_image), images=tuple(chat.images))
            inputs = _inputs(chats, window, torch.tensor(chat.ids))
            ids.append(target.continued_images(inputs, length, temperature=temperature).cpu())
            is_image_S = torch.nn.functional.pad(window.is_image_S, (0, length - len(chat.ids)))
            images_W.append(ImageWindow(is_image_S=is_image_S, images=window.images))
            bar.update()
    return HeadWindows(ids_WS=torch.stack(ids), images_W=tuple(images_W), chats=chats)


def _prompt(messages: Sequence[Any], chats: ChatReader, folder: Path) -> Any:
    """Read a chat up to the beginning of its last answer."""
    if messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    return chats.read(messages, folder, add_generation_prompt=True)


def _inputs(chats: ChatReader, window: ImageWindow, ids_S: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the arguments of transformers' model for one window."""
    if window.images:
        return chats.inputs(window, ids_S)
    return {"input_ids": ids_S[None], "attention_mask": torch.ones(1, len(ids_S), dtype=torch.long)}
