"""Messages between the engine and the sandbox process, in frames (qserve/processes/frames.py)."""

from typing import Any, TypeVar

import msgspec

Message = TypeVar("Message")


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """First message to the process: the vocabulary, and the limits of one grammar."""

    tokenizer_path: str  # path of a tokenizer.json
    tokenizer: str  # content of the tokenizer.json if the model has no such file, else ""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_bytes: int  # memory in addition to the vocabulary's
    cpu_seconds: float
    wall_seconds: float


class Begun(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a fork: its limits are set. If no message follows, a limit ended the compilation."""


class Compiled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a fork: the grammar compiles within the limits."""

    text: str  # the grammar in llguidance's JSON
    num_bytes: int  # size of the compiled grammar
    copy_bytes: int  # additional bytes per output


class GrammarRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a fork: the grammar cannot be used. The fields are those of InputError."""

    subject: str
    problem: str
    remedy: str


def encode(message: Any) -> bytes:
    """Encode a message as the payload of a frame."""
    return msgspec.msgpack.encode(message)


def decode(payload: bytes, kind: type[Message]) -> Message:
    """Decode a message of a given class. Raises msgspec.ValidationError for other messages."""
    return msgspec.msgpack.decode(payload, type=kind)
