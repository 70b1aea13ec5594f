"""Gemma 4's tokenizer in GGUF: SentencePiece with a list of merges, and tokens of tool calls."""

import json
import urllib.request

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Backend

from formats.gguf.container import read_gguf
from formats.gguf.tokenizer import CONTROL, USER_DEFINED
from formats.gguf.writing.export import export_gguf
from qserve.text.tokenizer import Tokenizer
from tests.conftest import make_tiny
from tests.tiny_families import TINY, TINY_FAMILIES

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<|tool_call>", "<tool_call|>"]
TEXTS = ("abc def", "h\u00e9llo  x", "a b\n\nc", " ab", "abab\ncd  e", "<|tool_call>ab<tool_call|>")
KEY = "tokenizer.ggml"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Folders of GGUF files are made below this home."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def make(folder, adds_bos):
    """A tiny Gemma 4 with a tokenizer of as many tokens, and the file that it becomes."""
    make_tiny(folder, *TINY_FAMILIES["gemma4_moe"])
    letters = ["\u2581", *(chr(97 + i) for i in range(26))]
    tokens = [*SPECIAL, *(f"<0x{i:02X}>" for i in range(256)), *letters]
    pairs = [(a, b) for a in letters for b in letters][: TINY["vocab_size"] - len(tokens)]
    tokens += [left + right for left, right in pairs]
    model = models.BPE(
        {text: number for number, text in enumerate(tokens)},
        merges=pairs,
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Backend(model)
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens([AddedToken(each, normalized=False) for each in SPECIAL])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", 2)]
        )
    backend.save(str(folder / "tokenizer.json"))
    names = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "pad", "unk")}
    stated = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    file = folder.with_suffix(".gguf")
    export_gguf(folder, file)
    return backend, file


@pytest.mark.parametrize(("adds_bos", "kind"), [(True, "gemma4"), (False, "llama")])
def test_token_ids_equal_source_tokenizer(tmp_path, adds_bos, kind):
    """llama.cpp adds <bos> to all texts of the kind gemma4."""
    backend, file = make(tmp_path / "source", adds_bos)
    stated = read_gguf(file).metadata
    assert stated[f"{KEY}.model"] == kind and (f"{KEY}.merges" in stated) == adds_bos
    found = Tokenizer(file)
    for text in TEXTS:
        assert found.encode(text) == backend.encode(text).ids, text


def test_tool_call_tokens_are_not_skipped(tmp_path):
    """As llama.cpp's converter types them, since its parser reads them from the text."""
    _, file = make(tmp_path / "source", True)
    types = read_gguf(file).metadata[f"{KEY}.token_type"]
    assert [types[i] for i in (0, 1, 2, 4, 5)] == [CONTROL] * 3 + [USER_DEFINED] * 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("adds_bos", [True, False])
def test_token_ids_equal_llama_cpp(tmp_path, adds_bos):
    xllamacpp = pytest.importorskip("xllamacpp", reason="llama.cpp: xllamacpp is not installed")
    backend, file = make(tmp_path / "source", adds_bos)
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_parallel, params.warmup = 256, 1, False
    params.cpuparams.n_threads = 1
    server = xllamacpp.Server(params)
    url = f"{server.listening_address}/tokenize"
    for text in TEXTS[:-1]:
        data = json.dumps({"content": text, "add_special": True}).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as reply:
            assert json.loads(reply.read())["tokens"] == backend.encode(text).ids, text
