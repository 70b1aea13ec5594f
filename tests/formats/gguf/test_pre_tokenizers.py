"""Rules that split texts into words, and a tokenizer with listed merges on whole texts."""

import pytest
from tokenizers import Regex
from tokenizers.pre_tokenizers import Sequence, Split

from formats.gguf.pre_tokenizers import PRE_TOKENIZERS
from formats.gguf.writing.tokenizer import tokenizer_metadata
from qserve.text.tokenizer import Tokenizer
from tests.formats.gguf.written import F16, llama_metadata, llama_tensors, write_gguf

# of the models' own tokenizer.json
OWN = {
    "bloom": r" ?[^(\s|[.,!?…。，、।۔،])]+",
    "jais-2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)"
        r"|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
    ),
}
TEXT = "Il a dit: «Oui, 1234!»  (vrai|faux)      def f(x):\n\n   return x's 你好。世界 [a]"
TEXT += " " * 37


@pytest.mark.parametrize("name", OWN)
def test_pre_tokenizer_splits_equal_source_rule(name):
    rules = [Split(Regex(text), "isolated") for text in PRE_TOKENIZERS[name].splits]
    found = Sequence(rules).pre_tokenize_str(TEXT)
    assert found == Split(Regex(OWN[name]), "isolated").pre_tokenize_str(TEXT)
    assert len(found) > 15


def test_bloom_pre_tokenizer_is_written_by_name(tmp_path):
    (tmp_path / "tokenizer.json").write_text(
        """{"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}, "pre_tokenizer":
        {"type": "Sequence", "pretokenizers": [{"type": "Split", "behavior": "Isolated",
        "pattern": {"Regex": " ?[^(\\\\s|[.,!?…。，、।۔،])]+"}}, {"type": "ByteLevel",
        "use_regex": false}]}}""",
        encoding="utf-8",
    )
    assert tokenizer_metadata(tmp_path, 2, "bloom")["tokenizer.ggml.pre"] == "bloom"


def test_gemma_4_merges_are_listed_and_cross_words(docs_5m, tmp_path, monkeypatch):
    """No rule splits words: a merge may hold a space in its middle."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    texts = ["<pad>", "<bos>", "<unk>", "▁", "a", "b", "ab", "▁ab", "ab▁ab", "\n"]
    count = llama_tensors(docs_5m, F16)["token_embd.weight"][0].shape[0]
    texts += [f"<0x{i:02X}>" for i in range(256)]
    types = [3, 3, 2, *[1] * 7, *[6] * 256]
    texts += [f"[PAD{i}]" for i in range(len(texts), count)]
    metadata = {
        key: x for key, x in llama_metadata(docs_5m).items() if not key.startswith("tokenizer")
    }
    metadata |= {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": types + [5] * (count - len(types)),
        "tokenizer.ggml.merges": ["a b", "▁ ab", "ab ▁ab"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }
    tensors = llama_tensors(docs_5m, F16)
    tokenizer = Tokenizer(write_gguf(tmp_path / "gemma4.gguf", metadata, tensors))
    for text, ids in (
        ("ab ab", [8]),
        ("ab  ab", [6, 3, 7]),
        ("b\nab", [5, 9, 6]),
        ("é", [10 + byte for byte in "é".encode()]),
    ):
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
