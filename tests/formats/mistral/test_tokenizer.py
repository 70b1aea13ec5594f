"""Tokenizers of Mistral's formats: ids are those of transformers' converter."""

import base64
import json
import struct

import pytest
from tokenizers import Tokenizer

from formats.errors import CheckpointError
from formats.mistral.sentence_piece import read_pieces
from formats.mistral.tekken import Tekken, byte_characters
from formats.mistral.tokenizer import find_tokenizer, tokenizer_files
from tests.mistral_files import SPECIAL, tekken_of, write_tekken

TEXTS = (
    *("what is the page table", " the  page\n\n\tlooking", "é 東京 1234", "[INST]look[/INST]", ""),
    *("\x00\x7f\xa0\xad", "e\u0301 🦕", "the" * 40, "a[IMG]b</s>"),
)
TEXT = {"max_position_embeddings": 256}


def tokenizer_of(folder):
    files = tokenizer_files(folder, TEXT)
    return Tokenizer.from_str(json.dumps(files["tokenizer.json"])), files


def test_ids_are_those_of_transformers(tmp_path):
    from transformers.integrations.mistral.tokenizer import MistralConverter

    write_tekken(tmp_path, 400)
    own, files = tokenizer_of(tmp_path)
    judge = MistralConverter(str(tmp_path / "tekken.json")).converted()
    assert own.get_vocab() == judge.get_vocab()
    for text in TEXTS:
        ids = own.encode(text, add_special_tokens=False).ids
        assert ids == judge.encode(text, add_special_tokens=False).ids
        assert own.encode(text).ids == [1, *ids]
        assert own.decode(ids, skip_special_tokens=False) == text
    assert len(own.encode(" the page", add_special_tokens=False).ids) == 2  # merges apply
    assert files["generation_config.json"]["eos_token_id"] == 2


def test_merges_are_the_lowest_rank_first(tmp_path):
    """By ranks "b c" comes before "a b", and both before "a bc"."""
    values = tekken_of(300)
    del values["config"]["default_vocab_size"]
    for number, token in enumerate((b"bc", b"ab", b"abc")):
        values["vocab"][256 + number]["token_bytes"] = base64.b64encode(token).decode()
    (tmp_path / "tekken.json").write_text(json.dumps(values))
    own, _ = tokenizer_of(tmp_path)
    first = len(own.encode("abcd", add_special_tokens=False).ids)
    assert first == 2 and own.encode("abd", add_special_tokens=False).tokens == ["ab", "d"]


def test_a_word_that_is_a_token_is_never_cut(tmp_path):
    """As in tiktoken, although no merge leads to the token."""
    values = tekken_of(300)
    del values["config"]["default_vocab_size"]
    values["vocab"][256]["token_bytes"] = base64.b64encode(b"qzx").decode()
    (tmp_path / "tekken.json").write_text(json.dumps(values))
    own, _ = tokenizer_of(tmp_path)
    assert own.encode("qzx", add_special_tokens=False).tokens == ["qzx"]


def test_special_tokens_of_the_first_files(tmp_path):
    """Files before v7 list none, and their image token is 10."""
    values = tekken_of(400, "v3")
    del values["special_tokens"]
    (tmp_path / "tekken.json").write_text(json.dumps(values))
    special = Tekken.read(tmp_path / "tekken.json").special
    assert list(special[:20]) == SPECIAL[:20] and special[10] == "[IMG]"
    assert special[20:] == tuple(f"<SPECIAL_{number}>" for number in range(20, 40))


def test_characters_of_bytes_are_those_of_transformers():
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    assert dict(enumerate(byte_characters())) == bytes_to_unicode()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"config": None}, "expected a config with a pattern"),
        ({"vocab": [{"rank": 1, "token_bytes": "AA=="}]}, "token_bytes of each rank, in order"),
        ({"vocab": [{"rank": 0, "token_bytes": "AA="}]}, "token_bytes of each rank, in order"),
        ({"vocab": [{"token_bytes": "AA=="}] * 2}, "have the same bytes"),
        ({"special_tokens": [{"rank": 3, "token_str": "<s>"}]}, "special_tokens with ranks from 0"),
        ({"special_tokens": [{"rank": 0, "token_str": ""}]}, "special_tokens with ranks from 0"),
        (
            {"config": {"pattern": "x", "default_num_special_tokens": 3}},
            "expected 26 special tokens or more, found 3",
        ),
        (
            {"config": {"pattern": "x", "default_vocab_size": 9999}},
            "expected a default_vocab_size of",
        ),
    ],
)
def test_damaged_files_are_refused(tmp_path, change, words):
    path = tmp_path / "tekken.json"
    path.write_text(json.dumps({**tekken_of(400), **change}))
    with pytest.raises(CheckpointError, match=words):
        Tekken.read(path)


# text, score, kind as in SentencePiece's protocol
PIECES = [
    *(("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("[INST]", 0.0, 3)),
    *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)),
    *(("▁t", -0.0, 1), ("he", -1.0, 1), ("▁the", -2.0, 1), ("▁", -3.0, 1), ("t", -4.0, 1)),
    *(("h", -5.0, 1), ("e", -6.0, 1), ("a", -7.0, 1)),
]


def field(number, kind, data):
    return bytes([number << 3 | kind]) + data


def model_of(pieces):
    """The bytes of a SentencePiece model, as protocol buffers store it."""
    found = b""
    for text, score, kind in pieces:
        own = text.encode()
        piece = field(1, 2, bytes([len(own)]) + own) + field(2, 5, struct.pack("<f", score))
        piece += field(3, 0, bytes([kind]))
        found += field(1, 2, bytes([len(piece)]) + piece)
    # fields that are not read: a message, a number of two bytes
    return found + field(2, 2, b"\x03abc") + field(3, 0, b"\x80\x01")


def test_pieces_of_a_sentence_piece_model(tmp_path):
    path = tmp_path / "tokenizer.model.v3"
    path.write_bytes(model_of(PIECES))
    assert [tuple(piece) for piece in read_pieces(path)] == PIECES
    own, files = tokenizer_of(tmp_path)
    assert own.encode("the").tokens == ["<s>", "▁the"]
    # a text between control tokens begins with a space, as in Mistral's code
    chat = own.encode("<s>[INST]the[/INST]", add_special_tokens=False)
    assert chat.tokens[:3] == ["<s>", "[INST]", "▁the"]
    assert own.encode(" a", add_special_tokens=False).tokens == ["▁", "▁", "a"]
    assert own.decode(own.encode("a the").ids) == "a the"
    assert "'[INST]'" in files["chat_template.jinja"]


@pytest.mark.parametrize("data", [b"", b"\x0a\xff", b"not a model", b"\x0b\x00" * 9])
def test_other_files_are_no_sentence_piece_models(tmp_path, data):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="is not a SentencePiece model"):
        read_pieces(path)


def test_the_newest_tokenizer_is_taken(tmp_path):
    for name in ("tokenizer.model", "tokenizer.model.v2", "tokenizer.model.v3", "notes.model.v9"):
        (tmp_path / name).write_bytes(b"")
    assert find_tokenizer(tmp_path).name == "tokenizer.model.v3"
    (tmp_path / "tekken.json").write_text("{}")
    assert find_tokenizer(tmp_path).name == "tekken.json"
