"""use_beam_search over HTTP, on the engine itself: the beams that LLM.beam_search finds."""

import asyncio
import json

import pytest

from qserve import LLM, BeamSearchParams
from qserve.config import EngineConfig, ServerConfig
from qserve.engine.control.commands import EngineState
from qserve.engine.engine import Engine
from qserve.engine.ipc import messages
from qserve.engine.ipc.client import RefusedError
from qserve.engine.report import EngineReport
from qserve.library.beam_outputs import sampling_params
from qserve.params.request_options import RequestOptions
from qserve.processes.frames import HEADER_BYTES
from qserve.server.app import build_app
from tests.qserve.server.conftest import Server

PROMPT = "A trait is"
SEARCH = {"use_beam_search": True, "n": 3, "max_tokens": 8, "prompt": PROMPT}


class EngineHere:
    """A fake EngineClient: the engine runs in this process and steps while a request waits."""

    is_alive, is_restarting = True, False
    state = EngineState()

    def __init__(self, engine):
        self.engine, self.inboxes = engine, {}
        self.max_model_len, self.vocab_size = engine.max_model_len, engine.vocab_size

    async def generate(self, name, prompt, params, watch, client, *, group, options):
        try:
            self.engine.add_request(
                name, prompt, params, client=client, group=group, options=options
            )
        except Exception as error:
            raise RefusedError(error.subject, error.problem, error.remedy) from None
        inbox = self.inboxes[name] = []
        while True:
            for event in self.engine.step():
                self.inboxes[event.request_id].append(event)
            await asyncio.sleep(0)
            while inbox:
                event = inbox.pop(0)
                watch(event)
                yield event
                if event.finish_reason is not None:
                    return


@pytest.fixture(scope="module")
def llm(docs_5m):
    return LLM(str(docs_5m), device="cpu", max_model_len=64, max_num_seqs=8)


@pytest.fixture
def server(docs_5m, tokenizer, llm):
    made = Server(tokenizer, ServerConfig())
    made.client = EngineHere(llm.engine)
    made.app = build_app(made.client, tokenizer, ServerConfig(), max_num_seqs=8)
    return made


def beams_of(llm, prompt=PROMPT, **fields):
    params = BeamSearchParams(**{"beam_width": 3, "max_tokens": 8} | fields)
    return llm.beam_search(prompt, params)[0].sequences


def test_beams_are_returned_with_scores(server, llm):
    reply = server.complete(**SEARCH, best_of=4, length_penalty=0.5, early_stopping="never")
    fields = {"beam_width": 4, "n": 3, "length_penalty": 0.5, "early_stopping": "never"}
    want = beams_of(llm, **fields)
    choices = reply.json()["choices"]
    assert [PROMPT + each["text"] for each in choices] == [each.text for each in want]
    assert len({each["text"] for each in choices}) == 3
    for name in ("score", "cumulative_logprob"):
        assert [each[name] for each in choices] == [getattr(each, name) for each in want]
    assert [each["score"] for each in choices] == sorted(
        (each["score"] for each in choices), reverse=True
    )
    assert reply.json()["usage"]["completion_tokens"] == 24


def test_two_prompts_and_log_probabilities(server, llm):
    asked = SEARCH | {"prompt": [PROMPT, "The borrow checker"], "n": 2, "logprobs": 1}
    choices = server.complete(**asked).json()["choices"]
    assert [each["index"] for each in choices] == [0, 1, 2, 3]
    want = [*beams_of(llm, beam_width=2), *beams_of(llm, "The borrow checker", beam_width=2)]
    got = [each["cumulative_logprob"] for each in choices]
    assert got == pytest.approx([each.cum_logprob for each in want], abs=1e-5)
    for choice in choices:
        found = choice["logprobs"]
        assert sum(found["token_logprobs"]) == pytest.approx(choice["cumulative_logprob"])
        assert "".join(found["tokens"]) == choice["text"]


def test_stream_has_each_beam_in_one_chunk(server, chunks):
    whole = server.complete(**SEARCH).json()["choices"]
    found = chunks(server.complete(**SEARCH, stream=True))
    assert [each["choices"][0]["text"] for each in found] == [each["text"] for each in whole]
    assert [each["choices"][0]["score"] for each in found] == [each["score"] for each in whole]


def test_chat(server, llm, tokenizer):
    reply = server.chat(use_beam_search=True, n=2, max_tokens=6, temperature=0.7, seed=3)
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    want = beams_of(llm, {"prompt_token_ids": ids}, beam_width=2, max_tokens=6)
    found = reply.json()["choices"]
    assert [each["score"] for each in found] == [each.score for each in want]
    texts = [tokenizer.decode(each.tokens[len(ids) :]) for each in want]
    assert [each["message"]["content"] for each in found] == texts
    assert reply.headers["x-ignored-fields"] == "temperature, seed"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"stop": "x"}, "stop"),
        ({"structured_outputs": {"regex": "a+"}}, "use_beam_search"),
        ({"best_of": 2}, "n"),
        ({"best_of": 17}, "beam_width"),
        ({"length_penalty": 1000.0}, "length_penalty"),
        ({"best_of": 9}, None),  # the engine has eight places
    ],
)
def test_unsupported_beam_requests_are_refused(server, error, fields, param):
    assert error(server.complete(**SEARCH | fields), 400)["param"] == param


@pytest.mark.parametrize("field", ["length_penalty", "early_stopping", "best_of"])
def test_beam_search_only_fields(server, error, field):
    value = {"early_stopping": True}.get(field, 2)
    assert "use_beam_search" in error(server.complete(**{field: value}), 400)["message"]


def test_description_names_the_limits(server):
    text = json.dumps(server.get("/openapi.json").json())
    assert '"best_of": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 16}' in text


def test_engine_sends_beams_to_the_server(docs_5m):
    """The event crosses the socket with its beams."""
    engine = Engine(EngineConfig(model=str(docs_5m), device="cpu", max_model_len=64))
    params = BeamSearchParams(beam_width=2, max_tokens=3, logprobs=1)
    add = messages.Add(
        request_id="0",
        prompt_token_ids=[5],
        params=sampling_params(params),
        sent=0.0,
        options=RequestOptions(beam_search=params),
    )
    add = messages.decode(messages.encode(add)[HEADER_BYTES:], messages.ToEngine)
    engine.add_request("0", add.prompt_token_ids, add.params, options=add.options)
    events = []
    while engine.has_work():
        events += engine.step()
    sent = messages.encode(messages.Events(events=events, report=EngineReport()))
    (event,) = messages.decode(sent[HEADER_BYTES:], messages.FromEngine).events
    assert event == events[0] and len(event.beams) == 2
