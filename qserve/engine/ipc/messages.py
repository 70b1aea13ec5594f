"""Messages between the server and the engine process, sent in frames (qserve/processes/frames.py).

Both ends decode MessagePack into the types below and nothing else, so no bytes from a socket ever
become code.
"""

import asyncio
import socket

import msgspec

from qserve.config import EngineConfig
from qserve.engine.control.commands import AnyCommand, EngineState, Outcome
from qserve.engine.report import EngineReport
from qserve.engine.token_event import TokenEvent
from qserve.lora.request import LoRARequest
from qserve.params.handling import DEFAULT, Handling
from qserve.params.sampling_params import SamplingParams
from qserve.processes import frames
from qserve.processes.frames import MessageError
from qserve.profile.profiler_config import ProfilerConfig


class Start(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the engine, first and once: load this model."""

    config: EngineConfig
    check: bool = True  # compare logits with those stored in the folder


class Add(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the engine: run this prompt."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    sent: float  # time.perf_counter(), which both processes share
    client: str = ""  # owner of the request, for fair scheduling; does not identify a person
    group: str = ""  # the API request of which it is one output
    handling: Handling = DEFAULT


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the engine: drop this request."""

    request_id: str


class StopWaiting(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the engine: the engine that computes this request's prompt has ended its part, or failed.

    The request awaits no further KV pages than those that are announced.
    """

    request_id: str


class ResetPrefixCache(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the engine: make later requests find no KV pages of earlier ones."""


class Profile(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the engine: start recording steps; None stops it. Answered by Done."""

    number: int  # of the command
    config: ProfilerConfig | None


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the engine: load this adapter, replacing one of the same name. Answered by Done."""

    number: int  # of the command
    lora: LoRARequest


class CancelLoad(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the engine: cancel this LoadAdapter; its client has disconnected."""

    number: int


class UnloadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the engine: unload an adapter. Requests that already use it keep it."""

    name: str


class Operate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the engine: carry out an operator's command. Answered by Done."""

    number: int  # of the message
    command: AnyCommand


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the engine: a command is done. Commands may finish out of order."""

    number: int  # of the command
    problem: str = ""  # error message; empty on success
    outcome: Outcome | None = None  # of an operator's command, or of a LoadAdapter


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the engine: the model is loaded."""

    max_model_len: int
    vocab_size: int
    report: EngineReport
    media_kinds: tuple[str, ...] = ()  # that prompts may have
    no_vision: str = ""  # what would make a vision-language model take images
    state: EngineState = EngineState()


class StartFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the engine: the model cannot be loaded. The fields are an InputError's."""

    subject: str
    problem: str
    remedy: str = ""


class Events(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the engine: events of one step; without events, the state after an abort."""

    events: list[TokenEvent]
    report: EngineReport


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the engine: this request cannot run. The fields are an InputError's."""

    request_id: str
    subject: str
    problem: str
    remedy: str = ""
    is_temporary: bool = False  # it may be able to later


class EngineDied(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the engine, last: it has failed, and all requests end."""

    message: str


class Beat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
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
FromEngine = Ready | StartFailed | Events | Refused | EngineDied | Beat | Done

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
    """Wait for the next message. Raises EOFError if the other end is gone, or MessageError."""
    return decode(frames.receive(connection), direction)


async def read(reader: asyncio.StreamReader, direction: object) -> ToEngine | FromEngine:
    """`receive` for asyncio."""
    return decode(await frames.read(reader), direction)
