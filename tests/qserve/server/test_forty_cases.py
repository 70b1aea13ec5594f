"""Forty cases that clients of OpenAI's API rely on, each against a real server process.

The numbers order them by topic. Here is what requests ask for; test_forty_cases_of_operation.py has
clients, limits and ends, from 31 on.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.qserve.server.forty_cases import CONTEXT, KEY, start_cases
from tests.qserve.server.real_server import HI, Api, events, refused


@pytest.fixture(scope="module")
def running(start_server, docs_5m):
    return start_cases(start_server, docs_5m)


@pytest.fixture(scope="module")
def api(running):
    return Api(running.url, KEY)


def test_01_health_is_200(api):
    assert api.http.get("/health").status_code == 200  # 503: see case 39


def test_02_models_by_list_and_by_name(api):
    listed = api.http.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["docs", "also-docs"]
    assert all(card["max_model_len"] == CONTEXT for card in listed["data"])
    assert api.http.get("/v1/models/docs").status_code == 200
    refused(api.http.get("/v1/models/other"), 404)


def test_03_completion(api):
    reply = api.complete().json()
    (choice,) = reply["choices"]
    assert choice["text"] and choice["finish_reason"] == "length"
    usage = reply["usage"]
    assert usage["completion_tokens"] == 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5
    assert reply["id"].startswith("cmpl-")


def test_04_text_and_token_ids_are_the_same_prompt(api):
    tokens = api.http.post("/tokenize", json={"prompt": "A trait is"}).json()["tokens"]
    assert api.text(prompt=tokens, max_tokens=12) == api.text(max_tokens=12)


def test_04_hidden_states_of_a_prompt(api):
    """Through the engine process, and of a large body through the worker process."""
    many = [[5, 6, 7 + i % 3] for i in range(90)]
    for inputs, user in ((many[:3], "a"), (many, "a" * 40_000)):
        body = {"input": inputs, "dimensions": 4, "user": user}
        reply = api.http.post("/pooling", json=body).json()
        assert reply["usage"]["prompt_tokens"] == 3 * len(inputs)
        first, again = reply["data"][0], reply["data"][-3]
        assert first["data"] == pytest.approx(again["data"], abs=1e-4)
        assert len(first["data"]) == 4
        assert abs(sum(value**2 for value in first["data"]) - 1) < 1e-5


def test_05_choices_are_grouped_by_prompt(api):
    reply = api.complete(prompt=["A trait", "The borrow checker"], n=2).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in reply["choices"]]
    alone = [api.text(prompt=prompt) for prompt in ("A trait", "The borrow checker")]
    assert texts == [alone[0], alone[0], alone[1], alone[1]]


def test_06_stream_says_what_the_whole_says(api):
    chunks = events(api.complete(stream=True, max_tokens=12))
    assert "".join(c["choices"][0]["text"] for c in chunks) == api.text(max_tokens=12)
    reasons = [c["choices"][0]["finish_reason"] for c in chunks]
    assert [reason for reason in reasons if reason] == ["length"]


def test_07_chat_stream_opens_with_the_role(api):
    chunks = events(api.chat(stream=True))
    first, *others = [c["choices"][0]["delta"] for c in chunks]
    assert first["role"] == "assistant" and all("role" not in delta for delta in others)
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1


def test_08_usage_of_a_stream(api):
    *parts, last = events(api.chat(stream=True, stream_options={"include_usage": True}))
    assert last["choices"] == [] and all(part["usage"] is None for part in parts)
    whole = api.chat().json()["usage"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == whole[name]
    refused(api.chat(stream_options={"include_usage": True}))


@pytest.mark.parametrize("count", [0, 1])
def test_09_echo_with_logprobs(api, count):
    fields = {"echo": True, "logprobs": 1, "return_token_ids": True}
    choice = api.complete(max_tokens=count, **fields).json()["choices"][0]
    found, num_prompt = choice["logprobs"], len(choice["prompt_token_ids"])
    assert choice["text"].startswith("A trait is")
    assert found["token_logprobs"][0] is None and None not in found["token_logprobs"][1:]
    lengths = {len(found[name]) for name in ("tokens", "token_logprobs", "text_offset")}
    assert lengths == {num_prompt + count}
    offsets = found["text_offset"]
    assert offsets == sorted(offsets)
    for token, start in zip(found["tokens"], offsets, strict=True):
        assert choice["text"][start : start + len(token)] == token


def test_10_logprobs_of_a_completion(api):
    for count, most in ((0, 1), (5, 6)):
        found = api.complete(logprobs=count).json()["choices"][0]["logprobs"]
        assert all(max(1, count) <= len(top) <= most for top in found["top_logprobs"])
    assert refused(api.complete(logprobs=21))["param"] == "logprobs"
    assert refused(api.complete(stream=True, prompt_logprobs=1))["param"] == "prompt_logprobs"


def test_11_logprobs_of_a_chat(api):
    choice = api.chat(logprobs=True, top_logprobs=5).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == choice["message"]["content"]
    for entry in content:
        assert entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 5
        assert entry["bytes"] is None or bytes(entry["bytes"]).decode() == entry["token"]
    assert refused(api.chat(top_logprobs=5))["param"] == "top_logprobs"


def test_12_text_offset_is_the_same_in_a_stream(api):
    fields = {"logprobs": 1, "max_tokens": 12, "stop": "zzz"}
    whole = api.complete(**fields).json()["choices"][0]["logprobs"]["text_offset"]
    found = [c["choices"][0]["logprobs"] for c in events(api.complete(stream=True, **fields))]
    streamed = [offset for part in found if part for offset in part["text_offset"]]
    assert streamed == whole == sorted(whole) and len(whole) == 12


def test_13_stop_strings(api):
    text = api.text(max_tokens=20)
    stop = text[7:11]
    for kept in (False, True):
        fields = {"stop": stop, "include_stop_str_in_output": kept, "max_tokens": 20}
        choice = api.complete(**fields).json()["choices"][0]
        assert choice["text"] == text[: text.index(stop) + len(stop) * kept]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        streamed = events(api.complete(stream=True, **fields))
        assert "".join(c["choices"][0]["text"] for c in streamed) == choice["text"]
    for wrong in (["a"] * 33, "", [""]):
        assert refused(api.complete(stop=wrong))["param"].startswith("stop")


def test_14_stop_tokens(api):
    fields = {"max_tokens": 12, "return_token_ids": True}
    token = api.complete(**fields).json()["choices"][0]["token_ids"][3]
    choice = api.complete(stop_token_ids=[token], **fields).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token)


def test_15_tokens_that_there_must_be(api):
    reply = api.complete(min_tokens=9, max_tokens=9, ignore_eos=True).json()
    assert reply["usage"]["completion_tokens"] == 9
    assert refused(api.complete(min_tokens=9, max_tokens=5))["param"] == "min_tokens"


def test_16_seeds(api):
    fields = {"temperature": 1, "max_tokens": 16}
    alone = [api.text(seed=seed, **fields) for seed in (1, 2)]
    assert alone[0] != alone[1]
    with ThreadPoolExecutor(8) as pool:
        crowd = list(pool.map(lambda n: api.text(seed=1 + n % 2, **fields), range(8)))
    assert crowd == alone * 4
    assert refused(api.complete(seed=2**63))["param"] == "seed"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-0.1, 2.1, "hot")),
        *(("top_p", 0), ("min_p", 2), ("repetition_penalty", 0)),
    ],
)
def test_17_numbers_out_of_range(api, field, value):
    assert refused(api.complete(**{field: value}))["param"] == field


def test_17_numbers_that_are_none(api):
    assert refused(api.raw(b'{"prompt": "a", "temperature": NaN}'))["param"] == "temperature"


def test_18_logit_bias(api):
    tokens = api.complete(logit_bias={"300": 100}, return_token_ids=True).json()
    assert set(tokens["choices"][0]["token_ids"]) == {300}
    error = refused(api.complete(logit_bias={"8192": 1}))
    assert "8192" in error["message"] and "8191" in error["message"]
    refused(api.complete(logit_bias={"a": 1}))


def test_18_tokens_that_may_come(api):
    ids = list(range(300, 340))
    for call in (api.complete, api.chat):
        reply = call(allowed_token_ids=ids, temperature=1, max_tokens=8, return_token_ids=True)
        found = reply.json()["choices"][0]["token_ids"]
        assert len(found) == 8 and set(found) <= set(ids)
    word = api.text().split()[0]
    assert word not in api.text(bad_words=[word]).split()
    form = {"structured_outputs": {"regex": "[0-9]+"}, "allowed_token_ids": ids}
    for stream in (False, True):
        message = refused(api.complete(**form, stream=stream))["message"]
        assert "allowed_token_ids, structured_outputs" in message and "no token" in message


@pytest.mark.parametrize("n", [0, 10**9, 10**30])
def test_19_too_many_choices(api, n):
    assert refused(api.complete(n=n))["param"] == "n"


def test_20_bodies_that_are_too_much(api):
    assert refused(api.complete(prompt=["a"] * 100_000))["param"] == "prompt"
    refused(api.raw(b"x" * 4_000_001), 413)
    refused(api.http.get("/health", headers={"x": "y" * 40_000}), 431)
    refused(api.raw(b"[" * 100_000))
    assert api.complete().status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        *(b"{", b"[]", b"null", b"17", b"\xff\xfe", b'{"prompt": "\\ud800"}'),
        b'{"prompt": "a"',
    ],
)
def test_21_bodies_that_are_no_request(api, body):
    refused(api.raw(body))


def test_21_strange_text_and_types(api):
    assert api.complete(prompt="a\x00b").status_code == 200
    refused(api.raw(b'{"prompt": "a"}', "text/plain"), 415)


def test_22_empty_prompts(api):
    for prompt in ("", [], [""], None):
        assert refused(api.complete(prompt=prompt))["param"] == "prompt"
    for messages in ([], None):
        assert refused(api.chat(messages=messages))["param"] == "messages"


def test_23_tokens_that_are_none(api):
    for token in (-1, 8192):
        assert refused(api.complete(prompt=[5, token]))["param"] == "prompt"


def test_24_length_of_the_prompt(api):
    assert api.complete(prompt=[5] * (CONTEXT - 1)).json()["usage"]["completion_tokens"] == 1
    for length in (CONTEXT, CONTEXT + 1):
        error = refused(api.complete(prompt=[5] * length))
        assert error["message"].startswith(f"This model's maximum context length is {CONTEXT}")
    refused(api.complete(prompt="word " * 500_000))
    tokens = [5] * 300 + [6, 7]
    reply = api.complete(prompt=tokens, truncate_prompt_tokens=2, return_token_ids=True).json()
    assert reply["choices"][0]["prompt_token_ids"] == [6, 7]
    fields = {"truncate_prompt_tokens": 2, "truncation_side": "right", "return_token_ids": True}
    reply = api.complete(prompt=tokens[::-1], **fields).json()
    assert reply["choices"][0]["prompt_token_ids"] == [7, 6]


def test_25_models_that_are_not_served(api):
    assert "gpt-9" in refused(api.complete(model="gpt-9"), 404)["message"]
    assert api.complete(model="also-docs").status_code == 200  # and without a model: all others


def test_26_tools(api):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert api.chat(tools=tools, tool_choice="none").status_code == 200
    named = {"type": "function", "function": {"name": "g"}}
    for fields in ({"tool_choice": named}, {"tool_choice": "auto"}, {}):
        refused(api.chat(**{"tools": tools, **fields}))
    assert api.chat(tools=[]).status_code == 200
    kinds = {"kind": {"enum": ["mold", "die"]}}
    tools[0]["function"]["parameters"] |= {"properties": kinds, "additionalProperties": False}
    asked = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    (choice,) = api.chat(**asked, max_tokens=60).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and call["function"]["name"] == "f"
    assert json.loads(call["function"]["arguments"]).get("kind", "die") in ("mold", "die")


def test_27_forms_that_cannot_be(api):
    for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar"):
        error = refused(api.chat(**{name: "x"}))
        assert error["param"] == name and "structured_outputs" in error["message"]
    refused(api.chat(response_format={"type": "json_schema"}))
    assert api.chat(response_format={"type": "text"}).status_code == 200
    wrong = [{"json": {"type": "x"}}, {"json": {"$ref": "#/nowhere"}}, {"json": {"$ref": "#"}}]
    for form in (*wrong, {"regex": "[a"}, {"regex": "a" * 100_000}, {"regex": "(" * 1000}):
        assert "structured_outputs" in refused(api.chat(structured_outputs=form))["message"]
    assert api.complete().status_code == 200


def test_27_forms(api):
    schema = {"type": "object", "properties": {"kind": {"enum": ["a", "b"]}}, "required": ["kind"]}
    schema["additionalProperties"] = False
    named = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    text = api.chat(response_format=named, max_tokens=60).json()["choices"][0]["message"]["content"]
    assert json.loads(text)["kind"] in ("a", "b")
    reply = api.chat(response_format={"type": "json_object"}, max_tokens=100)
    (choice,) = reply.json()["choices"]
    text = choice["message"]["content"]
    assert text.startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(text), dict)


def test_28_parts_of_messages(api):
    text = {"type": "text", "text": "Hi"}
    assert api.chat(messages=[{"role": "user", "content": [text, text]}]).status_code == 200
    image = {"type": "image_url", "image_url": {"url": "https://a.example/x.png"}}
    refused(api.chat(messages=[{"role": "user", "content": [text, image]}]))
    refused(api.chat(messages=[{"role": "nobody", "content": "Hi"}]))
    begun = [*HI, {"role": "assistant", "content": "A trait is"}]
    continued = api.chat(messages=begun, continue_final_message=True).json()
    closed = api.chat(messages=begun).json()
    assert continued["usage"]["prompt_tokens"] < closed["usage"]["prompt_tokens"]
    refused(api.chat(messages=begun, continue_final_message=True, add_generation_prompt=True))


@pytest.mark.parametrize("text", ["plain", "日本 \U0001f600", "a\x00\x1b\n\u202e"])
def test_29_tokens_make_the_round_trip(api, text):
    tokens = api.http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert api.http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": text}
    count = api.http.post("/tokenize", json={"messages": HI}).json()["count"]
    assert count == api.chat().json()["usage"]["prompt_tokens"]


def test_30_characters_of_several_tokens(api):
    tokens = api.http.post("/tokenize", json={"prompt": "日本"}).json()["tokens"]
    assert len(tokens) > 2  # the bytes of each character are tokens of their own
    # Of the bytes of both characters all but the last come as prompt; that one is made certain.
    fields = {"prompt": tokens[:-1], "max_tokens": 1, "logit_bias": {str(tokens[-1]): 100}}
    streamed = events(api.complete(stream=True, **fields))
    whole = api.text(**fields)
    assert "".join(c["choices"][0]["text"] for c in streamed) == whole
    assert "\ufffd" not in whole and "日" not in whole
