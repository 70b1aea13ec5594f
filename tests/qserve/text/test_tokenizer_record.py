"""A recorded tokenizer equals transformers' own and is read without transformers."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from qserve.text import load_tokenizer as loading
from qserve.text import tokenizer as text_tokenizer
from qserve.text import tokenizer_record as module
from qserve.text.load_tokenizer import load_tokenizer
from qserve.text.tokenizer import TextError, Tokenizer
from qserve.text.tokenizer_record import RecordedTokenizer, read_record, record_path, write_record
from tests.qserve.text.unusual_texts import TEXTS

SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "[CLS]", "[SEP]", "[MASK]", "<|im_end|>"]
LETTERS = ["\u2581", *"abcdefghijklmnopqrstuvwxyz"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
CHAT = [{"role": "user", "content": "a <s> b"}, {"role": "assistant", "content": "\u00e9"}]


def spelled() -> models.BPE:
    """A model like SentencePiece's: letters, pairs and bytes."""
    tokens = [*SPECIAL, *(f"<0x{i:02X}>" for i in range(256)), *LETTERS]
    pairs = [(a, b) for a in LETTERS[:6] for b in LETTERS[:6]]
    vocab = {token: i for i, token in enumerate([*tokens, *(a + b for a, b in pairs)])}
    return models.BPE(vocab, pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True)


def scored() -> models.Unigram:
    tokens = [*SPECIAL, *LETTERS, *(a + b for a in LETTERS[:6] for b in LETTERS[:6])]
    return models.Unigram([(token, -1.0 - i / 8) for i, token in enumerate(tokens)], unk_id=0)


def backend_of(kind: str) -> Backend:
    if kind == "wordpiece":
        vocab = {t: i for i, t in enumerate([*SPECIAL, "[UNK]", *LETTERS, "##a", "##b"])}
        backend = Backend(models.WordPiece(vocab, unk_token="[UNK]"))
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece()
    else:
        backend = Backend(spelled() if kind == "spelled" else scored())
        backend.normalizer = normalizers.Replace(" ", "\u2581")
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken(each, normalized=False) for each in SPECIAL])
    backend.add_tokens([AddedToken("<tool>", lstrip=True)])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return backend


# (tokenizer of the file, tokenizer_class, model_type, more fields of tokenizer_config.json)
KINDS = [
    ("docs", "PreTrainedTokenizerFast", "llama", {}),
    ("docs", "Qwen2Tokenizer", "qwen2", {}),
    ("docs", "GPT2TokenizerFast", "phi3", {"add_bos_token": True}),
    ("docs", "LlamaTokenizer", "mistral", {}),
    ("docs", "NoSuchTokenizer", "granite", {"split_special_tokens": True}),
    ("docs", None, "qwen3", {"extra_special_tokens": ["<|new|>"]}),
    ("spelled", "LlamaTokenizerFast", "llama", {"add_eos_token": True, "legacy": False}),
    ("spelled", "GemmaTokenizer", "gemma2", {}),
    ("spelled", "PreTrainedTokenizerFast", "gemma3_text", {"padding_side": "left"}),
    ("spelled", "LlamaTokenizer", "mistral", {"add_prefix_space": False}),
    ("scored", "PreTrainedTokenizerFast", "llama", {"model_max_length": 8}),
    ("scored", "T5Tokenizer", "t5", {}),
    ("scored", "XLMRobertaTokenizer", "xlm-roberta", {}),
    ("wordpiece", "BertTokenizer", "bert", {"do_lower_case": True}),
]


@pytest.fixture(autouse=True)
def records(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home" / ".cache" / "qserve" / "tokenizers"


@pytest.fixture
def folder(docs_5m, tmp_path):
    """(kind, tokenizer's class, model's type, more) -> a folder with this tokenizer."""

    def make(kind="docs", tokenizer_class="PreTrainedTokenizerFast", model_type="llama", more=None):
        path = tmp_path / "model"
        path.mkdir()
        stated = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        if kind == "docs":
            shutil.copy(docs_5m / "tokenizer.json", path)
            stated = json.loads((docs_5m / "tokenizer_config.json").read_text())
        else:
            backend_of(kind).save(str(path / "tokenizer.json"))
        stated |= {"tokenizer_class": tokenizer_class, "chat_template": TEMPLATE, **(more or {})}
        stated = {key: value for key, value in stated.items() if value is not None}
        (path / "tokenizer_config.json").write_text(json.dumps(stated))
        (path / "config.json").write_text(json.dumps({"model_type": model_type}))
        return path

    return make


@pytest.fixture
def first_import(monkeypatch):
    """Let load_tokenizer take AutoTokenizer for not yet imported, as in a new process."""
    monkeypatch.setattr(loading, "AUTO_TOKENIZER", "a.module.that.nobody.imports")


@pytest.fixture
def num_loaded(monkeypatch):
    """The folders that transformers has loaded."""
    seen, load = [], loading._by_transformers

    def count(folder):
        seen.append(folder)
        return load(folder)

    monkeypatch.setattr(loading, "_by_transformers", count)
    return seen


def recorded(folder) -> RecordedTokenizer | None:
    path = record_path(folder)
    write_record(path, folder, AutoTokenizer.from_pretrained(folder))
    return read_record(path, folder)


@pytest.mark.parametrize(("kind", "tokenizer_class", "model_type", "more"), KINDS)
def test_record_equals_the_tokenizer(
    kind, tokenizer_class, model_type, more, folder, monkeypatch, first_import
):
    path = folder(kind, tokenizer_class, model_type, more)
    theirs = AutoTokenizer.from_pretrained(path)
    load_tokenizer(path)
    found = Tokenizer(path)
    assert isinstance(found._tokenizer, RecordedTokenizer)
    monkeypatch.setattr(text_tokenizer, "load_tokenizer", lambda _: theirs)
    want = Tokenizer(path)
    for text in [*TEXTS, "ab  <s>cab<tool> d</s>", "abc<|im_end|>\n[CLS] a"]:
        ids = want.encode(text)
        assert found.encode(text) == ids
        assert found.encode(text, False) == theirs.encode(text, add_special_tokens=False)
        for skip in (False, True):
            assert found.decode(ids, skip) == want.decode(ids, skip)
        assert list(map(found.token_bytes, ids)) == list(map(want.token_bytes, ids))
        assert found.token_names(ids) == want.token_names(ids)
    for name in (
        *("special_token_ids", "control_ids", "vocab_size", "eos_token_id", "bos_token_id"),
        *("max_token_chars", "special_affixes", "template_settings", "reserved_settings"),
        *("template_text", "control_pattern", "reads_tools", "needs_parts"),
    ):
        assert getattr(found, name) == getattr(want, name), name
    assert found.render_chat(CHAT) == theirs.apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=True
    )
    assert outcome(found) == outcome(want)


def outcome(tokenizer: Tokenizer) -> list[int] | str:
    """The tokens of CHAT, or the error where one letter after another spells a control token."""
    try:
        return tokenizer.encode_chat(CHAT)
    except TextError as error:
        return str(error)


def test_chats_are_rendered_like_transformers(folder):
    """Also with tools, several templates, and a template from the processor's file."""
    path = folder(more={"chat_template": None})
    several = {"default": TEMPLATE, "tool_use": "{{ tools | tojson }}" + TEMPLATE}
    for name, template in several.items():
        where = path / "chat_template.jinja"
        if name != "default":
            where = path / "additional_chat_templates" / f"{name}.jinja"
            where.parent.mkdir()
        where.write_text(template)
    found, theirs = recorded(path), AutoTokenizer.from_pretrained(path)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for settings in ({}, {"tools": tools}, {"continue_final_message": True}):
        text = theirs.apply_chat_template(CHAT, tokenize=False, **settings)
        assert found.apply_chat_template(CHAT, tokenize=False, **settings) == text
    before = record_path(path)
    where.write_text("other")
    assert record_path(path) != before


PROGRAM = """
import json, sys
from qserve.text.tokenizer import Tokenizer
tokenizer = Tokenizer(sys.argv[1])
found = tokenizer.decode(tokenizer.encode("A text"))
if sys.argv[2] == "chat":
    found = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
print(json.dumps([found, sorted(sys.modules)]))
"""


def in_new_process(path: Path, what: str) -> tuple[object, set[str]]:
    """The result of PROGRAM, and the modules that it imported."""
    command = [sys.executable, "-c", PROGRAM, str(path), what]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    found, modules = json.loads(done.stdout)
    return found, {*modules}


def test_recorded_tokenizer_needs_no_transformers(folder):
    path = folder()
    assert recorded(path) is not None
    text, modules = in_new_process(path, "text")
    assert text == "A text"
    assert not modules & {"transformers", "torch", "numpy", "huggingface_hub", "jinja2", "yaml"}


@pytest.mark.exhaustive
def test_recorded_tokenizer_renders_chats_without_torch(folder):
    path = folder()
    assert recorded(path) is not None
    chat, modules = in_new_process(path, "chat")
    assert chat == Tokenizer(path).encode_chat([{"role": "user", "content": "Hi"}])
    assert "transformers" in modules and "torch" not in modules


def test_second_load_does_not_use_transformers(folder, records, first_import, num_loaded):
    path = folder()
    assert not isinstance(load_tokenizer(path), RecordedTokenizer)
    assert isinstance(load_tokenizer(path), RecordedTokenizer)
    assert len(num_loaded) == 1 and len(list(records.iterdir())) == 1


def test_registered_tokenizer_classes_disable_records(folder, records, num_loaded):
    """AutoTokenizer is imported here; so nothing is recorded, and no record is read."""
    path = folder()
    load_tokenizer(path)
    assert recorded(path) is not None
    assert not isinstance(load_tokenizer(path), RecordedTokenizer) and len(num_loaded) == 2


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
        *("added_tokens.json", "chat_template.jinja", "chat_template.json", "tokenizer.model"),
        *("vocab.txt", "merges.txt", "x.tiktoken"),
    ],
)
def test_record_key_includes_every_file(name, folder):
    path = folder()
    before = record_path(path)
    (path / "model.safetensors.index.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")
    assert record_path(path) == before
    stat = (path / name).stat() if (path / name).exists() else None
    (path / name).write_text("other")
    if stat is not None:
        os.utime(path / name, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert record_path(path) != before


def test_record_key_includes_folder_name(folder, tmp_path):
    """AutoTokenizer chooses some classes by it."""
    path = folder()
    assert record_path(shutil.copytree(path, tmp_path / "other")) != record_path(path)


def test_record_key_uses_size_and_time_of_large_files(folder, monkeypatch):
    path = folder()
    monkeypatch.setattr(module, "MAX_BYTES", 9)
    (path / "texts.json").write_text("0" * 10)
    before = record_path(path)
    assert record_path(path) == before
    os.utime(path / "texts.json", (1, 1))
    after = record_path(path)
    (path / "texts.json").write_text("0" * 11)
    os.utime(path / "texts.json", (1, 1))
    assert len({before, after, record_path(path)}) == 3


@pytest.mark.parametrize("library", ["transformers", "tokenizers"])
def test_record_key_includes_versions(library, folder, monkeypatch):
    path, version = folder(), module.importlib.metadata.version
    before = record_path(path)
    monkeypatch.setattr(
        module.importlib.metadata, "version", lambda name: "9" if name == library else version(name)
    )
    assert record_path(path) != before


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", '{"tokenizer": "{}", "state": {}}'])
def test_damaged_record_is_made_again(damage, folder, records, first_import, num_loaded):
    path = folder()
    load_tokenizer(path)
    (record,) = records.iterdir()
    whole = record.read_text()
    record.write_text(damage)
    assert not isinstance(load_tokenizer(path), RecordedTokenizer)
    assert record.read_text() == whole and len(num_loaded) == 2


def test_unwritable_record_folder_is_ignored(folder, records, first_import):
    records.parent.mkdir(parents=True)
    records.write_text("not a folder")
    path = folder()
    assert load_tokenizer(path).encode("a") == load_tokenizer(path).encode("a")


def test_file_that_changes_during_the_load_is_not_recorded(
    folder, records, first_import, monkeypatch
):
    path, load = folder(), loading._by_transformers

    def change(given):
        found = load(given)
        (path / "chat_template.jinja").write_text("other")
        return found

    monkeypatch.setattr(loading, "_by_transformers", change)
    load_tokenizer(path)
    assert not records.exists()


def test_tokenizer_with_remote_code_is_not_recorded(folder, records):
    path = folder()
    theirs = AutoTokenizer.from_pretrained(path)

    class Louder(type(theirs)):
        def apply_chat_template(self, *arguments, **settings):
            return super().apply_chat_template(*arguments, **settings) + "!"

    theirs.__class__ = Louder
    write_record(record_path(path), path, theirs)
    assert not records.exists()


def test_unserializable_tokenizer_is_not_recorded(folder, records):
    class Words:
        def pre_tokenize(self, text):
            text.split(lambda _, part: [part])

    path = folder()
    theirs = AutoTokenizer.from_pretrained(path)
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Words())
    write_record(record_path(path), path, theirs)
    assert not records.exists()


def test_tokenizer_without_a_file_of_its_own_is_recorded(folder):
    """transformers has made it of another file, such as tokenizer.model."""
    path = folder()
    theirs = AutoTokenizer.from_pretrained(path)
    (path / "tokenizer.json").unlink()
    write_record(record_path(path), path, theirs)
    found = read_record(record_path(path), path)
    assert found.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()


def test_tokenizer_that_differs_from_its_file_is_recorded_whole(folder):
    path = folder()
    theirs = AutoTokenizer.from_pretrained(path)
    theirs.add_tokens(["unheard of"])
    write_record(record_path(path), path, theirs)
    found = read_record(record_path(path), path)
    text = "an unheard of text"
    ids = found.backend_tokenizer.encode(text).ids
    assert ids == theirs.encode(text) and len(theirs) - 1 in ids
    assert found.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()


def test_template_is_not_run_by_a_record(folder):
    """It may never end, and the server cannot kill itself."""
    assert recorded(folder(more={"chat_template": "{{ raise_exception('run') }}"})) is not None


def test_oldest_records_are_deleted(folder, records, monkeypatch):
    monkeypatch.setattr(module, "MAX_RECORDS", 2)
    path, made = folder(), []
    theirs = AutoTokenizer.from_pretrained(path)
    for i in range(4):
        (path / "config.json").write_text(json.dumps({"model_type": "llama", "a": i}))
        made.append(record_path(path))
        write_record(made[-1], path, theirs)
        os.utime(made[-1], (i, i))
    assert sorted(records.iterdir()) == sorted(made[2:])
