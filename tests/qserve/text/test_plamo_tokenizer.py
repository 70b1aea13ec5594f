"""PLaMo's tokenizer.jsonl is read without the folder's code, and splits texts as that code does."""

import json
import random
import re

import pytest

from calibrate.pipeline import quantize_checkpoint
from formats.scheme import Scheme
from qserve.text.load_tokenizer import load_tokenizer
from qserve.text.tokenizer import TextError, Tokenizer
from qserve.text.tokenizer_record import RecordedTokenizer
from tests.own_code.models import plamo2, write

NAMES = ["unk", "bos", "eos", "pad", "op"]
LETTERS = "abcd \n日本"
BYTE_SCORE, UNKNOWN = -5.0, -1000.0


def vocabulary():
    rng = random.Random(1)
    rows = [[f"<|plamo:{name}|>", 0.0, "UNKNOWN" if name == "unk" else "CONTROL"] for name in NAMES]
    rows += [[f"<0x{i:02X}>", BYTE_SCORE, "BYTE"] for i in range(256)]
    pieces = {*LETTERS, "=", "<", "0", "x", "A", ">", "q日"}
    pieces |= {"".join(rng.choices(LETTERS, k=rng.randint(2, 4))) for _ in range(120)}
    pieces |= {"=" * n for n in (2, 3, 4)}
    return rows + [[piece, -rng.uniform(3, 12), "NORMAL"] for piece in sorted(pieces)]


ROWS = vocabulary()
IDS = {piece: number for number, (piece, *_) in enumerate(ROWS)}


SCORES = {piece: round(score * 1e4) for piece, score, kind in ROWS if kind != "BYTE"}


def score_of(tokens):
    """Return the sum of pieces' scores; bytes count nothing."""
    return sum(SCORES.get(ROWS[token][0], 0) for token in tokens)


def split(text):
    """From the end: the best split of each rest of a text, the longest piece first."""
    best = {len(text): (0, [])}
    for i in reversed(range(len(text))):
        cover = [IDS[f"<0x{byte:02X}>"] for byte in text[i].encode()]
        found = [(UNKNOWN * 1e4 + best[i + 1][0], [*cover, *best[i + 1][1]])]
        for end in range(len(text), i, -1):
            if (piece := text[i:end]) in SCORES:
                score, rest = best[end]
                found.append((SCORES[piece] + score, [IDS[piece], *rest]))
        best[i] = max(found, key=lambda each: each[0])
    return best[0][1]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Stated values -> a folder with a tokenizer, and without records of others."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    def make(**stated):
        place = write(tmp_path / "x", plamo2())
        lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
        (place / "tokenizer.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        values = {
            **{"tokenizer_class": "Plamo2Tokenizer", "bos_token": "<|plamo:bos|>"},
            **{"auto_map": {"AutoTokenizer": ["tokenization_plamo.Plamo2Tokenizer", None]}},
            **stated,
        }
        (place / "tokenizer_config.json").write_text(json.dumps(values))
        (place / "tokenization_plamo.py").write_text("raise SystemExit('it ran')")
        return place

    return make


def test_token_ids_equal_published_code(folder):
    tokenizer, rng = Tokenizer(folder()), random.Random(2)
    for _ in range(400):
        text = "".join(rng.choices([*LETTERS, "é", "🦕", "\0", "q"], k=rng.randint(1, 40)))
        tokens, want = tokenizer.encode(text), split(text)
        assert tokenizer.decode(tokens) == text
        assert (len(tokens), score_of(tokens)) == (len(want), score_of(want))
        # in a run of three the best pieces may have two orders
        assert tokens == want or re.search(r"(.)\1\1", text, re.DOTALL)


def test_text_that_looks_like_a_byte_is_text(folder):
    tokenizer = Tokenizer(folder())
    assert tokenizer.encode("<0x0A>") == [IDS[each] for each in "<0x0A>"]
    assert tokenizer.encode("\u2028") == [IDS[f"<0x{each:02X}>"] for each in "\u2028".encode()]


def test_control_tokens(folder):
    """Only those that tokenizer_config.json names are hidden from texts."""
    tokenizer = Tokenizer(folder(add_bos_token=True))
    ids = tokenizer.encode("a<|plamo:op|>b<|plamo:eos|>")
    assert ids == [
        IDS[f"<|plamo:{name}|>"] if len(name) > 1 else IDS[name]
        for name in ("bos", "a", "op", "b", "eos")
    ]
    assert tokenizer.decode(ids) == "a<|plamo:op|>b"
    assert tokenizer.eos_token_id == 2
    plain = tokenizer.encode_plain("a<|plamo:eos|>")
    assert 2 not in plain
    assert tokenizer.decode(plain) == "a<|plamo:eos|>"


def test_long_runs_are_split(folder):
    thresholds = {"repeated_chars": 4, "consecutive_spaces": 3}
    stated = {f"break_around_{name}_threshold": count for name, count in thresholds.items()}
    tokenizer = Tokenizer(folder(**stated))
    for parts in (["ab", "    ", "cd"], ["a", "====", "日"], ["a ", "bbbbb", "c"], ["ab  cd"]):
        want = [token for part in parts for token in split(part)]
        assert tokenizer.encode("".join(parts)) == want


@pytest.mark.parametrize("in_file", [False, True])
def test_chat_template(folder, in_file):
    text = "{{ bos_token }}{% for m in messages %}<|plamo:op|>{{ m.content }}{% endfor %}"
    place = folder(**({} if in_file else {"chat_template": text}))
    if in_file:
        (place / "chat_template.jinja").write_text(text)
    tokenizer = Tokenizer(place)
    assert tokenizer.render_chat([{"role": "user", "content": "a"}]) == "<|plamo:bos|><|plamo:op|>a"


def test_second_start_reads_record(folder, monkeypatch):
    place = folder()
    first = load_tokenizer(place)
    monkeypatch.delitem(__import__("sys").modules, "transformers.models.auto.tokenization_auto")
    assert not isinstance(load_tokenizer(place), RecordedTokenizer)  # writes it
    second = load_tokenizer(place)
    assert isinstance(second, RecordedTokenizer)
    assert second.backend_tokenizer.to_str() == first.backend_tokenizer.to_str()


@pytest.mark.parametrize("text", ["", "{", '["a", 1]', '["a"]'])
def test_invalid_vocabulary_files_are_refused(folder, text):
    place = folder()
    (place / "tokenizer.jsonl").write_text(text)
    with pytest.raises(TextError, match="has no tokenizer that transformers can load"):
        Tokenizer(place)


def test_quantize_copies_tokenizer(folder, tmp_path):
    place = folder()
    scheme = Scheme.parse("w4a16-sym-g32")
    quantize_checkpoint(place, tmp_path / "y", scheme=scheme, recipe="rtn", progress=False)
    assert Tokenizer(tmp_path / "y").encode("ab日") == Tokenizer(place).encode("ab日")
