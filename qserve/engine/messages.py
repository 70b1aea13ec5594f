"""What the server and the engine process say to each other. Travels in frames (qserve/frames.py).

Both ends decode MessagePack into the types below and nothing else, so no bytes from a socket ever
become code. Knows no processes.
"""

import asyncio
import socket

import msgspec

from qserve import frames
from qserve.config import EngineConfig
from qserve.engine.report import EngineReport
from qserve.engine.request import RequestEvent
from qserve.frames import MessageError
from qserve.handling import DEFAULT, Handling
from qserve.lora.request import LoRARequest
from qserve.profile.profiler_config import ProfilerConfig
from qserve.sampling_params import SamplingParams


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
    handling: Handling = DEFAULT


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the engine: drop this request."""

    request_id: str


class ResetPrefixCache(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the engine: let requests that come after this find no KV pages of earlier ones."""


class Profile(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the engine: record steps; None: end that. Answered by Done."""

    number: int  # of the question
    config: ProfilerConfig | None


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the engine: read this adapter, in place of one of its name. Answered by Done."""

    number: int  # of the question
    lora: LoRARequest


class UnloadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the engine: forget an adapter. Requests that have it keep it."""

    name: str


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the engine: what a question asks for is done. Others may be answered before it."""

    number: int  # of the question
    problem: str = ""  # why not


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
    """From the engine, last: it cannot go on, and every request ends with it."""

    message: str


class Beat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the engine, every second: the process runs."""

    busy_seconds: float  # that the present step has taken so far; 0: nothing to do


ToEngine = Start | Add | Abort | ResetPrefixCache | Profile | LoadAdapter | UnloadAdapter
FromEngine = Ready | StartFailed | Events | Refused | EngineDied | Beat | Done

_encoder = msgspec.msgpack.Encoder()
_decoders = {
    ToEngine: msgspec.msgpack.Decoder(ToEngine),
    FromEngine: msgspec.msgpack.Decoder(FromEngine),
}


def encode(message: ToEngine | FromEngine) -> bytes:
    """The frame of a message. Raises MessageError when it is too large for any reader."""
    return frames.frame(_encoder.encode(message))


def decode(payload: bytes, direction: object) -> ToEngine | FromEngine:
    """The message of a payload; `direction` is ToEngine or FromEngine. Raises MessageError."""
    try:
        return _decoders[direction].decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise MessageError(f"not a message: {error}") from error


def receive(connection: socket.socket, direction: object) -> ToEngine | FromEngine:
    """Wait for the next message. Raises EOFError when the other end is gone, MessageError."""
    return decode(frames.receive(connection), direction)


async def read(reader: asyncio.StreamReader, direction: object) -> ToEngine | FromEngine:
    """`receive` for asyncio."""
    return decode(await frames.read(reader), direction)
