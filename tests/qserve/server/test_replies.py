"""Successful replies: the exact shapes, streamed and whole, and that both say the same."""

import asyncio
from contextlib import aclosing

import pytest

from qserve.engine.control.commands import EngineState
from qserve.engine.token_event import TokenEvent
from qserve.server.openai import generation
from qserve.server.requests.completions import completion_job
from qserve.server.requests.job import Arrival

TEXT = "Hello there, general reader."


def test_health_follows_the_engine(server, error):
    assert server.get("/health").status_code == 200
    server.client.is_alive = False
    body = error(server.get("/health"), 503)
    assert "died" in body["message"]


def test_models_by_list_and_by_name(server, error):
    listed = server.get("/v1/models").json()
    (card,) = listed["data"]
    assert listed["object"] == "list"
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 256)
    assert server.get("/v1/models/tiny").json() == card
    assert error(server.get("/v1/models/other"), 404)["param"] == "model"


def test_model_name_defaults_to_folder(make_server, docs_5m):
    from qserve.config import ServerConfig

    server = make_server(ServerConfig())
    assert server.get("/v1/models").json()["data"][0]["id"] == str(docs_5m)
    assert server.get(f"/v1/models/{docs_5m}").json()["id"] == str(docs_5m)


def test_completion(server):
    reply = server.complete(max_tokens=3).json()
    (choice,) = reply["choices"]
    assert reply["id"].startswith("cmpl-") and reply["object"] == "text_completion"
    assert reply["model"] == "tiny" and isinstance(reply["created"], int)
    tokenizer = server.tokenizer
    expected = tokenizer.decode(tokenizer.encode(TEXT)[:3])
    assert choice == {
        "index": 0,
        "text": expected,
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    prompt = len(tokenizer.encode("Once"))
    assert reply["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 3,
        "total_tokens": prompt + 3,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_chat(server):
    reply = server.chat().json()
    (choice,) = reply["choices"]
    assert reply["id"].startswith("chatcmpl-") and reply["object"] == "chat.completion"
    assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    prompt = server.client.requests[0][1]
    assert prompt == server.tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    assert reply["usage"]["prompt_tokens"] == len(prompt)
    assert reply["usage"]["completion_tokens"] == len(server.tokenizer.encode(TEXT)) + 1


def test_completion_stream_equals_whole_reply(server, chunks):
    whole = server.complete(max_tokens=100).json()
    streamed = chunks(server.complete(max_tokens=100, stream=True))
    assert "".join(c["choices"][0]["text"] for c in streamed) == whole["choices"][0]["text"] == TEXT
    reasons = [c["choices"][0]["finish_reason"] for c in streamed]
    assert reasons[-1] == "stop" and set(reasons[:-1]) == {None}
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in streamed}) == 1
    fields = {"id", "object", "created", "model", "system_fingerprint", "choices"}
    assert set(streamed[0]) == fields
    assert streamed[0]["object"] == "text_completion" and len(streamed) > 3


@pytest.mark.parametrize("route", ["complete", "chat"])
def test_system_fingerprint_equals_engine_fingerprint(server, chunks, route):
    """As it is when the reply begins: an update of the weights changes it."""
    call = getattr(server, route)
    assert call(max_tokens=2).json()["system_fingerprint"] == "qs_scripted"
    server.client.state = EngineState(fingerprint="qs_other")
    parts = chunks(call(max_tokens=2, stream=True))
    assert {part["system_fingerprint"] for part in parts} == {"qs_other"}
    server.client.state = EngineState()
    assert call(max_tokens=2).json()["system_fingerprint"] is None


def test_chat_stream_starts_with_role(server, chunks):
    streamed = chunks(server.chat(stream=True))
    first, *others = [c["choices"][0] for c in streamed]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert first["finish_reason"] is None
    assert all("role" not in choice["delta"] for choice in others)
    assert "".join(choice["delta"].get("content", "") for choice in others) == TEXT
    assert [c["finish_reason"] for c in others if c["finish_reason"]] == ["stop"]
    assert {c["object"] for c in streamed} == {"chat.completion.chunk"}
    assert len({(c["id"], c["created"], c["model"]) for c in streamed}) == 1


@pytest.mark.parametrize("route", ["complete", "chat"])
def test_stream_ends_with_usage_on_request(server, chunks, route):
    call = getattr(server, route)
    options = {"include_usage": True}
    *parts, last = chunks(call(stream=True, stream_options=options, n=2, max_tokens=4))
    assert last["choices"] == []
    assert last["usage"] == call(n=2, max_tokens=4).json()["usage"]
    assert last["usage"]["completion_tokens"] == 8
    assert all(part["usage"] is None for part in parts)


@pytest.mark.parametrize("route", ["complete", "chat"])
def test_usage_counts_tokens_of_merged_events(server, chunks, route, monkeypatch):
    async def generate(request_id, prompt_token_ids, params, watch, client, **options):
        yield TokenEvent(request_id=request_id, token_ids=(5, 6, 7))
        yield TokenEvent(request_id=request_id, token_ids=(8, 9), finish_reason="length")

    monkeypatch.setattr(server.client, "generate", generate)
    call, options = getattr(server, route), {"include_usage": True}
    *_, last = chunks(call(stream=True, stream_options=options))
    assert last["usage"] == call().json()["usage"] and last["usage"]["completion_tokens"] == 5


def test_choices_are_grouped_by_prompt(server, chunks):
    prompts = ["alpha", "beta beta", "gamma"]
    reply = server.complete(prompt=prompts, n=2, seed=40, temperature=1).json()
    assert [choice["index"] for choice in reply["choices"]] == list(range(6))
    requests = sorted(server.client.requests, key=lambda request: int(request[0].split("-")[-1]))
    encode = server.tokenizer.encode
    assert [r[1] for r in requests] == [encode(p) for p in prompts for _ in range(2)]
    assert [r[2].seed for r in requests] == [40, 41] * 3
    assert all(r[2].n == 1 for r in requests)
    assert reply["usage"]["prompt_tokens"] == sum(len(encode(p)) for p in prompts)
    streamed = chunks(server.complete(prompt=prompts, n=2, stream=True))
    texts = dict.fromkeys(range(6), "")
    for chunk in streamed:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {c["index"]: c["text"] for c in reply["choices"]}


def test_seed_beyond_the_largest_wraps(server):
    assert server.complete(n=2, seed=2**63 - 1, temperature=1).status_code == 200
    assert {r[2].seed for r in server.client.requests} == {2**63 - 1, -(2**63)}


def test_text_and_token_ids_are_the_same_prompt(server):
    token_ids = server.tokenizer.encode("same prompt")
    for prompt in ("same prompt", ["same prompt"], token_ids, [token_ids]):
        assert server.complete(prompt=prompt).status_code == 200
    assert [request[1] for request in server.client.requests] == [token_ids] * 4


@pytest.mark.parametrize("prompt", ["Once upon", [30, 31], ["a", "b"]])
def test_echo_repeats_the_prompt(server, chunks, prompt):
    texts = [prompt] if isinstance(prompt, str) else prompt
    if prompt == [30, 31]:
        texts = [server.tokenizer.decode(prompt)]
    reply = server.complete(prompt=prompt, echo=True, n=2, max_tokens=100).json()
    expected = [text + TEXT for text in texts for _ in range(2)]
    assert [choice["text"] for choice in reply["choices"]] == expected
    found = [""] * len(expected)
    for chunk in chunks(
        server.complete(prompt=prompt, echo=True, n=2, max_tokens=100, stream=True)
    ):
        found[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert found == expected


def test_special_tokens_of_prompts_follow_their_fields(server, monkeypatch):
    asked = []
    encode = type(server.tokenizer).encode

    def spy(tokenizer, text, add_special_tokens=True):
        asked.append(add_special_tokens)
        return encode(tokenizer, text, add_special_tokens)

    monkeypatch.setattr(type(server.tokenizer), "encode", spy)
    for value in (None, True, False):
        server.complete(prompt="Once", add_special_tokens=value)
    # The scripted engine encodes its own text, after each prompt.
    assert asked[::2] == [True, True, False]
    prompt = [2, *encode(server.tokenizer, "Once")]
    end = server.tokenizer.decode([2], skip_special_tokens=False)
    for value, start in ((None, ""), (True, ""), (False, end)):
        reply = server.complete(prompt=prompt, echo=True, skip_special_tokens=value)
        assert reply.json()["choices"][0]["text"].startswith(start + "Once")


def test_stop_string_ends_text_and_engine_request(server, chunks):
    choice = server.complete(stop="re, gen", max_tokens=100).json()["choices"][0]
    assert choice["text"] == "Hello the"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "re, gen")
    assert len(server.client.aborted) == 1 and not server.client.running
    reply = server.complete(stop=["zzz", "re, gen"], stream=True, max_tokens=100)
    streamed = chunks(reply)
    assert "".join(c["choices"][0]["text"] for c in streamed) == "Hello the"
    assert streamed[-1]["choices"][0]["stop_reason"] == "re, gen"
    kept = server.complete(stop=["re,"], include_stop_str_in_output=True, max_tokens=100).json()
    assert kept["choices"][0]["text"] == "Hello there,"
    assert len(server.client.aborted) == 3


def test_stop_token_is_the_stop_reason(server):
    (comma,) = server.tokenizer.encode(",")
    choice = server.chat(stop_token_ids=[comma]).json()["choices"][0]
    assert choice["message"]["content"] == "Hello there"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", comma)


def test_split_characters_are_streamed_whole(server, chunks):
    server.client.text = "日本 😀 e\u0301"
    streamed = chunks(server.chat(stream=True))
    parts = [c["choices"][0]["delta"].get("content", "") for c in streamed]
    assert "".join(parts) == server.client.text and not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("route", ["complete", "chat"])
def test_every_token_has_a_chunk_even_if_text_is_held(server, chunks, route):
    """Clients count chunks as tokens and time them: vLLM sends one for each, too."""
    server.client.text = "x" * 50
    streamed = chunks(getattr(server, route)(stop="x" * 60, stream=True, max_tokens=200))
    choices = [c["choices"][0] for c in streamed]
    if route == "complete":
        texts = [choice["text"] for choice in choices]
    else:
        opening, *choices = choices
        texts = [choice["delta"]["content"] for choice in choices]
    num_tokens = len(server.tokenizer.encode("x" * 50)) + 1
    assert len(choices) == num_tokens > 2
    assert "".join(texts) == "x" * 50 and texts[0] == ""


def test_text_parts_are_joined(server):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert server.chat(messages=[{"role": "user", "content": parts}]).status_code == 200
    prompt = server.tokenizer.decode(server.client.requests[0][1], False)
    assert prompt == "<|im_start|>user\none\ntwo<|im_end|>\n<|im_start|>assistant\n"


def test_speaker_name_reaches_template(server, monkeypatch):
    seen = []
    render = type(server.tokenizer).render_chat

    def spy(tokenizer, messages, *options):
        seen.append(messages)
        return render(tokenizer, messages, *options)

    monkeypatch.setattr(type(server.tokenizer), "render_chat", spy)
    messages = [{"role": "user", "content": "a", "name": "Ada"}, {"role": "user", "content": "b"}]
    assert server.chat(messages=messages).status_code == 200
    assert messages in seen


def test_final_message_can_be_continued(server):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Dear"}]
    assert server.chat(messages=messages, continue_final_message=True).status_code == 200
    assert server.chat(messages=messages, add_generation_prompt=False).status_code == 200
    first, second = (server.tokenizer.decode(r[1], False) for r in server.client.requests)
    assert first.endswith("assistant\nDear") and second.endswith("Dear<|im_end|>\n")


def test_max_tokens_defaults_and_clamps_to_context(server):
    prompt = len(server.tokenizer.encode("Once"))
    room = server.client.max_model_len - prompt
    limit = server.client.max_model_len
    fields = ({}, {"max_tokens": None}, {"max_tokens": 7}, {"max_tokens": limit})
    # the chat's name of the same, which counts where both are given
    other = (
        {"max_completion_tokens": None},
        {"max_completion_tokens": 40},
        {"max_completion_tokens": limit},
        {"max_tokens": 7, "max_completion_tokens": 5},
        {"max_tokens": 5, "max_completion_tokens": 7},
        {"max_tokens": 7, "max_completion_tokens": None},
    )
    for each in (*fields, *other):
        assert server.complete(**each).status_code == 200
    found = [r[2].max_tokens for r in server.client.requests]
    assert found == [16, 16, 7, room, 16, 40, room, 5, 7, 7]
    server.client.requests.clear()
    for each in (*fields, *other):
        assert server.chat(**each).status_code == 200
    room = server.client.max_model_len - len(server.client.requests[0][1])
    found = [r[2].max_tokens for r in server.client.requests]
    assert found == [room, room, 7, room, room, 40, room, 5, 7, 7]


def test_all_sampling_fields_reach_the_engine(server):
    fields = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 3,
        "min_p": 0.125,
        "seed": 9,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop": ["x"],
        "stop_token_ids": [5],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "max_tokens": 4,
    }
    assert server.complete(**fields).status_code == 200
    params = server.client.requests[0][2]
    fields |= {"stop": ("x",), "stop_token_ids": (5,)}
    assert {name: getattr(params, name) for name in fields} == fields


def test_model_defaults_rank_between_request_and_openai_defaults(tokenizer, tmp_path, server):
    from qserve.params.generation_defaults import load_defaults

    path = tmp_path / "generation_config.json"
    path.write_text(
        '{"temperature": 0.6, "top_k": 20, "top_p": null, "repetition_penalty": 1.5, "pad": 2}'
    )
    service = server.app.state.service
    object.__setattr__(service, "defaults", load_defaults(tmp_path))
    server.post("/v1/completions", {"prompt": "a", "top_k": 5})
    params = server.client.requests[0][2]
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.6, 5, 1.0, 0.0)
    assert params.repetition_penalty == 1.5


def test_ids_are_unique(server):
    ids = {server.complete().json()["id"] for _ in range(5)}
    assert len(ids) == 5


def test_stop_string_aborts_engine_request_before_client_reads(server):
    server.client.endless = True
    service = server.app.state.service
    body = b'{"prompt": "a", "stop": "there", "max_tokens": 200}'
    job = completion_job(service.model, body, Arrival(time=0.0))

    async def until_the_end() -> None:
        async with aclosing(generation.deltas(service, "", job)) as deltas:
            async for _, delta in deltas:
                assert bool(server.client.running) == (delta.finish_reason is None)
                if delta.finish_reason is not None:
                    return

    asyncio.run(until_the_end())
    assert len(server.client.aborted) == 1
