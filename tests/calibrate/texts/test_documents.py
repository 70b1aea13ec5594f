"""Documents: every form of a data file gives the same texts, or one error that names the row."""

import gzip
import json

import pytest

from calibrate.texts.documents import read_documents, read_texts
from formats.errors import InputError

TEXTS = ["one\u2028still one", "two\nlines", '[3] {"text": 3}']
ROWS = [{"text": text, "id": number} for number, text in enumerate(TEXTS)]
LINES = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)
ARRAY = json.dumps(ROWS, indent=1)
FORMS = {
    "rows.jsonl": LINES,
    "ROWS.JSONL": LINES,
    "rows.ndjson": LINES,
    "lines.json": LINES,
    "lines.txt": "\n" + LINES + "\n\n",
    "array.json": ARRAY,
    "ARRAY.JSON": json.dumps(ROWS),
    "array.jsonl": ARRAY,
    "array.txt": ARRAY,
    "array": ARRAY,
    "object.json": json.dumps({"type": "text_only", "instances": ROWS}),
    "strings.json": json.dumps(TEXTS),
    "column.json": json.dumps({"text": TEXTS}),
    "pretty.json": "\n".join(json.dumps(row, indent=2) for row in ROWS),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_file_format_gives_same_texts(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"\xef\xbb\xbf" + FORMS[name].encode())
    assert read_texts(path) == TEXTS
    assert read_documents(str(path)) == TEXTS
    packed = tmp_path / f"{name}.gz"
    packed.write_bytes(gzip.compress(FORMS[name].encode()))
    assert read_documents(str(packed)) == TEXTS


def test_parquet_is_detected_by_content_and_name(tmp_path):
    pytest.importorskip("datasets", reason="the test extra brings it: pip install -e '.[test]'")
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    for name in ("rows.parquet", "ROWS.PARQUET", "rows.bin"):
        parquet.write_table(pyarrow.table({"text": TEXTS}), tmp_path / name)
        assert read_texts(tmp_path / name) == TEXTS
        assert read_documents(str(tmp_path / name)) == TEXTS


def test_one_row_is_one_document(tmp_path):
    path = tmp_path / "row.json"
    chat = [{"role": "user", "content": "Hello?"}]
    path.write_text(json.dumps({"messages": chat, "tags": ["a", "b"]}, indent=2))
    assert read_documents(str(path)) == [chat]
    path.write_text(json.dumps({"text": "one", "tags": ["a", "b"]}))
    assert read_texts(path) == ["one"]
    path.write_text(json.dumps([{"messages": chat}]))
    assert read_documents(str(path)) == [chat]
    with pytest.raises(InputError, match="row.json row 1: .*found a chat"):
        read_texts(path)


@pytest.mark.parametrize("text", ["[1] A footnote.", "{curly} start", "[link](url)\n", "", "# x"])
def test_prose_starting_with_bracket_is_one_text(tmp_path, text):
    path = tmp_path / "prose.md"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read_texts(path) == [text]


@pytest.mark.parametrize(
    "name, content, problem",
    [
        ("a.json", "plain text", "line 1: is not JSON"),
        ("a.JSON", '[{"text": "a"},\n {"text": "b"]', "is not JSON: .* at line 2"),
        ("a.txt", '{"text": "a"}\n{"text": ', "line 2: is not JSON"),
        ("a.txt", '[{"text": "a"},', "line 1: is not JSON"),
        ("a.json", '{"name": "x", "version": 1}', "found an object with 'name', 'version'"),
        ("a.json", '{"train": [{"text": "a"}], "test": [{"text": "b"}]}', "'train', 'test'"),
        ("a.json", '[{"text": "a"}, {"body": "b"}]', "row 2: .*'body'"),
        ("a.json", "[1, 2]", "row 1: expected an object"),
        ("a.json", '[{"text": null}]', "row 1: expected .*, found 'text': None"),
        ("a.json", '[{"messages": "Hi", "id": 1}]', "row 1: expected .*, found 'messages': 'Hi'"),
        ("a.csv", "text\nhello\n", "tables are not supported"),
        ("a.TSV", "text\nhello\n", "tables are not supported"),
    ],
)
def test_file_without_texts_is_refused(tmp_path, name, content, problem):
    path = tmp_path / name
    path.write_text(content)
    for read in (read_texts, lambda path: read_documents(str(path))):
        with pytest.raises(InputError, match=problem):
            read(path)


def test_broken_gzip_is_refused(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(LINES.encode())[:-9])
    with pytest.raises(InputError, match="cannot be read"):
        read_texts(path)


@pytest.mark.parametrize(
    "line", ['{"text": 3}', '{"txt": ""}', "[]", "3", "{", "null", "[" * 10**5]
)
def test_invalid_jsonl_line_is_reported_by_number(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n' + line)
    with pytest.raises(InputError, match="line 2"):
        read_texts(path)
    path.write_text('{"text": "\\ud83d"}')
    with pytest.raises(InputError, match="line 1: contains a lone surrogate"):
        read_texts(path)


def test_unreadable_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        read_texts(tmp_path / "nothing.txt")
    with pytest.raises(InputError, match="directory"):
        read_texts(tmp_path)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="UTF-8"):
        read_texts(tmp_path / "binary.txt")
