"""MediaAccess: whether a server takes images and videos, with which limits, or why it refuses."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from qserve.multimodal.reader import MediaReader
from qserve.multimodal.settings import MediaLimits, MediaSettings
from qserve.server.prepare.worker import WorkerClient
from qserve.server.prepare.worker_messages import LoadTokenizer, Setup
from qserve.server.requests.served_model import TEXT_ONLY
from qserve.text.tokenizer import Tokenizer

# Refusal in a process that takes no images, while other processes of the server take them.
IN_OTHER_PROCESSES = (
    'takes images and videos only in a part whose "type" is written without escapes'
)


class EngineFacts(Protocol):
    """The attributes of an engine's client that MediaAccess uses."""

    @property
    def media_kinds(self) -> tuple[str, ...]: ...

    @property
    def no_vision(self) -> str: ...


class MediaAccess(NamedTuple):
    limits: MediaLimits | None  # None: images and videos are refused
    refusal: str = TEXT_ONLY  # error text, after the model's name
    kinds: tuple[str, ...] = ("image",)  # media types that the model takes

    @classmethod
    def of(cls, engine: EngineFacts, settings: MediaSettings) -> "MediaAccess":
        if "image" in engine.media_kinds:
            return cls(settings.media_limits, kinds=tuple(engine.media_kinds))
        if engine.no_vision:
            return cls(None, f"reads text only on this server: {engine.no_vision}")
        return cls(None)

    def workers(
        self, load: LoadTokenizer, setup: Setup, number: int, arguments: Sequence[str]
    ) -> list[WorkerClient]:
        """Start the processes that read images; none if images are refused."""
        if self.limits is None:
            return []
        own = asyncio.get_running_loop().create_future()
        own.set_result(msgspec.structs.replace(setup, media=self.limits, media_kinds=self.kinds))
        return [WorkerClient(load, own, arguments) for _ in range(number)]

    def reader(self, tokenizer: Tokenizer) -> MediaReader | None:
        """Return a reader of media for this process; None: images are refused."""
        if self.limits is None:
            return None
        return MediaReader(tokenizer.folder, tokenizer.encode, self.limits, self.kinds)
