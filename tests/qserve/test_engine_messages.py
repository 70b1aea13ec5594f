"""Messages between the server and the engine's process: bytes, limits, order."""

import asyncio
import socket
from types import SimpleNamespace

import pytest

from qserve.config import EngineConfig
from qserve.engine.ipc import messages
from qserve.engine.ipc import process as process_module
from qserve.engine.ipc.client import _Output
from qserve.engine.report import EngineReport
from qserve.engine.token_event import TokenEvent, TokenLogprobs
from qserve.params.sampling_params import SamplingParams
from qserve.processes import frames
from tests.qserve.test_process import ENDLESS, REPORT


@pytest.mark.parametrize(
    "message",
    [
        messages.Start(config=EngineConfig(model="m", max_model_len=7, enforce_eager=True)),
        messages.Add(
            request_id="r",
            prompt_token_ids=[0, 1, 2**31],
            params=SamplingParams(stop=("a", "\u4e16"), seed=-(2**63), max_tokens=None),
            sent=12.25,
        ),
        messages.Add(
            request_id="r",
            prompt_token_ids=[1],
            params=SamplingParams(logit_bias={5: -2.5}, logprobs=0, frequency_penalty=0.5),
            sent=0.0,
            client="c",
            group="g",
        ),
        messages.Abort(request_id="r"),
    ],
)
def test_messages_to_engine_round_trip(message):
    frame = messages.encode(message)
    assert frames.payload_size(frame[:4]) == len(frame) - 4
    assert messages.decode(frame[4:], messages.ToEngine) == message
    with pytest.raises(messages.MessageError):
        messages.decode(frame[4:], messages.FromEngine)


def event_of(token, logprob, top_logprob):
    found = TokenLogprobs(logprob, (token, 3), (logprob, top_logprob))
    return TokenEvent(request_id="r", token_ids=(token,), logprobs=(found,))


def test_events_with_logprobs_round_trip():
    event = event_of(7, -0.5, -float("inf"))
    (got,) = messages.decode(
        messages.encode(messages.Events(events=[event], report=REPORT))[4:], messages.FromEngine
    ).events
    assert got == event and isinstance(got.logprobs[0], TokenLogprobs)


def test_merged_events_keep_every_logprob():
    events = [event_of(token, -token / 2, -9.0) for token in range(3)]

    async def merged():
        output = _Output()
        for event in events:
            output.put(event)
        first = await output.take()
        output.put(events[0])
        return first, await output.take()

    first, second = asyncio.run(merged())
    assert first.token_ids == (0, 1, 2)
    assert first.logprobs == tuple(event.logprobs[0] for event in events)
    assert second.logprobs == events[0].logprobs


def test_events_round_trip():
    event = TokenEvent(
        request_id="r", token_ids=(1, 2), finish_reason="stop", stop_token=2, ended_by_token=True
    )
    frame = messages.encode(messages.Events(events=[event], report=REPORT))
    got = messages.decode(frame[4:], messages.FromEngine)
    assert got.events == [event] and got.report == REPORT
    assert isinstance(got.report, EngineReport) and len(messages.encode(got)) < 400


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff" * 20,
        b"\x80\x04N.",
        b"\x81\xa4type\xa4Boom",
        b"\x81\xa4type\xa3Add",
        b"\x91" * 99,
    ],
)
def test_invalid_bytes_are_refused(payload):
    with pytest.raises(messages.MessageError):
        messages.decode(payload, messages.ToEngine)


def test_parameters_are_validated_on_arrival():
    add = messages.Add(request_id="r", prompt_token_ids=[1], params=SamplingParams(), sent=0.0)
    payload = messages.encode(add)[4:].replace(
        b"\xabtemperature\xcb?\xf0", b"\xabtemperature\xcb\xbf\xf0"
    )
    with pytest.raises(messages.MessageError, match="temperature"):
        messages.decode(payload, messages.ToEngine)


def test_frame_above_the_limit_is_refused_on_both_sides(monkeypatch):
    with pytest.raises(messages.MessageError, match="claims"):
        frames.payload_size(b"\xff\xff\xff\xff")
    monkeypatch.setattr(frames, "MAX_PAYLOAD_BYTES", 1000)
    with pytest.raises(messages.MessageError, match="cannot be sent"):
        messages.encode(messages.Abort(request_id="r" * 2000))


def test_frame_received_byte_by_byte_is_assembled():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for byte in messages.encode(messages.Abort(request_id="r")):
            ours.send(bytes([byte]))
        ours.close()
        assert messages.receive(theirs, messages.ToEngine) == messages.Abort(request_id="r")
        with pytest.raises(EOFError):
            messages.receive(theirs, messages.ToEngine)


def add(name: str) -> messages.Add:
    return messages.Add(request_id=name, prompt_token_ids=[1], params=ENDLESS, sent=0.0)


def busy_engine() -> tuple[SimpleNamespace, list[str]]:
    """An engine that always has work, and the calls that it got."""
    received: list[str] = []
    engine = SimpleNamespace(
        has_work=lambda: True,
        abort=lambda name: received.append(f"abort {name}"),
        add_request=lambda name, *_, **__: received.append(f"add {name}"),
    )
    return engine, received


def test_messages_beyond_limit_wait_for_next_step():
    inbox, (engine, received) = process_module.Inbox(), busy_engine()
    for index in range(process_module.MESSAGES_PER_STEP + 5):
        inbox.put(add(str(index)))
    process_module._take_messages(engine, SimpleNamespace(busy_since=None), inbox, None)
    assert len(inbox) == 5 and len(received) == process_module.MESSAGES_PER_STEP


def test_aborts_cancel_queued_requests():
    """A client sent many requests and disconnected: none of them is started."""
    inbox, (engine, received) = process_module.Inbox(), busy_engine()
    line = SimpleNamespace(busy_since=None)
    names = [str(index) for index in range(3 * process_module.MESSAGES_PER_STEP)]
    for name in names:
        inbox.put(add(name))
    process_module._take_messages(engine, line, inbox, None)
    begun = [line.removeprefix("add ") for line in received]
    received.clear()
    inbox.put(add("of another"))
    for name in names:
        inbox.put(messages.Abort(request_id=name))
    assert len(inbox) == len(begun) + 1
    process_module._take_messages(engine, line, inbox, None)
    assert received == [*(f"abort {name}" for name in begun), "add of another"]
    assert len(inbox) == 0


def test_reused_request_id_is_not_aborted_by_earlier_abort():
    inbox, (engine, received) = process_module.Inbox(), busy_engine()
    for message in (add("a"), messages.Abort(request_id="a"), add("a")):
        inbox.put(message)
    process_module._take_messages(engine, SimpleNamespace(busy_since=None), inbox, None)
    assert received == ["add a"] and len(inbox) == 0


def test_large_events_are_sent_separately_and_oversized_refused(monkeypatch):
    """Vectors of each token of a long prompt: the engine continues with the others."""
    monkeypatch.setattr(frames, "MAX_PAYLOAD_BYTES", 3000)
    sent, (engine, received) = [], busy_engine()
    engine.report = lambda: REPORT
    line = SimpleNamespace(send=lambda message: sent.append(messages.encode(message)))
    sizes = {"a": 1000, "b": 4000, "c": 1500, "d": 1500}
    events = [
        TokenEvent(request_id=name, token_ids=(), finish_reason="stop", pooled=b"x" * size)
        for name, size in sizes.items()
    ]
    process_module._send(line, events, engine)
    found = [messages.decode(data[4:], messages.FromEngine).events for data in sent]
    ends = {event.request_id: event for part in found for event in part}
    assert {name: len(ends[name].pooled) for name in "acd"} == {"a": 1000, "c": 1500, "d": 1500}
    assert ends["b"].finish_reason == "error" and ends["b"].is_asked_for
    assert received == ["abort b"]
