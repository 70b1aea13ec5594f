"""Messages between the server and its worker processes, in frames of qserve.processes.frames."""

import msgspec

from qserve.lora.request import LoRARequest
from qserve.multimodal.settings import MediaLimits
from qserve.processes import frames
from qserve.processes.frames import MessageError
from qserve.server.requests.job import Arrival, Job
from qserve.server.requests.served_model import TEXT_ONLY


class LoadTokenizer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """First message to the worker: load the tokenizer, while the engine loads the model."""

    folder: str
    tokenizer_folder: str | None = None  # default: folder


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Second message to the worker, once the model is loaded: ServedModel without its tokenizer."""

    names: tuple[str, ...]
    defaults: dict[str, float]
    max_model_len: int
    vocab_size: int
    chat_special_tokens: bool
    auto_tool_parser: str | None
    reasoning_parser: str | None
    structured_output_strict: bool
    media: MediaLimits | None = None  # None: images and videos are refused
    media_kinds: tuple[str, ...] = ()  # media types that the model takes
    without_media: str = TEXT_ONLY


class Prepare(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the worker: prepare the body in the next frame. One body at a time."""

    route: str  # key of JOBS or ANSWERS
    arrival: Arrival
    adapters: dict[str, LoRARequest]  # adapters that are loaded now
    seconds: float  # limit of CPU time; the process is killed beyond it


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the worker, once: the worker accepts bodies now."""


class Prepared(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the worker: the job of a body."""

    job: Job


class Answered(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the worker: the next frame is the JSON reply to the client."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the worker: the body is invalid. The fields are those of ApiError."""

    status: int
    message: str
    param: str | None


ToWorker = LoadTokenizer | Setup | Prepare
FromWorker = Loaded | Prepared | Answered | Failed

_encoder = msgspec.msgpack.Encoder()
_decoders = {
    ToWorker: msgspec.msgpack.Decoder(ToWorker),
    FromWorker: msgspec.msgpack.Decoder(FromWorker),
}
_json_decoders = {
    ToWorker: msgspec.json.Decoder(ToWorker),
    FromWorker: msgspec.json.Decoder(FromWorker),
}
JSON_START = b"{"  # no map of MessagePack starts with this byte


def encode(message: ToWorker | FromWorker) -> bytes:
    """Encode a message as a frame: in MessagePack, or in JSON if an integer exceeds 64 bits.

    Tools and JSON schemas may contain such integers, for example limits of 256-bit integers.
    """
    try:
        payload = _encoder.encode(message)
    except OverflowError:
        payload = msgspec.json.encode(message)
    return frames.frame(payload)


def decode(payload: bytes, direction: object) -> ToWorker | FromWorker:
    """Decode a message. `direction`: ToWorker or FromWorker. Raises MessageError."""
    decoders = _json_decoders if payload.startswith(JSON_START) else _decoders
    try:
        return decoders[direction].decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise MessageError(f"not a message: {error}") from error
