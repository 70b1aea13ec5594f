"""llama.cpp computes our files of models with experts or states as we do."""

import json
import shutil

import pytest
import torch

from formats.gguf.writing.export import export_gguf
from qserve.llm import LLM
from tests.conftest import make_tiny
from tests.formats.gguf.first_tokens import IDS, first_token
from tests.formats.gguf.mixture_cases import GPT_OSS, MINIMAX_PART, OTHERS, USUAL
from tests.tiny_families import TINY_FAMILIES

pytest.importorskip("xllamacpp", reason="llama.cpp: xllamacpp is not installed")


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", (*USUAL, *OTHERS, GPT_OSS, MINIMAX_PART), ids=lambda case: case[0])
def test_logits_equal_llama_cpp(case, docs_5m, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    family, different, _ = case
    config_class, extra = TINY_FAMILIES[family]
    vocab_size = json.loads((docs_5m / "config.json").read_text())["vocab_size"]
    source, file = tmp_path / family, tmp_path / "model.gguf"
    make_tiny(source, config_class, {**extra, **different, "vocab_size": vocab_size})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(docs_5m / name, source / name)
    export_gguf(source, file)
    theirs = first_token(file, exact=True)
    logits = LLM(str(file), device="cpu", dtype="float32", max_model_len=64).logits(IDS)
    ours = torch.log_softmax(logits[-1].float(), -1)
    assert max(theirs, key=theirs.get) == int(ours.argmax())
    assert max(abs(value - float(ours[token])) for token, value in theirs.items()) < 2e-3
