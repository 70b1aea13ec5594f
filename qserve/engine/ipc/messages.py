"""Messages between the server and the engine process, sent in frames (qserve/processes/frames.py).

Both ends decode MessagePack into the types below and into nothing else, so bytes from a socket
never become code.
"""

import asyncio
import socket

import msgspec

from qserve.config import EngineConfig
from qserve.engine.control.commands import AnyCommand, EngineState, Outcome
from qserve.engine.report import EngineReport
from qserve.engine.token_event import TokenEvent
from qserve.lora.request import LoRARequest
from qserve.params.request_options import DEFAULT, RequestOptions
from qserve.params.sampling_params import SamplingParams
from qserve.processes import frames
from qserve.processes.frames import MessageError
from qserve.profile.profiler_config import ProfilerConfig


class Start(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the engine, as the first message: load this model."""

    config: EngineConfig
    check: bool = True  # compare logits with those stored in the model's folder


class Add(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the engine: run this prompt."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    sent: float  # time.perf_counter(), which both processes share
    client: str = ""  # owner of the request, for fair scheduling; does not identify a person
    group: str = ""  # the API request of which it is one output
    options: RequestOptions = DEFAULT


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the engine: drop this request."""

    request_id: str


class StopWaiting(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the engine: the prefill engine of this request has finished or failed.

    The request waits only for KV pages that are already announced.
    """

    request_id: str


class ResetPrefixCache(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the engine: empty the prefix cache."""


class Profile(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the engine: start recording steps; None stops it. Answered by Done."""

    number: int  # of the command
    config: ProfilerConfig | None


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the engine: load this adapter; replace an adapter of the same name. Answered by Done."""

    number: int  # of the command
    lora: LoRARequest


class CancelLoad(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the engine: cancel this LoadAdapter; its client has disconnected."""

    number: int


class UnloadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the engine: unload an adapter. Requests that already use it keep it."""

    name: str


class Operate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the engine: run an operator's command. Answered by Done."""

    number: int  # of the message
    command: AnyCommand


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the engine: a command is done. Commands may finish out of order."""

    number: int  # of the command
    problem: str = ""  # error message; empty on success
    outcome: Outcome | None = None  # for Operate and LoadAdapter


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the engine: the model is loaded."""

    max_model_len: int
    vocab_size: int
    report: EngineReport
    media_kinds: tuple[str, ...] = ()  # kinds of media that prompts may contain
    no_vision: str = ""  # remedy if a vision-language model takes no images here
    state: EngineState = EngineState()


class StartFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the engine: the model cannot be loaded. The fields are an InputError's."""

    subject: str
    problem: str
    remedy: str = ""


class Events(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the engine: events of one step. After an abort it may have a report but no events."""

    events: list[TokenEvent]
    report: EngineReport


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the engine: this request cannot run. The fields are an InputError's."""

    request_id: str
    subject: str
    problem: str
    remedy: str = ""
    is_temporary: bool = False  # True: the request may be able to run later


class EngineDied(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the engine, as the last message: the engine has failed and all requests end."""

    message: str


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the engine, every second: the process is alive."""

    busy_seconds: float  # duration of the current step so far; 0: idle


ToEngine = (
    Start
    | Add
    | Abort
    | StopWaiting
    | ResetPrefixCache
    | Profile
    | Operate
    | LoadAdapter
    | CancelLoad
    | UnloadAdapter
)
FromEngine = Ready | StartFailed | Events | Refused | EngineDied | Heartbeat | Done

_encoder = msgspec.msgpack.Encoder()
_decoders = {
    ToEngine: msgspec.msgpack.Decoder(ToEngine),
    FromEngine: msgspec.msgpack.Decoder(FromEngine),
}


def encode(message: ToEngine | FromEngine) -> bytes:
    """Encode a message as a frame. Raises MessageError if it is too large."""
    return frames.frame(_encoder.encode(message))


def decode(payload: bytes, direction: object) -> ToEngine | FromEngine:
    """Decode a payload; `direction` is ToEngine or FromEngine. Raises MessageError."""
    try:
        return _decoders[direction].decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise MessageError(f"not a message: {error}") from error


def receive(connection: socket.socket, direction: object) -> ToEngine | FromEngine:
    """Wait for the next message. Raises EOFError if the other end is gone, and MessageError."""
    return decode(frames.receive(connection), direction)


async def read(reader: asyncio.StreamReader, direction: object) -> ToEngine | FromEngine:
    """Wait for the next message, as `receive` does, on an asyncio stream."""
    return decode(await frames.read(reader), direction)
