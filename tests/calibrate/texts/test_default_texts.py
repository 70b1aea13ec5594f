"""Script that rebuilds the default texts: its readers of packages, its order, its exclusions."""

import json
import struct
import sys
import zlib

import pytest

from calibrate.texts.default_texts import DEFAULT_TEXTS
from examples import default_texts
from examples.default_texts import Source, country, declaration, interleaved, novel, rows_of


def r_strings(lines):
    """A character vector as R's serialization format 3 has it, zipped after its size."""
    data = b"X\n" + struct.pack(">3I", 3, 0x40201, 0x30500) + struct.pack(">I", 5) + b"UTF-8"
    data += struct.pack(">2I", 16, len(lines))
    for line in lines:
        data += struct.pack(">2I", 0x40009, len(line.encode())) + line.encode()
    return struct.pack(">I", len(data)) + zlib.compress(data)


def test_r_package_novels_are_found_by_title():
    packed = r_strings(["EMMA", "", "Emma Woodhouse"]) + r_strings(["PERSUASION", "", "Sir Wälter"])
    assert novel(packed, "PERSUASION") == "PERSUASION\n\nSir Wälter"
    with pytest.raises(FileNotFoundError, match="SANDITON"):
        novel(packed, "SANDITON")


def test_article_offsets_differ_by_language():
    html = "<body>\n<h1>Rechte</h1>\n" + "".join(
        f"<article>\n<h2>Artikel {i}</h2>\n<p>W&uuml;rde {i}</p>\n</article>\n" for i in range(1, 9)
    )
    first, second = declaration(html, 0), declaration(html, 1)
    assert first[:2] == ["Rechte", "Artikel 1\nWürde 1"]
    assert second[0] == "Artikel 7\nWürde 7" and sorted(first) == sorted(second)


def test_short_country_entries_are_skipped():
    facts = {
        "Geography": {"Location": {"text": "Europe"}, "Climate": {"text": "rain ++ " * 10}},
        "Government": {"Country name": {"conventional short form": {"text": "Austria"}}},
    }
    title, geography = country(facts)
    assert title == "# Austria"
    assert geography.startswith("## Geography\n\nClimate: rain; rain") and "Europe" not in geography


def test_excerpts_are_whole_paragraphs_of_about_a_size_in_bytes(tmp_path):
    blocks = [f"{i:03} " + "ä" * 98 for i in range(100)]  # of 200 bytes
    (tmp_path / "book.txt").write_text("\n\n".join(blocks), encoding="utf-8")
    source = Source(kind="prose", name="book", license="CC0-1.0", files={"book.txt": 4}, size=1000)
    rows = list(rows_of(source, tmp_path))
    assert [row["text"].split("\n\n") for row in rows] == [
        [*blocks[i : i + 4], blocks[i + 4] + "\n"] for i in (2, 26, 51, 75)
    ]
    assert {(row["kind"], row["source"], row["license"]) for row in rows} == {
        ("prose", "book", "CC0-1.0")
    }


def test_each_kind_is_spread_evenly():
    rows = [{"kind": kind, "text": i} for kind, n in (("a", 12), ("b", 4)) for i in range(n)]
    order = interleaved(rows)
    for begin in (0, 4, 8, 12):
        assert sum(row["kind"] == "b" for row in order[begin : begin + 4]) == 1
    assert sorted(map(str, order)) == sorted(map(str, rows))


def test_rows_overlapping_held_out_texts_are_dropped(tmp_path, monkeypatch, capsys):
    words = [f"word{i}" for i in range(13)]
    for name, text in (("good", " ".join(words[:12])), ("bad", " ".join(words))):
        (tmp_path / f"{name}.txt").write_text(text)
    source = Source(
        kind="prose", name="two", license="CC0-1.0", files={"good.txt": 1, "bad.txt": 1}
    )
    held_out, output = tmp_path / "held.txt", tmp_path / "texts.jsonl"
    held_out.write_text("Before. " + ", ".join(words).upper() + " after.")
    monkeypatch.setattr(default_texts, "SOURCES", (source,))
    command = [str(tmp_path), "--held-out", str(held_out), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["default_texts.py", *command])
    default_texts.main()
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [row["text"] for row in rows if row["kind"] == "prose"] == [" ".join(words[:12]) + "\n"]
    kept = [
        line
        for line in DEFAULT_TEXTS.read_text(encoding="utf-8").splitlines()
        if json.loads(line)["kind"] in default_texts.KEPT
    ]
    assert sorted(map(json.dumps, rows)) == sorted(
        map(json.dumps, [*map(json.loads, kept), *(r for r in rows if r["kind"] == "prose")])
    )
    assert f"{len(rows)} rows" in capsys.readouterr().out
