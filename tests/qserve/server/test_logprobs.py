"""Log probabilities in replies, penalties and bias in requests: the forms, and what is refused."""

import pytest

from qserve.engine.token_event import TokenLogprobs
from qserve.server.openai.logprobs import TextOffsets, completion_logprobs

TEXT = "Hello there, general reader."


def script(server):
    return server.tokenizer.encode(TEXT)


def text_of(server, token):
    return server.tokenizer.decode([token], skip_special_tokens=False)


def test_chat_logprobs(server):
    """The end token is not shown, and so are its log probabilities."""
    choice = server.chat(logprobs=True, top_logprobs=2).json()["choices"][0]
    assert set(choice["logprobs"]) == {"content", "refusal"}
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [text_of(server, t) for t in script(server)]
    assert "".join(entry["token"] for entry in content) == choice["message"]["content"]
    for entry, token in zip(content, script(server), strict=True):
        text, before = text_of(server, token), text_of(server, token - 1)
        assert entry["logprob"] == -1.25 and bytes(entry["bytes"]).decode() == text
        tops = [(top["token"], top["logprob"]) for top in entry["top_logprobs"]]
        assert tops == [(before, -0.5), (text, -1.25)]


def test_minus_infinity_is_a_number_in_json(server):
    choice = server.chat(logprobs=True, top_logprobs=3, max_tokens=1).json()["choices"][0]
    assert choice["logprobs"]["content"][0]["top_logprobs"][2]["logprob"] == -9999.0


@pytest.mark.parametrize("text", ["\U0001f995", "a \u65e5\u672c, \u00e9t\u00e9", "real \ufffd"])
def test_partial_characters_have_their_bytes(server, text):
    """On every route the bytes of all tokens make the text; no part has the name of another."""
    server.client.text = text
    whole = server.chat(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    asked = {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    (item,) = server.post("/v1/responses", asked).json()["output"]
    for content in (whole, item["content"][0]["logprobs"]):
        assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == text
        for entry in content:
            assert all(each["bytes"] for each in entry["top_logprobs"])
            assert entry["top_logprobs"][1]["bytes"] == entry["bytes"]
        names = {(entry["token"], bytes(entry["bytes"])) for entry in content}
        assert len(names) == len({name for name, _ in names}) == len({data for _, data in names})
    assert any("\\x" in entry["token"] for entry in whole)


@pytest.mark.parametrize(("asked", "entries"), [(0, 1), (1, 2), (2, 2)])
def test_completion_logprobs(server, asked, entries):
    """The token itself is always among the alternatives."""
    choice = server.complete(logprobs=asked, max_tokens=100).json()["choices"][0]
    found = choice["logprobs"]
    assert set(found) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert "".join(found["tokens"]) == choice["text"] == TEXT
    for text, logprob, top, offset in zip(*(found[k] for k in found), strict=True):
        assert choice["text"][offset:].startswith(text)
        assert logprob == top[text] == -1.25 and len(top) == entries


def test_alternatives_with_equal_text(tokenizer):
    """Parts of characters have one text, and still a name each."""
    one, two, three = (tokenizer.encode(c)[0] for c in "\U0001f995\u65e5\u00ff")
    assert {tokenizer.token_text(token) for token in (one, two, three)} == {"\ufffd"}
    drawn = TokenLogprobs(-3.0, (one, two, three), (-1.0, -2.0, -3.0))
    found = completion_logprobs(tokenizer, [(three, drawn)], [0])
    assert found["tokens"] == ["bytes:\\xc3"]
    top = {"bytes:\\xf0\\x9f": -1.0, "bytes:\\xe6": -2.0, "bytes:\\xc3": -3.0}
    assert found["top_logprobs"] == [top]


def test_tokens_with_the_same_bytes_are_two_entries():
    """Vocabularies with a token for each byte have some texts twice."""

    class Alike:
        def token_bytes(self, token):
            return b"\n" if token < 8 else b"\xf0"

    drawn = TokenLogprobs(-2.0, (3, 4, 8, 9), (-1.0, -2.0, -3.0, -4.0))
    (top,) = completion_logprobs(Alike(), [(4, drawn)], [0])["top_logprobs"]
    assert top == {"token_id:3": -1.0, "\n": -2.0, "bytes:\\xf0": -3.0, "token_id:9": -4.0}
    (top,) = completion_logprobs(Alike(), [(5, drawn)], [0])["top_logprobs"]
    assert len(top) == 5 and top["\n"] == -2.0
    (top,) = completion_logprobs(Alike(), [(4, drawn)], [0], as_ids=True)["top_logprobs"]
    assert list(top) == ["token_id:3", "token_id:4", "token_id:8", "token_id:9"]


@pytest.mark.parametrize(
    ("text", "stop"), [(TEXT, None), (TEXT, "eral re"), ("a \U0001f995 b", None)]
)
def test_streamed_completion_logprobs_equal_whole(server, chunks, text, stop):
    """Offsets too, also where a stop string, or half a character, holds text back."""
    server.client.text = text
    fields = {"logprobs": 1, "max_tokens": 100, "stop": stop}
    whole = server.complete(**fields).json()["choices"][0]["logprobs"]
    parts = [
        chunk["choices"][0]["logprobs"]
        for chunk in chunks(server.complete(stream=True, **fields))
        if chunk["choices"][0]["logprobs"]
    ]
    assert {name: sum((part[name] for part in parts), []) for name in whole} == whole


@pytest.mark.parametrize("text", ["a \U0001f995 b", "日本", TEXT])
def test_offsets_index_the_text_also_across_split_characters(server, text):
    server.client.text = text
    choice = server.complete(logprobs=1, max_tokens=100, return_token_ids=True).json()["choices"][0]
    offsets, tokens = choice["logprobs"]["text_offset"], choice["token_ids"]
    assert len(offsets) == len(tokens) and choice["text"] == text
    assert offsets[-1] == len(text), "the end token's, which has no text"
    for count, offset in enumerate(offsets):
        # what is whole of the tokens before it
        whole = server.tokenizer.decode(tokens[:count]).rstrip("\ufffd")
        assert text[:offset] == whole
    assert "\U0001f995" not in text or offsets.count(2) > 1


def test_reply_without_visible_tokens_has_empty_lists(server):
    """Clients that asked read the lists without a look."""
    server.client.text = ""
    (chat,) = server.chat(logprobs=True).json()["choices"]
    assert chat["logprobs"] == {"content": [], "refusal": None}
    (completion,) = server.complete(logprobs=1).json()["choices"]
    assert completion["text"] == ""
    assert set(completion["logprobs"]) == {
        "tokens",
        "token_logprobs",
        "top_logprobs",
        "text_offset",
    }
    assert not any(completion["logprobs"].values())


def test_each_choice_counts_its_own_offsets(server, chunks):
    fields = {"logprobs": 0, "n": 2, "max_tokens": 5}
    whole = server.complete(**fields).json()["choices"]
    streamed = {0: [], 1: []}
    for chunk in chunks(server.complete(stream=True, **fields)):
        (choice,) = chunk["choices"]
        streamed[choice["index"]] += (choice["logprobs"] or {"text_offset": []})["text_offset"]
    assert streamed == {c["index"]: c["logprobs"]["text_offset"] for c in whole}
    assert streamed[0] == streamed[1] and len(streamed[0]) == 5


def test_chat_logprobs_without_alternatives(server):
    (choice,) = server.chat(logprobs=True, max_tokens=2).json()["choices"]
    assert [token["top_logprobs"] for token in choice["logprobs"]["content"]] == [[], []]


def test_streamed_chat_logprobs_equal_whole(server, chunks):
    fields = {"logprobs": True, "top_logprobs": 1, "n": 2}
    whole = server.chat(**fields).json()["choices"]
    streamed = {0: [], 1: []}
    for chunk in chunks(server.chat(stream=True, **fields)):
        (choice,) = chunk["choices"]
        if choice["logprobs"]:
            streamed[choice["index"]] += choice["logprobs"]["content"]
    assert all(streamed[c["index"]] == c["logprobs"]["content"] for c in whole)


def test_logprobs_not_requested(server):
    for fields in ({}, {"logprobs": False}, {"logprobs": None}):
        assert server.chat(**fields).json()["choices"][0]["logprobs"] is None
        assert server.complete(**fields).json()["choices"][0]["logprobs"] is None
    assert all(params.logprobs is None for _, _, params in server.client.requests)


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        ("complete", {"logprobs": 21}, "logprobs"),
        ("complete", {"logprobs": -1}, "logprobs"),
        ("complete", {"logprobs": True}, "logprobs"),
        ("complete", {"max_tokens": 0}, "max_tokens"),
        ("complete", {"max_tokens": 0, "echo": False, "logprobs": 1}, "max_tokens"),
        ("complete", {"prompt_logprobs": 21}, "prompt_logprobs"),
        ("chat", {"prompt_logprobs": -1}, "prompt_logprobs"),
        ("chat", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("chat", {"logprobs": 3}, "logprobs"),
        ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat", {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ("chat", {"top_logprobs": 2}, "top_logprobs"),
        ("chat", {"presence_penalty": 2.5}, "presence_penalty"),
        ("chat", {"frequency_penalty": "1"}, "frequency_penalty"),
        ("complete", {"repetition_penalty": 0}, "repetition_penalty"),
        ("complete", {"repetition_penalty": 1e300}, "repetition_penalty"),
        ("complete", {"repetition_penalty": 1e-300}, "repetition_penalty"),
        ("complete", {"top_k": 2**63}, "top_k"),
        ("chat", {"top_k": 2**64}, "top_k"),
        ("complete", {"logit_bias": {"8192": 1}}, "logit_bias"),
        ("complete", {"logit_bias": {"-1": 1}}, "logit_bias"),
        ("complete", {"logit_bias": {"5": 200}}, "logit_bias"),
        ("complete", {"logit_bias": [5]}, "logit_bias"),
    ],
)
def test_logprobs_out_of_range_are_refused(server, error, route, fields, param):
    assert error(getattr(server, route)(**fields), 400)["param"] == param


def test_logit_bias_with_invalid_token_is_refused(server, error):
    assert error(server.complete(logit_bias={"x": 1}), 400)["param"].startswith("logit_bias")


def test_penalties_and_bias_reach_the_engine(server):
    fields = {"presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.25}
    for call in (server.complete, server.chat):
        assert call(**fields, logit_bias={"5": -100, "7": 2.5}).status_code == 200
    for _, _, params in server.client.requests:
        assert {name: getattr(params, name) for name in fields} == fields
        assert params.logit_bias == ((5, -100.0), (7, 2.5))


PROMPT = "Once upon a time, \u00e9t\u00e9 \U0001f995"


@pytest.mark.parametrize("asked", [0, 2])
@pytest.mark.parametrize("max_tokens", [0, 1, 100])
def test_echo_with_logprobs_includes_prompt(server, chunks, asked, max_tokens):
    """As lm_eval reads them; streamed and whole alike."""
    prompt = server.tokenizer.encode(PROMPT)
    fields = {"prompt": PROMPT, "echo": True, "logprobs": asked, "max_tokens": max_tokens, "n": 2}
    whole = server.complete(**fields).json()["choices"]
    num_output = len(script(server)) if max_tokens == 100 else max_tokens
    for choice in whole:
        found = choice["logprobs"]
        assert choice["text"].startswith(PROMPT)
        assert {len(values) for values in found.values()} == {len(prompt) + num_output}
        assert found["token_logprobs"] == [None] + [-1.25] * (len(prompt) + num_output - 1)
        assert found["top_logprobs"][0] is None
        for text, top in list(zip(found["tokens"], found["top_logprobs"], strict=True))[1:]:
            assert top[text] == -1.25 and len(top) == max(1, asked)
        offsets = found["text_offset"]
        assert offsets == sorted(offsets)
        for text, offset in zip(found["tokens"], offsets, strict=True):
            assert text.startswith("bytes:") or choice["text"][offset:].startswith(text)
        if not max_tokens:
            assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    streamed = [{} for _ in whole]
    for chunk in chunks(server.complete(**fields, stream=True)):
        (choice,) = chunk["choices"]
        for name, values in (choice["logprobs"] or {}).items():
            streamed[choice["index"]].setdefault(name, []).extend(values)
    assert streamed == [choice["logprobs"] for choice in whole]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("as_ids", [True, False])
def test_offsets_count_the_special_tokens_that_the_echo_shows(server, as_ids, skip):
    tokenizer = server.tokenizer
    tokens = tokenizer.encode("a<|im_end|> cat<|im_end|><|im_end|>\u00e9t\u00e9 sat")
    assert len(tokenizer.special_token_ids.intersection(tokens)) == 1
    asked = tokens if as_ids else tokenizer.decode(tokens, skip_special_tokens=False)
    fields = {"prompt": asked, "echo": True, "logprobs": 0, "skip_special_tokens": skip}
    choice = server.complete(max_tokens=1, **fields).json()["choices"][0]
    text, found = choice["text"], choice["logprobs"]
    shown = [not (as_ids and skip and token in tokenizer.special_token_ids) for token in tokens]
    for name, offset, is_shown in zip(found["tokens"], found["text_offset"], shown, strict=False):
        if is_shown and not name.startswith("bytes:"):
            assert text[offset:].startswith(name)
    assert text[found["text_offset"][-1] :] == found["tokens"][-1]


def test_added_bos_token_is_not_in_the_echo(tokenizer):
    offsets = TextOffsets(tokenizer, echo="a cat")
    tokens = [tokenizer.bos_token_id, *tokenizer.encode("a cat", False)]
    assert [offsets.take(token) for token in tokens] == [0, 0, 1]


def test_echo_of_no_tokens_needs_no_logprobs(server):
    (choice,) = server.complete(prompt=PROMPT, echo=True, max_tokens=0).json()["choices"]
    assert (choice["text"], choice["logprobs"]) == (PROMPT, None)
    assert "prompt_logprobs" not in choice


def test_prompt_logprobs_equal_vllm_format(server):
    prompt = server.tokenizer.encode("Once upon a time")
    fields = {"prompt": prompt, "prompt_logprobs": 1, "max_tokens": 1}
    (choice,) = server.complete(**fields).json()["choices"]
    assert choice["logprobs"] is None
    first, *others = choice["prompt_logprobs"]
    assert first is None
    for token, entry in zip(prompt[1:], others, strict=True):
        assert entry == {
            str(token): {"logprob": -1.25, "rank": 2, "decoded_token": text_of(server, token)},
            str(token - 1): {
                "logprob": -0.5,
                "rank": 1,
                "decoded_token": text_of(server, token - 1),
            },
        }
    reply = server.chat(prompt_logprobs=0).json()
    assert reply["prompt_logprobs"][0] is None and len(reply["prompt_logprobs"]) > 3
    assert all(len(entry) == 1 for entry in reply["prompt_logprobs"][1:])


@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_a_prompt_share_its_log_probabilities(server, chunks, stream):
    """The engine computes them once for each prompt; every choice of the reply has them."""
    fields = {
        "prompt": ["Once upon a time there", "Two"],
        "n": 3,
        "max_tokens": 3,
        "logprobs": 2,
        "echo": True,
    }
    reply = server.complete(**fields, stream=stream)
    asked = [params.prompt_logprobs is not None for _, _, params in server.client.requests]
    assert len(asked) == 6 and sum(asked) == 2
    found: dict[int, list] = {}
    for choice in (
        (each for chunk in chunks(reply) for each in chunk["choices"])
        if stream
        else reply.json()["choices"]
    ):
        tokens = (choice["logprobs"] or {"token_logprobs": []})["token_logprobs"]
        found.setdefault(choice["index"], []).extend(tokens)
    assert found.keys() == {*range(6)}
    for first in (0, 3):
        assert found[first][0] is None and len(found[first]) > 3
        assert found[first] == found[first + 1] == found[first + 2]
    assert found[0] != found[3]
