"""A tokenizer is loaded without its model, and is the one that transformers loads with it."""

import json
import shutil

import pytest
from transformers import AutoConfig, AutoTokenizer

from qserve.text.load_tokenizer import load_tokenizer

# (tokenizer_class of tokenizer_config.json, model_type of config.json)
KINDS = [
    ("PreTrainedTokenizerFast", "llama"),
    ("LlamaTokenizerFast", "llama"),  # whose class does not fit a tokenizer of bytes
    ("LlamaTokenizer", "mistral"),
    ("Qwen2Tokenizer", "qwen3_next"),
    ("GPT2TokenizerFast", "phi3"),
    ("GemmaTokenizer", "gemma2"),
    ("NoSuchTokenizer", "granite"),
    ("PreTrainedTokenizerFast", "no_such_model"),
    (None, "qwen2"),
]


@pytest.fixture
def folder(docs_5m, tmp_path):
    """(tokenizer's class, model's type, more) -> a folder that states them."""

    def make(tokenizer_class, model_type, **more):
        shutil.copy(docs_5m / "tokenizer.json", tmp_path)
        for name, fields in (
            ("tokenizer_config.json", {"tokenizer_class": tokenizer_class, **more}),
            ("config.json", {"model_type": model_type, "architectures": ["Some"]}),
        ):
            stated = json.loads((docs_5m / name).read_text()) | fields
            stated = {key: value for key, value in stated.items() if value is not None}
            (tmp_path / name).write_text(json.dumps(stated))
        return tmp_path

    return make


def outcome(load):
    """A tokenizer's class and all that it computes with, or the class of the error."""
    try:
        tokenizer = load()
    except Exception as error:
        return type(error)
    return type(tokenizer), tokenizer.backend_tokenizer.to_str(), tokenizer.special_tokens_map


@pytest.mark.parametrize(("tokenizer_class", "model_type"), KINDS)
def test_loaded_tokenizer_equals_transformers(folder, tokenizer_class, model_type):
    path = folder(tokenizer_class, model_type)
    assert outcome(lambda: load_tokenizer(path)) == outcome(
        lambda: AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    )


def test_remote_code_is_not_run(folder):
    path = folder("Evil", "llama", auto_map={"AutoTokenizer": ["evil.Evil", None]})
    (path / "evil.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_tokenizer(path)


def test_model_config_class_is_not_loaded(folder, monkeypatch):
    """Its class imports torch's compiler and more."""
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("it was"))
    load_tokenizer(folder("PreTrainedTokenizerFast", "llama"))


@pytest.mark.parametrize("text", ["[]", "{", None])
def test_unreadable_config_is_left_to_transformers(folder, text):
    path = folder("PreTrainedTokenizerFast", "llama")
    (path / "config.json").unlink()
    if text is not None:
        (path / "config.json").write_text(text)
    assert outcome(lambda: load_tokenizer(path)) == outcome(
        lambda: AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    )
