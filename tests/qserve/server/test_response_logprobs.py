"""Log probabilities on /v1/responses: in OpenAI's forms, of a message's tokens and no others."""

import json

import openai
import pytest
from openai.types.responses import (
    Response,
    ResponseOutputText,
    ResponseTextDeltaEvent,
    ResponseTextDoneEvent,
)

from qserve.config import ServerConfig
from qserve.output_parsing.output_parser import OutputParser, ParseSettings
from qserve.server.openai.response_items import TokenPieces
from tests.qserve.server.test_tools import CALL, tool

LOGPROBS = "message.output_text.logprobs"
ASKED = {"include": [LOGPROBS], "top_logprobs": 2}


def ask(server, **fields):
    reply = server.post("/v1/responses", {"input": "Hi", **fields})
    assert reply.status_code == 200, reply.text
    return reply


def events_of(reply):
    blocks = reply.text.rstrip("\n").split("\n\n")
    return [json.loads(block.partition("data: ")[2]) for block in blocks]


def texts(logprobs):
    return [each["token"] for each in logprobs]


def test_every_message_token_has_logprobs(server):
    reply = ask(server, **ASKED).json()
    Response.model_validate(reply, strict=True)
    (part,) = reply["output"][0]["content"]
    ResponseOutputText.model_validate(part, strict=True)
    assert "".join(texts(part["logprobs"])) == part["text"] == server.client.text
    for entry in part["logprobs"]:
        assert bytes(entry["bytes"]).decode() == entry["token"] and entry["logprob"] == -1.25
        assert (
            len(entry["top_logprobs"]) == 2 and entry["top_logprobs"][1]["token"] == entry["token"]
        )
    assert reply["top_logprobs"] == 2
    params = server.client.requests[0][2]
    assert params.logprobs == 2


def test_default_logprobs_have_only_chosen_token(server):
    reply = ask(server, include=[LOGPROBS]).json()
    assert all(not each["top_logprobs"] for each in reply["output"][0]["content"][0]["logprobs"])
    assert ask(server, top_logprobs=0).json()["output"][0]["content"][0]["logprobs"] == []
    assert server.client.requests[1][2].logprobs is None


def test_event_logprobs_equal_whole_response(server):
    server.client.text = "Grüße, 世界!"  # tokens that are parts of a character
    found = events_of(ask(server, stream=True, **ASKED))
    whole = ask(server, **ASKED).json()["output"][0]["content"][0]
    deltas = [each for each in found if each["type"] == "response.output_text.delta"]
    (done,) = (each for each in found if each["type"] == "response.output_text.done")
    for kind, each in [(ResponseTextDeltaEvent, each) for each in deltas] + [
        (ResponseTextDoneEvent, done)
    ]:
        kind.model_validate(each, strict=True)
        assert all(
            {"token", "logprob", "top_logprobs"} == entry.keys() for entry in each["logprobs"]
        )
    entries = [each for delta in deltas for each in delta["logprobs"]]
    assert entries == done["logprobs"] and texts(entries) == texts(whole["logprobs"])
    assert len(entries) == len(server.tokenizer.encode(server.client.text))
    assert found[-1]["response"]["output"][0]["content"][0]["logprobs"] == whole["logprobs"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "content"),
    [
        (f"Let me look.{CALL}", "Let me look."),
        ("<think>Hmm, well.</think>Yes, we can.", "Yes, we can."),
        (f"<think>Hm.</think>1 < 2, so <b>\n{CALL}", "1 < 2, so <b>"),
        (f"<think>Hm.</think>{CALL}", ""),
    ],
)
def test_reasoning_and_call_tokens_have_no_logprobs(make_server, stream, text, content):
    config = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    server = make_server(ServerConfig(reasoning_parser="deepseek_r1", **config))
    if "<think>" not in text:
        text = "Hm.</think>" + text
    server.client.text = text
    tools = [{"type": "function"} | tool()["function"]]
    reply = ask(server, tools=tools, stream=stream, **ASKED)
    answer = events_of(reply)[-1]["response"] if stream else reply.json()
    messages = [item for item in answer["output"] if item["type"] == "message"]
    entries = [each for item in messages for each in item["content"][0]["logprobs"]]
    if not content:
        assert not entries
        return
    joined = "".join(texts(entries))
    # The first and last token may include part of the quotes around the text.
    assert content in joined
    assert len(joined) - len(content) < len(texts(entries)[0]) + len(texts(entries)[-1])


def test_equal_words_in_reasoning_are_excluded(tokenizer):
    """Each token is known by its place here, not by its text."""
    text = "Yes, it is.</think>Yes, it is."
    settings = ParseSettings(reasoning_parser="deepseek_r1")
    pieces, entries = TokenPieces(tokenizer, OutputParser(settings)), []
    ids = tokenizer.encode(text)
    for place, token in enumerate(ids):
        ending = "stop" if place == len(ids) - 1 else None
        for _, tokens in pieces.push(tokenizer.token_text(token), [(token, place)], ending=ending):
            entries += [place for _, place in tokens]
    count = len(tokenizer.encode("Yes, it is."))
    assert entries == [*range(len(ids) - count, len(ids))]


def test_held_back_token_logprobs_are_sent_at_end(server):
    server.client.text = "One stop, two st"
    fields = {"stop": "stopping", **ASKED}
    whole = ask(server, **fields).json()["output"][0]["content"][0]
    found = events_of(ask(server, stream=True, **fields))[-1]["response"]["output"][0]
    assert found["content"][0]["logprobs"] == whole["logprobs"]
    assert "".join(texts(whole["logprobs"])) == whole["text"]


def test_openai_client_reads_logprobs(server, run_live):
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{run_live(server)}/v1", api_key="-")
    with client.responses.stream(model="tiny", input="Hi", **ASKED) as stream:
        deltas = [each for each in stream if each.type == "response.output_text.delta"]
        final = stream.get_final_response()
    entries = final.output[0].content[0].logprobs
    assert "".join(each.token for each in entries) == final.output_text == server.client.text
    assert [each.logprobs[0].token for each in deltas if each.logprobs] == [
        t.token for t in entries
    ]


def test_unsupported_include_values_are_reported(server, error):
    include = ["reasoning.encrypted_content", "file_search_call.results", LOGPROBS]
    reply = ask(server, include=include)
    assert reply.headers["x-ignored-fields"] == (
        "include.reasoning.encrypted_content, include.file_search_call.results"
    )
    assert "x-ignored-fields" not in ask(server, include=[]).headers
    for fields, param in (
        ({"include": ["everything"]}, "include.0"),
        ({"include": "everything"}, "include"),
        ({"include": [LOGPROBS] * 9}, "include"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 21, "include": [LOGPROBS]}, "top_logprobs"),
        ({"top_logprobs": -1, "include": [LOGPROBS]}, "top_logprobs"),
        ({"logprobs": True}, "logprobs"),
    ):
        found = error(server.post("/v1/responses", {"input": "Hi", **fields}), 400)
        assert found["param"] == param
    assert LOGPROBS in found["message"]


def test_every_openai_include_value_is_known():
    from typing import get_args

    from openai.types.responses import ResponseIncludable

    from qserve.server.requests.responses import INCLUDABLE

    assert {*INCLUDABLE} == {*get_args(ResponseIncludable)}
