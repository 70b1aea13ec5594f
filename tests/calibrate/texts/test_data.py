"""Calibration data: every source, full windows, the same ids for the same seed."""

import json
import sys
from collections import Counter

import pytest
import torch
from transformers import AutoTokenizer

from calibrate.texts.data import read_calibration
from calibrate.texts.default_texts import (
    DEFAULT_TEXTS,
    MIN_EXCERPTS,
    default_excerpts,
    excerpt_chars,
)
from calibrate.texts.documents import read_documents
from calibrate.texts.evaluate import CHARS_PER_TOKEN
from calibrate.texts.excerpts import excerpts, render
from formats.errors import InputError
from qserve.server.requests.protocol import Message


@pytest.fixture(scope="module")
def tokenizer(docs_5m):
    return AutoTokenizer.from_pretrained(docs_5m)


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.jsonl"
    rows = [{"text": f"Text {i}\u2028 about ownership. " * 20} for i in range(9)]
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n")
    return str(path)


def read(source, tokenizer, **options):
    return read_calibration(source, tokenizer, **{"samples": 4, "sequence_length": 64, **options})


def test_windows_are_full_and_texts_begin_with_bos(texts, tokenizer):
    data = read(texts, tokenizer, samples=5, sequence_length=256)
    assert data.ids_WS.shape == (5, 256) and data.ids_WS.dtype == torch.int64
    assert data.ids_WS[0, 0] == tokenizer.bos_token_id
    assert int((data.ids_WS == tokenizer.bos_token_id).sum()) >= 2
    assert "Text" in tokenizer.decode(data.ids_WS[0])
    assert data.warnings == ()


def test_seed_decides_order_and_digest(texts, tokenizer):
    first, again, other = (read(texts, tokenizer, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.ids_WS, again.ids_WS) and first.sha256 == again.sha256
    assert first.sha256 != other.sha256 and len(first.sha256) == 64
    assert read(texts, tokenizer, sequence_length=32).sha256 != first.sha256


def test_fewer_windows_than_requested_is_a_warning(texts, tokenizer):
    data = read(texts, tokenizer, samples=500)
    assert 4 < len(data.ids_WS) < 500
    assert f"fills {len(data.ids_WS)} windows, not 500" in data.warnings[0]
    with pytest.raises(InputError, match="too few for one window"):
        read(texts, tokenizer, sequence_length=10**5)


def test_default_texts_are_used_with_a_warning(tokenizer):
    data = read(None, tokenizer, samples=16, sequence_length=512)
    assert data.ids_WS.shape == (16, 512)
    assert "--calibration, or `calibration` in Python" in data.warnings[0]
    assert DEFAULT_TEXTS.stat().st_size < 700_000
    whole = read(None, tokenizer, samples=128, sequence_length=1024)
    assert len(whole.ids_WS) == 128, "less than the README's calibration needs"


def drawn_kinds(tokenizer, excerpts):
    """Return the kind and the source of each excerpt of the default texts."""
    found = [
        (row["kind"], row["source"], row.get("text") or render(row["messages"], tokenizer))
        for row in default_rows()
    ]
    owners = [[key[:2] for key in found if each.text in key[2]] for each in excerpts]
    return [each[0] for each in owners]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("samples, length", [(16, 512), (32, 256), (64, 512), (128, 1024)])
def test_kind_proportions_hold_for_any_number_of_windows(tokenizer, samples, length, seed):
    """A few windows are the whole set in small; their code is in several languages."""
    whole = Counter()
    for row in default_rows():
        whole[row["kind"]] += len(row.get("text") or render(row["messages"], tokenizer))
    excerpts, num_chars = [], 0
    for each in default_excerpts(tokenizer, excerpt_chars(samples, length), seed):
        if num_chars < CHARS_PER_TOKEN * samples * length:
            excerpts.append(each)
            num_chars += len(each.text)
    keys = drawn_kinds(tokenizer, excerpts)
    found = Counter()
    for (kind, _), each in zip(keys, excerpts, strict=True):
        found[kind] += len(each.text)
    assert len(found) == len(whole) == 7
    for kind in whole:
        share = whole[kind] / whole.total()
        assert abs(found[kind] / found.total() - share) < 1.5 / MIN_EXCERPTS, (kind, found)
    assert len({source for kind, source in keys if kind == "code"}) >= 4


def test_default_excerpts_cover_every_text(tokenizer):
    texts = [row.get("text") or render(row["messages"], tokenizer) for row in default_rows()]
    found = default_excerpts(tokenizer, 1000, seed=2)
    assert sum(each.begins for each in found) == len(texts)
    assert sorted("".join(each.text for each in found)) == sorted("".join(texts))


def test_default_texts_list_their_sources():
    """SOURCES.md has each source with its licence, and as many texts as the file."""
    lines = DEFAULT_TEXTS.with_name("SOURCES.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    stated, kind = Counter(), ""
    for name, count, *_ in cells[2:]:
        kind = name or kind
        stated[kind] += int(count)
    rows = default_rows()
    assert stated == Counter(row["kind"] for row in rows)
    licenses = {"public domain", "CC0-1.0", "Unlicense", "Apache-2.0", "MIT OR Apache-2.0"}
    assert {row["license"] for row in rows} <= licenses


def default_rows():
    return [json.loads(line) for line in DEFAULT_TEXTS.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{{ raise_exception('no') }}",
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}",
    ],
    ids=["none", "rejects", "works"],
)
def test_default_chats_use_chat_template(docs_5m, template):
    tokenizer = AutoTokenizer.from_pretrained(docs_5m)
    tokenizer.chat_template = template
    chat = next(row["messages"] for row in default_rows() if "messages" in row)
    question = chat[0]["content"]
    wanted = f"<user>{question}</user>" if "role" in (template or "") else f"User: {question}\n\n"
    data = read(None, tokenizer, samples=200, sequence_length=1024)
    text = "".join(tokenizer.decode(ids_S[1:]) for ids_S in data.ids_WS)
    assert wanted[:60] in text


def test_seed_chooses_default_excerpts(tokenizer):
    first, again, other = (read(None, tokenizer, seed=seed) for seed in (0, 0, 1))
    assert first.sha256 == again.sha256 != other.sha256


def test_chats_use_chat_template(tmp_path, tokenizer):
    path = tmp_path / "chats.jsonl"
    messages = [{"role": "user", "content": "What is a trait? " * 30}]
    path.write_text(json.dumps({"messages": messages}))
    expected = tokenizer.apply_chat_template(messages, tokenize=False)
    text = tokenizer.decode(read(str(path), tokenizer, samples=1).ids_WS[0, 1:])
    assert expected.removeprefix(tokenizer.bos_token or "").startswith(text[:40])
    path.write_text(json.dumps({"messages": [{"role": 3}]}))
    with pytest.raises(InputError, match="template|window"):
        read(str(path), tokenizer)


def test_messages_are_rendered_as_the_server_renders_them(docs_5m):
    """Text parts are joined; arguments of tool calls, JSON texts in OpenAI's form, are objects."""
    tokenizer = AutoTokenizer.from_pretrained(docs_5m)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content }}"
        "{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %};{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": each} for each in ("Hi", "you")]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "5"},
    ]
    assert render(messages, tokenizer) == 'user: Hi\nyou;assistant: {"a": 1};tool: 5;'
    bodies = [Message.model_validate(each).for_template for each in messages]
    assert tokenizer.apply_chat_template(bodies, tokenize=False) == render(messages, tokenizer)


def test_bos_is_not_duplicated_by_template(tmp_path, docs_5m):
    tokenizer = AutoTokenizer.from_pretrained(docs_5m)
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    path = tmp_path / "chats.jsonl"
    messages = [{"role": "user", "content": "What is a trait? " * 30}]
    path.write_text(json.dumps({"messages": messages}))
    ids_S = read(str(path), tokenizer, samples=1).ids_WS[0]
    assert (ids_S == tokenizer.bos_token_id).nonzero().tolist() == [[0]]


def test_plain_text_is_one_text(tmp_path, tokenizer):
    path = tmp_path / "book.txt"
    path.write_text("A borrow is a reference. " * 100)
    assert int((read(str(path), tokenizer).ids_WS == tokenizer.bos_token_id).sum()) == 1


@pytest.mark.parametrize("line", ["{", '{"txt": 1}', "5", '{"text": 5}', '{"messages": []}'])
def test_invalid_line_is_reported_by_number(tmp_path, tokenizer, line):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "good"}\n' + line)
    with pytest.raises(InputError, match='bad.jsonl line 2.*"text"'):
        read(str(path), tokenizer)


@pytest.mark.parametrize(
    "fields", ['"text": "%s"', '"messages": [{"role": "user", "content": "%s"}]']
)
def test_lone_surrogate_is_reported(tmp_path, tokenizer, fields):
    path = tmp_path / "half.jsonl"
    path.write_text("{" + fields % "good" + "}\n{" + fields % "a\\ud800b" + "}")
    with pytest.raises(InputError, match="half.jsonl line 2: contains a lone surrogate"):
        read(str(path), tokenizer)


def test_byte_order_mark_and_crlf_are_stripped(tmp_path, tokenizer):
    row = json.dumps({"text": "A borrow is a reference. " * 40})
    plain, marked = tmp_path / "plain.jsonl", tmp_path / "marked.jsonl"
    plain.write_text(f"{row}\n{row}\n")
    marked.write_bytes(f"\ufeff{row}\r\n\r\n{row}\r\n".encode())
    assert torch.equal(read(str(plain), tokenizer).ids_WS, read(str(marked), tokenizer).ids_WS)


def test_missing_file_and_missing_package(tmp_path, tokenizer, monkeypatch):
    with pytest.raises(InputError, match="nowhere.txt: not found"):
        read(str(tmp_path / "nowhere.txt"), tokenizer)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="some/set.*package datasets"):
        read("some/set", tokenizer)


class FakeDatasets:
    """Replacement for the package that records its arguments."""

    def __init__(self, rows):
        self.rows, self.calls = rows, []

    def load_dataset(self, **arguments):
        self.calls.append(arguments)
        return self.rows


def test_parquet_and_hub_names_use_datasets(tmp_path, tokenizer, monkeypatch):
    fake = FakeDatasets([{"text": "Lifetimes are regions. " * 40}] * 3)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1")
    assert read(str(path), tokenizer).ids_WS.shape == (4, 64)
    assert read("some/set", tokenizer).ids_WS.shape == (4, 64)
    parquet, named = fake.calls
    common = {"split": "train", "streaming": True}
    assert parquet == {"path": "parquet", "data_files": str(path), **common}
    assert named == {"path": "some/set", **common}
    fake.rows = [{"body": "x"}]
    with pytest.raises(InputError, match="some/set row 0"):
        read("some/set", tokenizer)


ROWS = [f"Text {number}: lifetimes are regions. " * 20 for number in range(30)]


@pytest.fixture
def real():
    """The package itself, and pyarrow, which it brings."""
    pytest.importorskip("datasets", reason="the test extra brings it: pip install -e '.[test]'")
    return pytest.importorskip("pyarrow")


def write_parquet(pyarrow, path, **columns):
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=7)
    return str(path)


def test_datasets_reads_parquet_file(real, tmp_path, tokenizer, monkeypatch):
    path = write_parquet(real, tmp_path / "rows.parquet", text=ROWS, number=list(range(30)))
    jsonl = tmp_path / "rows.jsonl"
    jsonl.write_text("\n".join(json.dumps({"text": text}) for text in ROWS))
    found = read(path, tokenizer, samples=20)
    assert found.sha256 == read(str(jsonl), tokenizer, samples=20).sha256
    assert found.ids_WS.shape == (20, 64)
    monkeypatch.setattr("calibrate.texts.documents.MAX_DATASET_ROWS", 3)
    assert read_documents(path) == ROWS[:3]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_datasets_reads_dataset_folder(real, tmp_path, tokenizer, kind):
    """Like a name on the hub: the folder's train split, in files of any kind."""
    folder = tmp_path / "my-set"
    (folder / "data").mkdir(parents=True)
    chats = [[{"role": "user", "content": f"{text}?"}] for text in ROWS]
    if kind == "jsonl":
        lines = [json.dumps({"messages": chat}) for chat in chats]
        (folder / "data" / "train.jsonl").write_text("\n".join(lines))
        (folder / "data" / "test.jsonl").write_text(json.dumps({"messages": []}))
    else:
        write_parquet(real, folder / "data" / "train-00000-of-00001.parquet", messages=chats)
    assert read_documents(str(folder)) == chats
    data = read(str(folder), tokenizer)
    assert "Text" in tokenizer.decode(data.ids_WS.flatten())


@pytest.mark.parametrize("has_splits", [False, True])
def test_saved_data_set_is_read(real, tmp_path, has_splits):
    import datasets

    folder = str(tmp_path / "saved")
    rows = datasets.Dataset.from_dict({"text": ROWS})
    splits = {"test": datasets.Dataset.from_dict({"text": ["other"]}), "train": rows}
    (datasets.DatasetDict(splits) if has_splits else rows).save_to_disk(folder)
    assert read_documents(folder) == ROWS


def test_unreadable_dataset_gives_one_error(real, tmp_path, tokenizer, monkeypatch):
    path = write_parquet(real, tmp_path / "rows.parquet", body=ROWS)
    with pytest.raises(InputError, match='rows.parquet row 0: expected .* "text"'):
        read(path, tokenizer)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(InputError, match="bad.parquet: cannot be read by datasets"):
        read(str(tmp_path / "bad.parquet"), tokenizer)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="empty: cannot be read by datasets"):
        read(str(tmp_path / "empty"), tokenizer)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="nobody/no-such-set: cannot be read by datasets"):
        read("nobody/no-such-set", tokenizer)


def test_few_windows_cover_many_texts(tmp_path, tokenizer):
    """One long text before many others must not fill all windows."""
    words = ["alpha", "beta", "gamma", "delta", "kappa", "omega"]
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"{word} " * 4000}) for word in words))
    found = tokenizer.decode(read(str(path), tokenizer, samples=14).ids_WS.flatten())
    assert all(word in found for word in words)


@pytest.mark.parametrize("num_chars", [5, 40, 1000])
def test_excerpts_cover_every_text(num_chars):
    texts = ["one two three four five six seven\neight nine ten " * 3, "", "x" * 99]
    found = list(excerpts(texts, num_chars, seed=3))
    assert sum(each.begins for each in found) == 3
    assert sorted("".join(each.text for each in found)) == sorted("".join(texts))
    assert all(len(each.text) <= 1.5 * num_chars for each in found)
    beginnings = [each.text for each in found if each.begins]
    assert all(any(text.startswith(each) for text in texts) for each in beginnings)
