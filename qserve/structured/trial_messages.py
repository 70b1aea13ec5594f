"""Messages between the engine and the trial process, in frames (qserve/processes/frames.py)."""

from typing import Any, TypeVar

import msgspec

Message = TypeVar("Message")


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """First message to the process: the vocabulary, and the limits of one grammar."""

    tokenizer_path: str  # path of a tokenizer.json
    tokenizer: str  # its text if the model has no such file, else empty
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_bytes: int  # in addition to the vocabulary's memory
    cpu_seconds: float
    wall_seconds: float


class Begun(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a fork: its limits are in force. If nothing follows, they ended the compilation."""


class Compiled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a fork: the grammar compiles within the limits."""

    text: str  # in llguidance's JSON
    num_bytes: int  # size of the compiled grammar
    copy_bytes: int  # additional bytes per output


class TrialRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a fork: the grammar cannot be used. The fields are an InputError's."""

    subject: str
    problem: str
    remedy: str


def encode(message: Any) -> bytes:
    """Payload of a message's frame."""
    return msgspec.msgpack.encode(message)


def decode(payload: bytes, kind: type[Message]) -> Message:
    """Decode a message. Raises msgspec.ValidationError for any other kind."""
    return msgspec.msgpack.decode(payload, type=kind)
