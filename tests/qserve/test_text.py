"""Text and tokens: streamed text equals decoded text, and stop strings never leak."""

import json
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from qserve.engine.request import RequestEvent, TokenLogprobs
from qserve.sampling_params import ParameterError, SamplingParams
from qserve.server.logprobs import chat_logprobs
from qserve.text import IncrementalDetokenizer, TextError, TextStream, Tokenizer

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


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory) -> Tokenizer:
    """A tokenizer in the manner of Llama 2: spaces are part of words, rare characters are bytes."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for token in ["\u2581", "a", "b", "\u2581a", "ab", "\u2581ab", "!"]:
        vocab[token] = len(vocab)
    merges = [("\u2581", "a"), ("a", "b"), ("\u2581a", "b")]
    backend = Backend(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    folder = tmp_path_factory.mktemp("byte_fallback")
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)
    return Tokenizer(folder)


def streamed(tokenizer: Tokenizer, token_ids: list[int], cuts: list[int] = (), **options) -> str:
    """The text of the deltas when the tokens come in pieces that end at `cuts`."""
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    edges = [0, *sorted(cut for cut in cuts if cut < len(token_ids)), len(token_ids)]
    deltas = [detokenizer.push(token_ids[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    return "".join(deltas) + detokenizer.flush()


def event(*token_ids: int, **fields) -> RequestEvent:
    return RequestEvent(request_id="r", token_ids=token_ids, **fields)


def run(tokenizer: Tokenizer, params: SamplingParams, events: list[RequestEvent]):
    """All text, the last delta, and how many tokens were counted."""
    stream = TextStream(tokenizer, params)
    deltas = [stream.push(each) for each in events]
    last = next((delta for delta in deltas if delta.finish_reason), deltas[-1])
    return "".join(d.text for d in deltas), last, sum(len(d.token_ids) for d in deltas)


def one_by_one(token_ids: list[int], finish: str = "length") -> list[RequestEvent]:
    return [event(t) for t in token_ids[:-1]] + [event(token_ids[-1], finish_reason=finish)]


def test_encode_agrees_with_transformers(tokenizer, docs_5m):
    reference = AutoTokenizer.from_pretrained(docs_5m)
    for text in [*TEXTS, "<|im_start|>user\nhi<|im_end|>"]:
        assert tokenizer.encode(text) == reference.encode(text)


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
def test_a_split_character_is_never_shown_in_part(tokenizer, text):
    detokenizer = IncrementalDetokenizer(tokenizer)
    token_ids = tokenizer.encode(text)
    assert len(token_ids) > len(text) or len(text) > 2
    shown = ""
    for token in token_ids:
        shown += detokenizer.push([token])
        assert text.startswith(shown)
    assert shown == text


def test_garbage_bytes_neither_stop_the_stream_nor_slow_it(tokenizer):
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
def test_character_that_starts_within_garbage_is_whole(tokenizer, num_garbage):
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


def test_spaces_depend_on_what_came_before(byte_fallback):
    assert byte_fallback.decode(byte_fallback.encode("ab ab!")) == "ab ab!"
    prompt, output = byte_fallback.encode("ab"), byte_fallback.encode("ab b  a")
    assert streamed(byte_fallback, output) == "ab b  a"
    assert streamed(byte_fallback, output, prompt_token_ids=prompt) == " ab b  a"


def test_texts_of_single_tokens_add_up(byte_fallback, tokenizer):
    """A token in the list of log probabilities keeps the space that it begins with."""
    output = byte_fallback.encode("ab ab b  a!")
    assert "".join(map(byte_fallback.token_text, output)) == " ab ab b  a!"
    listed = [(token, TokenLogprobs(-1.0, (), ())) for token in output]
    content = chat_logprobs(byte_fallback, listed)["content"]
    assert "".join(entry["token"] for entry in content) == " ab ab b  a!"
    assert byte_fallback.token_text(0xE6) == "\ufffd"
    text = "Hello there, <s> general reader."
    assert "".join(map(tokenizer.token_text, tokenizer.encode(text))) == text


def test_runs_of_byte_tokens_are_shown_character_by_character(byte_fallback):
    text = "日本語😀é ab!"
    token_ids = byte_fallback.encode(text)
    assert len(token_ids) > len(text)
    detokenizer = IncrementalDetokenizer(byte_fallback)
    deltas = [detokenizer.push([token]) for token in token_ids]
    assert "".join(deltas) == text and max(map(len, deltas)) <= 3


@pytest.mark.parametrize("num_characters", range(1, 8))
@pytest.mark.parametrize("num_half", [0, 1, 2])
def test_prompt_of_byte_tokens_is_not_shown_again(byte_fallback, num_characters, num_half):
    token_ids = byte_fallback.encode("ab" + "日" * num_characters + "本語ab")
    split = 1 + 3 * num_characters + num_half
    prompt, output = token_ids[:split], token_ids[split:]
    assert streamed(byte_fallback, output, prompt_token_ids=prompt) == "本語ab"


def test_special_tokens_are_shown_only_when_asked(tokenizer):
    token_ids = [*tokenizer.encode("one"), 1, *tokenizer.encode(" two"), 2]
    assert streamed(tokenizer, token_ids) == "one two"
    assert (
        streamed(tokenizer, token_ids, skip_special_tokens=False) == "one<|im_start|> two<|im_end|>"
    )


def test_added_tokens_that_are_not_special_are_text(docs_5m, tmp_path):
    whole = AutoTokenizer.from_pretrained(docs_5m)
    whole.add_tokens(["<note>"])
    whole.save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("one <note> two<|im_end|>")) == "one <note> two"


def test_truncation_that_the_file_asks_for_is_off(docs_5m, tmp_path):
    backend = Backend.from_file(str(docs_5m / "tokenizer.json"))
    backend.enable_truncation(4)
    shutil.copytree(docs_5m, tmp_path, dirs_exist_ok=True)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    text = "one two three four five six seven"
    assert tokenizer.decode(tokenizer.encode(text)) == text


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
    assert stream.push(event(5, finish_reason="length")).token_ids == ()


def test_include_stop_string(tokenizer):
    params = SamplingParams(stop=("part",), include_stop_str_in_output=True)
    text, last, _ = run(tokenizer, params, one_by_one(tokenizer.encode("first party")))
    assert (text, last.stop_reason) == ("first part", "part")


def test_held_text_comes_out_when_it_is_no_stop_string_or_at_the_end(tokenizer):
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


def test_error_event_shows_what_was_held(tokenizer):
    events = [event(*tokenizer.encode("one tw")), event(finish_reason="error", error="x")]
    text, last, _ = run(tokenizer, SamplingParams(stop=("two",)), events)
    assert (text, last.finish_reason) == ("one tw", "error")


def test_error_is_no_stop_even_where_its_last_text_is(tokenizer):
    half = tokenizer.encode("\U0001f995")[:1]
    for finish, expected in (("length", ("", "stop")), ("error", ("\ufffd", "error"))):
        text, last, _ = run(tokenizer, SamplingParams(stop=("\ufffd",)), one_by_one(half, finish))
        assert (text, last.finish_reason) == expected


@pytest.mark.parametrize("include", [False, True])
def test_what_was_held_is_shown_once_on_an_error(tokenizer, include):
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


def test_early_stop_string_that_is_still_held_stays_too_early(tokenizer):
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
def test_stop_strings_do_not_depend_on_the_pieces(tokenizer, text, stops, cuts):
    token_ids = tokenizer.encode(text)
    expected, stop = reference_stop(text, stops)
    edges = sorted({0, len(token_ids), *(cut for cut in cuts if cut < len(token_ids))})
    pieces = [token_ids[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    events = [event(*piece) for piece in pieces[:-1]]
    events.append(event(*pieces[-1], finish_reason="length"))
    shown, last, _ = run(tokenizer, SamplingParams(stop=tuple(stops)), events)
    assert shown == expected
    assert last.stop_reason == stop


def test_text_that_is_not_unicode_is_refused(tokenizer):
    with pytest.raises(TextError, match="not valid Unicode"):
        tokenizer.encode("a\ud800b")


def test_chat_template_adds_no_second_bos(tokenizer):
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.render_chat(messages)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    token_ids = tokenizer.encode_chat(messages)
    assert token_ids[0] == 1 and tokenizer.decode(token_ids, False) == text
    messages.append({"role": "assistant", "content": "Dear"})
    assert tokenizer.render_chat(messages, False, True).endswith("assistant\nDear")


def test_what_a_request_may_tell_the_template(docs_5m, tmp_path):
    """Names that the template reads from outside, less those that are given to every template."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(docs_5m / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{{ bos_token }}{% set local = namespace(a=1) %}{% for m in messages %}"
        "{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{{ strftime_now('') }}{% endgeneration %}{% endfor %}"
        "{% if tools or documents or add_generation_prompt %}{{ raise_exception('no') }}{% endif %}"
        "{{ local.a }}{% if thinking | default(true) %}thinks{% endif %}"
    )
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.template_settings == {"thinking"}
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(messages, False).endswith("hi1thinks")
    quiet = tokenizer.render_chat(messages, False, template_kwargs={"thinking": False})
    assert quiet.endswith("hi1")
    with pytest.raises(ParameterError, match="bos_token: is nothing that .* it reads: thinking"):
        tokenizer.render_chat(messages, False, template_kwargs={"bos_token": "x"})


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "the model has none"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content + 1 }}", "refuses them"),
        ("{% for %}", "refuses them"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses them"),
    ],
)
def test_missing_or_failing_template_is_one_clear_line(docs_5m, tmp_path, template, words):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(docs_5m / name, tmp_path)
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(TextError, match=words) as caught:
        Tokenizer(tmp_path).render_chat([{"role": "user", "content": "hi"}])
    assert "\n" not in str(caught.value) and str(tmp_path) not in str(caught.value)


def test_folder_without_a_tokenizer_is_one_clear_line(tmp_path):
    with pytest.raises(TextError, match="is not a folder"):
        Tokenizer(tmp_path / "nothing")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(TextError, match="no tokenizer that transformers can load") as caught:
        Tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_logprobs_end_with_the_tokens_that_are_shown(tokenizer):
    """Neither those after a stop string nor a hidden end token's are given out."""
    token_ids = tokenizer.encode("one two three four")
    logprobs = tuple(TokenLogprobs(-float(i), (), ()) for i in range(len(token_ids)))
    stopped = TextStream(tokenizer, SamplingParams(stop=(" two",), logprobs=0))
    delta = stopped.push(event(*token_ids, logprobs=logprobs))
    assert delta.logprobs == logprobs[: len(delta.token_ids)] and len(delta.logprobs) < len(
        logprobs
    )
    fields = {"logprobs": logprobs, "finish_reason": "stop", "ended_by_token": True}
    ended = TextStream(tokenizer, SamplingParams(logprobs=0)).push(event(*token_ids, **fields))
    assert ended.logprobs == logprobs[:-1] and ended.token_ids == tuple(token_ids)
