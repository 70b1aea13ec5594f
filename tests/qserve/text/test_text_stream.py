"""Streamed text equals decoded text, and stop strings never leak."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qserve.engine.token_event import TokenEvent, TokenLogprobs
from qserve.params.sampling_params import SamplingParams
from qserve.text.text_stream import IncrementalDetokenizer, TextStream
from qserve.text.tokenizer import Tokenizer

TEXTS = [
    "plain words, then 3.14!  two  spaces\n\n\ttabs\r\n",
    "日本語の文章と中文，한국어도",
    "👩‍👩‍👧‍👦 family, 🇫🇷 flag, 👍🏽 tone, 𝔘𝔫𝔦",
    "e\u0301a\u0308o\u0302 combining, z\u0335\u0321\u034f algo",
    "\x00\x01\x07\x1b[31m\x7f\x85\u200b\u2028\ufeff",
    "a real \ufffd stays, two \ufffd\ufffd as well",
    "مرحبا بالعالم नमस्ते दुनिया",
    "",
]


@pytest.fixture(scope="module")
def tokenizer(docs_5m) -> Tokenizer:
    return Tokenizer(docs_5m)


def streamed(tokenizer: Tokenizer, token_ids: list[int], cuts: list[int] = (), **options) -> str:
    """The text of the deltas when the tokens come in pieces that end at `cuts`."""
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    edges = [0, *sorted(cut for cut in cuts if cut < len(token_ids)), len(token_ids)]
    deltas = [detokenizer.push(token_ids[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    return "".join(deltas) + detokenizer.flush()


def event(*token_ids: int, **fields) -> TokenEvent:
    return TokenEvent(request_id="r", token_ids=token_ids, **fields)


def run(tokenizer: Tokenizer, params: SamplingParams, events: list[TokenEvent]):
    """All text, the last delta, and how many tokens were counted."""
    stream = TextStream(tokenizer, params)
    deltas = [stream.push(each) for each in events]
    last = next((delta for delta in deltas if delta.finish_reason), deltas[-1])
    return "".join(d.text for d in deltas), last, sum(len(d.event.token_ids) for d in deltas)


def one_by_one(token_ids: list[int], finish: str = "length") -> list[TokenEvent]:
    return [event(t) for t in token_ids[:-1]] + [event(token_ids[-1], finish_reason=finish)]


@pytest.mark.parametrize("text", TEXTS)
def test_deltas_add_up_to_the_text(tokenizer, text):
    assert streamed(tokenizer, tokenizer.encode(text)) == text


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=40), cuts=st.lists(st.integers(0, 80), max_size=8))
def test_deltas_add_up_for_any_text_and_any_pieces(tokenizer, text, cuts):
    token_ids = tokenizer.encode(text)
    assert streamed(tokenizer, token_ids, cuts) == tokenizer.decode(token_ids) == text


@settings(max_examples=300, deadline=None)
@given(token_ids=st.lists(st.one_of(st.integers(0, 260), st.integers(0, 8300)), max_size=40))
def test_deltas_add_up_for_tokens_that_are_no_text(tokenizer, token_ids):
    for skip in (True, False):
        assert streamed(tokenizer, token_ids, skip_special_tokens=skip) == tokenizer.decode(
            token_ids, skip
        )


@pytest.mark.parametrize("text", ["😀", "日本", "a😀b", "👩‍👩‍👧‍👦"])
def test_split_character_is_not_emitted_partially(tokenizer, text):
    detokenizer = IncrementalDetokenizer(tokenizer)
    token_ids = tokenizer.encode(text)
    assert len(token_ids) > len(text) or len(text) > 2
    shown = ""
    for token in token_ids:
        shown += detokenizer.push([token])
        assert text.startswith(shown)
    assert shown == text


def test_invalid_bytes_do_not_block_stream(tokenizer):
    continuation = tokenizer.encode("😀")[-1]
    seen = []
    counting = CountingTokenizer(tokenizer, seen)
    detokenizer = IncrementalDetokenizer(counting)
    shown = "".join(detokenizer.push([continuation]) for _ in range(500))
    assert len(shown) > 480
    shown += detokenizer.push(tokenizer.encode("😀!"))
    assert shown == tokenizer.decode([continuation] * 500) + "😀!"
    assert max(seen) < 20


@pytest.mark.parametrize("num_garbage", range(20))
def test_character_after_invalid_bytes_is_whole(tokenizer, num_garbage):
    token_ids = tokenizer.encode("😀")[-1:] * num_garbage + tokenizer.encode("😀日!")
    assert streamed(tokenizer, token_ids) == tokenizer.decode(token_ids)


def test_work_per_token_does_not_grow_with_the_output(tokenizer):
    seen = []
    token_ids = tokenizer.encode("the quick brown 世界 " * 200)
    assert streamed(CountingTokenizer(tokenizer, seen), token_ids) == tokenizer.decode(token_ids)
    assert max(seen) < 20 and len(seen) < 3 * len(token_ids)


class CountingTokenizer:
    """Notes how many tokens each decode was given."""

    def __init__(self, tokenizer: Tokenizer, seen: list[int]) -> None:
        self._tokenizer, self._seen = tokenizer, seen
        self.special_token_ids = tokenizer.special_token_ids

    def decode(self, token_ids, skip_special_tokens=True):
        self._seen.append(len(token_ids))
        return self._tokenizer.decode(token_ids, skip_special_tokens)


@pytest.mark.parametrize("head", ["", "text ", "日本語 "])
@pytest.mark.parametrize("num_in_prompt", [1, 2])
def test_prompt_that_ends_in_half_a_character(tokenizer, head, num_in_prompt):
    character = tokenizer.encode("😀")
    assert len(character) == 3
    prompt = tokenizer.encode(head) + character[:num_in_prompt]
    output = character[num_in_prompt:] + tokenizer.encode(" ok")
    assert streamed(tokenizer, output, prompt_token_ids=prompt) == "😀 ok"
    assert streamed(tokenizer, [], prompt_token_ids=prompt) == ""


def test_leading_space_depends_on_previous_token(byte_fallback):
    assert byte_fallback.decode(byte_fallback.encode("ab ab!")) == "ab ab!"
    prompt, output = byte_fallback.encode("ab"), byte_fallback.encode("ab b  a")
    assert streamed(byte_fallback, output) == "ab b  a"
    assert streamed(byte_fallback, output, prompt_token_ids=prompt) == " ab b  a"


def test_runs_of_byte_tokens_are_shown_character_by_character(byte_fallback):
    text = "日本語😀é ab!"
    token_ids = byte_fallback.encode(text)
    assert len(token_ids) > len(text)
    detokenizer = IncrementalDetokenizer(byte_fallback)
    deltas = [detokenizer.push([token]) for token in token_ids]
    assert "".join(deltas) == text and max(map(len, deltas)) <= 3


@pytest.mark.parametrize("num_characters", range(1, 8))
@pytest.mark.parametrize("num_half", [0, 1, 2])
def test_byte_token_prompt_is_not_repeated(byte_fallback, num_characters, num_half):
    token_ids = byte_fallback.encode("ab" + "日" * num_characters + "本語ab")
    split = 1 + 3 * num_characters + num_half
    prompt, output = token_ids[:split], token_ids[split:]
    assert streamed(byte_fallback, output, prompt_token_ids=prompt) == "本語ab"


def test_special_tokens_are_shown_only_on_request(tokenizer):
    token_ids = [*tokenizer.encode("one"), 1, *tokenizer.encode(" two"), 2]
    assert streamed(tokenizer, token_ids) == "one two"
    assert (
        streamed(tokenizer, token_ids, skip_special_tokens=False) == "one<|im_start|> two<|im_end|>"
    )


def test_end_token_is_counted_but_not_shown(tokenizer):
    words = tokenizer.encode("hello")
    events = [event(*words), event(2, finish_reason="stop", ended_by_token=True)]
    for skip in (True, False):
        params = SamplingParams(skip_special_tokens=skip)
        text, last, count = run(tokenizer, params, events)
        assert (text, last.finish_reason, last.stop_reason) == ("hello", "stop", None)
        assert count == len(words) + 1


def test_stop_token_is_shown_only_with_include(tokenizer):
    words, (comma,) = tokenizer.encode("hello"), tokenizer.encode(",")
    last_event = event(comma, finish_reason="stop", stop_token=comma, ended_by_token=True)
    for include, expected in ((False, "hello"), (True, "hello,")):
        params = SamplingParams(include_stop_str_in_output=include)
        text, last, _ = run(tokenizer, params, [event(*words), last_event])
        assert (text, last.stop_reason) == (expected, comma)


def test_stop_string_split_over_tokens_never_leaks(tokenizer):
    token_ids = tokenizer.encode("first part, then END of it")
    stream = TextStream(tokenizer, SamplingParams(stop=("t, then END",)))
    shown = ""
    for token in token_ids:
        delta = stream.push(event(token))
        shown += delta.text
        assert "first par".startswith(shown)
        if stream.finished:
            break
    assert (shown, delta.finish_reason, delta.stop_reason) == ("first par", "stop", "t, then END")
    assert stream.push(event(5, finish_reason="length")).event.token_ids == ()


def test_include_stop_string(tokenizer):
    params = SamplingParams(stop=("part",), include_stop_str_in_output=True)
    text, last, _ = run(tokenizer, params, one_by_one(tokenizer.encode("first party")))
    assert (text, last.stop_reason) == ("first part", "part")


def test_held_text_is_emitted_if_no_stop_string_follows(tokenizer):
    for text in ("first par", "first parade", "aaab"):
        params = SamplingParams(stop=("parX", "aabX"))
        shown, last, _ = run(tokenizer, params, one_by_one(tokenizer.encode(text)))
        assert (shown, last.finish_reason) == (text, "length")


def test_tokens_after_a_stop_string_are_not_counted(tokenizer):
    token_ids = tokenizer.encode("one two three four")
    text, last, count = run(tokenizer, SamplingParams(stop=(" two",)), [event(*token_ids)])
    assert text == "one" and last.stop_reason == " two"
    assert count == len(tokenizer.encode("one two")) < len(token_ids)


def test_stop_string_in_the_last_token_wins_over_length(tokenizer):
    events = one_by_one(tokenizer.encode("one two"))
    _, last, _ = run(tokenizer, SamplingParams(stop=("two",)), events)
    assert (last.finish_reason, last.stop_reason) == ("stop", "two")


def test_error_event_emits_held_text(tokenizer):
    events = [event(*tokenizer.encode("one tw")), event(finish_reason="error", error="x")]
    text, last, _ = run(tokenizer, SamplingParams(stop=("two",)), events)
    assert (text, last.finish_reason) == ("one tw", "error")


def test_error_is_not_a_stop_even_with_stop_string(tokenizer):
    half = tokenizer.encode("\U0001f995")[:1]
    for finish, expected in (("length", ("", "stop")), ("error", ("\ufffd", "error"))):
        text, last, _ = run(tokenizer, SamplingParams(stop=("\ufffd",)), one_by_one(half, finish))
        assert (text, last.finish_reason) == expected


@pytest.mark.parametrize("include", [False, True])
def test_held_text_is_emitted_once_on_error(tokenizer, include):
    """Two stop strings begin in it, and the error's last bytes complete one of them."""
    ids = [*tokenizer.encode("one"), *tokenizer.encode("\U0001f995", False)[:1]]
    params = SamplingParams(stop=("one!", "e\ufffd"), include_stop_str_in_output=include)
    for together in (False, True):
        events = [event(*ids)] if together else [event(token) for token in ids]
        events.append(event(finish_reason="error", error="x"))
        text, last, _ = run(tokenizer, params, events)
        assert (text, last.finish_reason, last.stop_reason) == ("one\ufffd", "error", None)


def test_min_tokens_lets_early_stop_strings_pass(tokenizer):
    token_ids = tokenizer.encode("x.x.x.x.x.x.")
    for minimum in range(len(token_ids)):
        params = SamplingParams(stop=(".",), min_tokens=minimum, max_tokens=99)
        text, last, count = run(tokenizer, params, one_by_one(token_ids))
        assert last.stop_reason == "." and count >= minimum
        assert text + "." == tokenizer.decode(token_ids[:count])


def test_held_stop_string_before_min_tokens_is_ignored(tokenizer):
    token_ids = [tokenizer.encode(character)[0] for character in "xac"]
    params = SamplingParams(stop=("a", "ab"), min_tokens=3)
    text, last, _ = run(tokenizer, params, one_by_one(token_ids))
    assert (text, last.finish_reason) == ("xac", "length")


def reference_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The first stop string to be complete when the text comes character by character."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=400, deadline=None)
@given(
    text=st.text(alphabet="ab世😀", min_size=1, max_size=24),
    stops=st.lists(st.text(alphabet="ab世😀", min_size=1, max_size=4), min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, 40), max_size=6),
)
def test_stop_strings_are_independent_of_token_boundaries(tokenizer, text, stops, cuts):
    token_ids = tokenizer.encode(text)
    expected, stop = reference_stop(text, stops)
    edges = sorted({0, len(token_ids), *(cut for cut in cuts if cut < len(token_ids))})
    pieces = [token_ids[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    events = [event(*piece) for piece in pieces[:-1]]
    events.append(event(*pieces[-1], finish_reason="length"))
    shown, last, _ = run(tokenizer, SamplingParams(stop=tuple(stops)), events)
    assert shown == expected
    assert last.stop_reason == stop


def test_logprobs_end_with_the_tokens_that_are_shown(tokenizer):
    """Neither those after a stop string nor a hidden end token's are given out."""
    token_ids = tokenizer.encode("one two three four")
    logprobs = tuple(TokenLogprobs(-float(i), (), ()) for i in range(len(token_ids)))
    stopped = TextStream(tokenizer, SamplingParams(stop=(" two",), logprobs=0))
    cut = stopped.push(event(*token_ids, logprobs=logprobs)).event
    assert cut.logprobs == logprobs[: len(cut.token_ids)] and len(cut.logprobs) < len(logprobs)
    fields = {"logprobs": logprobs, "finish_reason": "stop", "ended_by_token": True}
    ended = (
        TextStream(tokenizer, SamplingParams(logprobs=0)).push(event(*token_ids, **fields)).event
    )
    assert ended.logprobs == logprobs[:-1] and ended.token_ids == tuple(token_ids)
