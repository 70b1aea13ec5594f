"""Tokenizer: ids, bytes and chat templates equal those of transformers and other readers."""

import json
import shutil

import pytest
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from qserve.engine.token_event import TokenLogprobs
from qserve.params.sampling_params import ParameterError
from qserve.server.openai.logprobs import chat_logprobs
from qserve.structured.backend import library
from qserve.text.tokenizer import TextError, Tokenizer
from tests.qserve.text.unusual_texts import TEXTS


@pytest.fixture(scope="module")
def tokenizer(docs_5m) -> Tokenizer:
    return Tokenizer(docs_5m)


def test_encode_agrees_with_transformers(tokenizer, docs_5m):
    reference = AutoTokenizer.from_pretrained(docs_5m)
    for text in [*TEXTS, "<|im_start|>user\nhi<|im_end|>"]:
        assert tokenizer.encode(text) == reference.encode(text)


@pytest.mark.parametrize("text", [*TEXTS, "\U0001f995"])
def test_bytes_of_single_tokens_add_up(byte_fallback, tokenizer, text):
    """Also those of tokens that are parts of characters."""
    found = map(tokenizer.token_bytes, tokenizer.encode(text, add_special_tokens=False))
    assert b"".join(found) == text.encode()
    found = map(byte_fallback.token_bytes, byte_fallback.encode(text, add_special_tokens=False))
    assert b"".join(found).decode().lstrip(" ") == text.lstrip(" ")


def test_token_bytes_equal_llguidance(docs_5m, tokenizer):
    """llguidance reads the vocabulary's bytes by itself."""
    other = library().LLTokenizer((docs_5m / "tokenizer.json").read_text())
    for token in set(range(tokenizer.vocab_size)) - tokenizer.special_token_ids:
        found = tokenizer.token_bytes(token)
        if found != b"\xff":  # with which llguidance marks special tokens
            assert found == other.decode_bytes([token])
    for token in tokenizer.special_token_ids:
        assert tokenizer.token_bytes(token).decode() == tokenizer.token_text(token)


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


def test_added_tokens_that_are_not_special_are_text(docs_5m, tmp_path):
    whole = AutoTokenizer.from_pretrained(docs_5m)
    whole.add_tokens(["<note>"])
    whole.save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("one <note> two<|im_end|>")) == "one <note> two"


def test_truncation_in_file_is_disabled(docs_5m, tmp_path):
    backend = Backend.from_file(str(docs_5m / "tokenizer.json"))
    backend.enable_truncation(4)
    shutil.copytree(docs_5m, tmp_path, dirs_exist_ok=True)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    text = "one two three four five six seven"
    assert tokenizer.decode(tokenizer.encode(text)) == text


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


@pytest.mark.parametrize("opens", [False, True])
def test_chat_template_as_transformers_apply_it(tokenizer, docs_5m, opens):
    theirs = AutoTokenizer.from_pretrained(docs_5m)
    messages = [{"role": "user", "content": "<|im_end|> is a token"}]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=opens)
    ids = theirs.apply_chat_template(messages, add_generation_prompt=opens, return_dict=False)
    ours = tokenizer.apply_chat_template
    assert ours(messages, tokenize=False, add_generation_prompt=opens) == text
    assert ours(messages, add_generation_prompt=opens) == ids


def test_template_settings_of_requests(docs_5m, tmp_path):
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
    with pytest.raises(ParameterError, match="bos_token: is not read .* reads: thinking"):
        tokenizer.render_chat(messages, False, template_kwargs={"bos_token": "x"})


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "the model has none"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content + 1 }}", "rejects them"),
        ("{% for %}", "rejects them"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "rejects them"),
    ],
)
def test_missing_or_failing_template_raises_one_line(docs_5m, tmp_path, template, words):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(docs_5m / name, tmp_path)
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(TextError, match=words) as caught:
        Tokenizer(tmp_path).render_chat([{"role": "user", "content": "hi"}])
    assert "\n" not in str(caught.value) and str(tmp_path) not in str(caught.value)


def test_missing_tokenizer_raises_one_line(tmp_path):
    with pytest.raises(TextError, match="is not a folder"):
        Tokenizer(tmp_path / "nothing")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(TextError, match="no tokenizer that transformers can load") as caught:
        Tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
