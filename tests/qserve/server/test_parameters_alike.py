"""Every sampling parameter is read alike in Python and on both routes: a row of ROWS each."""

import json
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest

from qserve import SamplingParams
from qserve.config import ServerConfig
from qserve.errors import ParameterError
from qserve.params.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
)
from qserve.server.requests.protocol import MAX_STOP_CHARS
from qserve.text.tokenizer import Tokenizer
from tests.qserve.server.conftest import Server

ROUTES = ("complete", "chat")
NAN = float("nan")
NO_INTEGERS = ("1", 1.5, True, [], {}, NAN, 1e300)
NO_NUMBERS = ("1", True, [], {})
NO_FLAGS = (1, "true", 0.5, [])
NO_TEXTS = (1, True, {}, [1], ["a", 2])
NO_IDS = ("1", 1, {}, ["1"], [1.5], [True], [-1])


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    good: tuple[Any, ...]
    bad: tuple[Any, ...]
    # the chat's own name, and what else it needs
    chat_name: str = ""
    chat_fields: tuple[tuple[str, Any], ...] = ()
    python: tuple[tuple[str, Any], ...] = ()  # other parameters that it needs
    server_limits: tuple[Any, ...] = ()  # values that only the server refuses

    def body(self, route: str, value: Any) -> dict[str, Any]:
        is_other = route == "chat" and self.chat_name
        body = dict(self.python) | {(self.chat_name if is_other else self.name): value}
        return body | (dict(self.chat_fields) if route == "chat" else {})


ROWS = (
    Row(name="n", good=(1, 3, 128, 2.0), bad=(0, -1, 129, 10**30, *NO_INTEGERS)),
    Row(name="temperature", good=(0, 0.0, 0.7, 2), bad=NO_NUMBERS, server_limits=(2.1, 1e5)),
    Row(name="top_p", good=(0.1, 1, 1.0), bad=(0, 0.0, -1, 1.01, NAN, *NO_NUMBERS)),
    Row(name="top_k", good=(-1, 0, 5, 2**63 - 1), bad=(-2, 2**63, *NO_INTEGERS)),
    Row(name="min_p", good=(0, 0.5, 1), bad=(-0.01, 1.5, NAN, *NO_NUMBERS)),
    Row(name="presence_penalty", good=(-2, 0, 1.5), bad=(-2.1, 3, NAN, *NO_NUMBERS)),
    Row(name="frequency_penalty", good=(-2, 0, 1.5), bad=(-2.1, 3, NAN, *NO_NUMBERS)),
    Row(name="repetition_penalty", good=(0.01, 1, 100), bad=(0, -1, 101, NAN, *NO_NUMBERS)),
    Row(
        name="logit_bias",
        good=({"5": 1}, {"5": -100, "7": 100.0}, {}),
        bad=(
            *({"5": 101}, {"5": NAN}, {"-5": 1}, {"a": 1}, {"1.5": 1}, {"5": "1"}, {"5": None}),
            *({"5": True}, {"5": []}, {str(i): 0 for i in range(MAX_LOGIT_BIAS + 1)}, 5, "a"),
        ),
    ),
    Row(
        name="logprobs",
        good=(0, 5, 20),
        bad=(-1, 21, *(value for value in NO_INTEGERS)),
        chat_name="top_logprobs",
        chat_fields=(("logprobs", True),),
    ),
    Row(name="prompt_logprobs", good=(0, 5, 20), bad=(-1, 21, *NO_INTEGERS)),
    Row(name="seed", good=(0, -(2**63), 2**63 - 1), bad=(2**63, -(2**63) - 1, *NO_INTEGERS)),
    Row(name="max_tokens", good=(1, 20), bad=(0, -1, *NO_INTEGERS)),
    Row(name="min_tokens", good=(0, 16), bad=(-1, 17, *NO_INTEGERS), python=(("max_tokens", 16),)),
    Row(
        name="stop",
        good=("a", ["a", "b"], []),
        bad=("", ["a", ""], *NO_TEXTS),
        server_limits=(["a"] * 33, ["a" * (MAX_STOP_CHARS + 1)], ["a" * 999] * 5),
    ),
    Row(
        name="stop_token_ids",
        good=([], [5, 6]),
        bad=([1] * 1025, *NO_IDS),
    ),
    Row(name="ignore_eos", good=(True, False), bad=NO_FLAGS),
    Row(name="include_stop_str_in_output", good=(True, False), bad=NO_FLAGS),
    Row(name="skip_special_tokens", good=(True, False), bad=NO_FLAGS),
    Row(
        name="structured_outputs",
        good=({"regex": "a+"}, {"json_object": True}, {"choice": ["a", "b"]}),
        bad=({}, {"regex": "a", "json_object": True}, {"regex": 5}, {"tone": 1}, {"choice": [1]}),
    ),
    Row(
        name="allowed_token_ids",
        good=([5], [5, 6]),
        bad=([], [1] * (MAX_ALLOWED_TOKEN_IDS + 1), *NO_IDS),
    ),
    Row(
        name="bad_words",
        good=(["a"], ["a", "b c"], []),
        bad=(
            *([""], [" "], ["a"] * (MAX_BAD_WORDS + 1), ["a" * (MAX_BAD_WORD_CHARS + 1)]),
            *(1, {}, [1], ["a", 2]),
        ),
    ),
)
# Python's alone: the server fills the first from `bad_words`, and its outputs are always texts.
NOT_OF_REQUESTS = {"bad_words_token_ids", "detokenize"}
BY_NAME = {row.name: row for row in ROWS}


@pytest.fixture(scope="module")
def server(docs_5m):
    return Server(Tokenizer(docs_5m), ServerConfig(served_model_name=["tiny"]))


def post(server, route, body):
    """As JSON with Python's NaN and Infinity, which a client may send."""
    path = {"complete": "/v1/completions", "chat": "/v1/chat/completions"}[route]
    asked = {
        "complete": {"prompt": "Once"},
        "chat": {"messages": [{"role": "user", "content": "a"}]},
    }
    content = json.dumps(asked[route] | body)
    return server.request(
        "POST", path, content=content, headers={"content-type": "application/json"}
    )


def asked_of_the_engine(server, route, body):
    """Return the first output of a request."""
    server.client.requests.clear()
    reply = post(server, route, body)
    assert reply.status_code == 200, reply.text
    return server.client.requests[0][2]


def test_every_parameter_is_in_the_table():
    assert {field.name for field in fields(SamplingParams)} == {*BY_NAME} | NOT_OF_REQUESTS


@pytest.mark.parametrize("route", ROUTES)
def test_defaults_are_equal_on_every_route(server, route):
    """But of the length: a completion's is OpenAI's, a chat has all the room."""
    found = asked_of_the_engine(server, route, {})
    nulls = asked_of_the_engine(server, route, dict.fromkeys(BY_NAME))
    python = SamplingParams()
    assert found == nulls and SamplingParams(**dict.fromkeys(BY_NAME)).max_tokens is None
    for name in BY_NAME.keys() - ({"max_tokens"} if route == "chat" else set()):
        assert getattr(found, name) == getattr(python, name), name
        if name != "max_tokens":
            assert getattr(SamplingParams(**{name: None}), name) == getattr(python, name), name


@pytest.mark.parametrize("name", BY_NAME)
def test_valid_values_are_equal_on_every_route(server, name):
    row = BY_NAME[name]
    for value in row.good:
        python = SamplingParams(**dict(row.python) | {name: value})
        for route in ROUTES:
            found = asked_of_the_engine(server, route, row.body(route, value))
            if name != "n":  # each of its outputs is a request of its own
                assert getattr(found, name) == getattr(python, name), (route, value)
            else:
                assert len(server.client.requests) == python.n


def test_values_only_python_accepts():
    """Other lists and numbers than JSON has."""
    found = SamplingParams(
        top_k=np.int64(5),
        temperature=np.float32(0.5),
        allowed_token_ids=range(20, 23),
        stop_token_ids=np.array([7, 8]),
        stop={"a"},
        logit_bias=[(5, 1)],
    )
    same = SamplingParams(
        top_k=5,
        temperature=0.5,
        allowed_token_ids=[20, 21, 22],
        stop_token_ids=[7, 8],
        stop="a",
        logit_bias={5: 1.0},
    )
    assert found == same and {type(each) for each in found.stop_token_ids} == {int}


@pytest.mark.parametrize("name", BY_NAME)
def test_invalid_values_are_refused_equally(server, error, name):
    """Every route refuses a bad value of a field with the same text."""
    row = BY_NAME[name]
    for value in row.bad:
        try:
            SamplingParams(**dict(row.python) | {name: value})
        except ParameterError as problem:
            subject, message = problem.subject, str(problem)
        else:
            pytest.fail(f"{value!r:.50} passed")
        for route in ROUTES:
            found = error(post(server, route, row.body(route, value)), 400)
            renamed = row.chat_name if route == "chat" and row.chat_name else name
            assert found["param"] == subject.replace(name, renamed, 1), (route, value)
            said = found["message"].removesuffix(".")
            assert said == message.replace(name, renamed, 1).removesuffix("."), (route, value)


@pytest.mark.parametrize("name", [name for name, row in BY_NAME.items() if row.server_limits])
def test_server_only_limits(server, error, name):
    row = BY_NAME[name]
    for value in row.server_limits:
        SamplingParams(**{name: value})
        for route in ROUTES:
            found = error(post(server, route, row.body(route, value)), 400)
            assert found["param"].partition(".")[0] == name, (route, value)


@pytest.mark.parametrize("value", [-0.1, NAN, 1e999])
def test_invalid_temperatures_are_refused(server, error, value):
    with pytest.raises(ParameterError, match="temperature"):
        SamplingParams(temperature=value)
    for route in ROUTES:
        found = error(post(server, route, {"temperature": value}), 400)
        assert found["param"] == "temperature" and "expected 0 to 2" in found["message"]
