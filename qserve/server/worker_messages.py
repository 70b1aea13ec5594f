"""What the server and its worker process say to each other; they travel in qserve.frames."""

import msgspec

from qserve import frames
from qserve.frames import MessageError
from qserve.lora.request import LoRARequest
from qserve.server.job import Job


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the worker, first and once: a ServedModel without its tokenizer."""

    folder: str
    names: tuple[str, ...]
    defaults: dict[str, float]
    max_model_len: int
    vocab_size: int
    chat_special_tokens: bool
    auto_tool_parser: str | None
    reasoning_parser: str | None


class Prepare(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the worker: make a job of the body, which is the next frame. The next comes after it."""

    route: str  # one of JOBS
    arrived: float
    adapters: dict[str, LoRARequest]  # that there are now


class Prepared(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the worker."""

    job: Job


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the worker: the body is at fault. The fields are an ApiError's."""

    status: int
    message: str
    param: str | None


ToWorker = Setup | Prepare
FromWorker = Prepared | Failed

_encoder = msgspec.msgpack.Encoder()
_decoders = {
    ToWorker: msgspec.msgpack.Decoder(ToWorker),
    FromWorker: msgspec.msgpack.Decoder(FromWorker),
}


def encode(message: ToWorker | FromWorker) -> bytes:
    """The frame of a message."""
    return frames.frame(_encoder.encode(message))


def decode(payload: bytes, direction: object) -> ToWorker | FromWorker:
    """The message of a payload; `direction` is ToWorker or FromWorker. Raises MessageError."""
    try:
        return _decoders[direction].decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise MessageError(f"not a message: {error}") from error
