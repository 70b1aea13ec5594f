"""What the server and the engine process say to each other, and the frames it travels in.

A frame is the payload's length as 4 bytes, little end first, then the payload: one message in
MessagePack. Both ends decode into the types below and nothing else, so no bytes from a socket ever
become code. Knows no processes.
"""

import asyncio
import socket

import msgspec

from qserve.config import EngineConfig
from qserve.engine.report import EngineReport
from qserve.engine.request import RequestEvent
from qserve.sampling_params import SamplingParams

HEADER_BYTES = 4
MAX_PAYLOAD_BYTES = 64 * 2**20  # a prompt of a million tokens is about 5 MB


class MessageError(Exception):
    """The other end sent something that is no message: it is another program or another version."""


class Start(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the engine, first and once: load this model."""

    config: EngineConfig


class Add(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the engine: run this prompt."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    sent: float  # time.perf_counter(), which both processes share
    client: str = ""  # whose request it is, for fair turns; nothing that identifies a person
    group: str = ""  # the API request of which it is one output


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the engine: drop this request."""

    request_id: str


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the engine: the model is loaded."""

    max_model_len: int
    vocab_size: int
    report: EngineReport


class StartFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the engine: the model cannot be loaded. The fields are an InputError's."""

    subject: str
    problem: str
    remedy: str = ""


class Events(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the engine: what one step did; without events, what an abort left."""

    events: list[RequestEvent]
    report: EngineReport


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the engine: this request can never run. The fields are an InputError's."""

    request_id: str
    subject: str
    problem: str
    remedy: str = ""


class EngineDied(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the engine, last: a step failed, and every request with it."""

    message: str


ToEngine = Start | Add | Abort
FromEngine = Ready | StartFailed | Events | Refused | EngineDied

_encoder = msgspec.msgpack.Encoder()
_decoders = {
    ToEngine: msgspec.msgpack.Decoder(ToEngine),
    FromEngine: msgspec.msgpack.Decoder(FromEngine),
}


def encode(message: ToEngine | FromEngine) -> bytes:
    """The frame of a message. Raises MessageError when it is too large for any reader."""
    payload = _encoder.encode(message)
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise MessageError(
            f"a message of {len(payload)} bytes, more than {MAX_PAYLOAD_BYTES}, cannot be sent"
        )
    return len(payload).to_bytes(HEADER_BYTES, "little") + payload


def decode(payload: bytes, direction: object) -> ToEngine | FromEngine:
    """The message of a payload; `direction` is ToEngine or FromEngine. Raises MessageError."""
    try:
        return _decoders[direction].decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise MessageError(f"not a message: {error}") from error


def payload_size(header: bytes) -> int:
    """The payload's length that a header states. Raises MessageError above the limit."""
    size = int.from_bytes(header, "little")
    if size > MAX_PAYLOAD_BYTES:
        raise MessageError(f"a frame claims {size} bytes, more than {MAX_PAYLOAD_BYTES}")
    return size


def receive(connection: socket.socket, direction: object) -> ToEngine | FromEngine:
    """Wait for the next message. Raises EOFError when the other end is gone, MessageError."""
    size = payload_size(_receive_exactly(connection, HEADER_BYTES))
    return decode(_receive_exactly(connection, size), direction)


async def read(reader: asyncio.StreamReader, direction: object) -> ToEngine | FromEngine:
    """`receive` for asyncio."""
    size = payload_size(await reader.readexactly(HEADER_BYTES))
    return decode(await reader.readexactly(size), direction)


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view, filled = memoryview(data), 0
    while filled < size:
        count = connection.recv_into(view[filled:])
        if count == 0:
            raise EOFError("the other end closed the connection")
        filled += count
    return bytes(data)
