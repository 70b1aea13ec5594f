"""A head that differs from the embedding it is said to be tied to. transformers is the judge."""

import json
import logging

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from calibrate.pipeline import quantize_checkpoint
from formats.scheme import Scheme
from tests.qserve.model.variants import TOKENS, logits, relative


def expected_logits(folder) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0]


@pytest.fixture
def own_head(tiny_model, tmp_path):
    """A tiny Llama with a head of its own whose config.json asks for a tied one."""
    folder = tmp_path / "own"
    folder.mkdir()
    source = tiny_model("llama")
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" in tensors
    return folder


def test_untied_head_is_served_and_reported(own_head, caplog):
    with caplog.at_level(logging.WARNING):
        found = logits(own_head)
    assert relative(found, expected_logits(own_head)) < 1e-5
    assert "lm_head differs from the embedding" in caplog.text


def test_head_copy_is_served_as_one_matrix(own_head):
    tensors = load_file(own_head / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, own_head / "model.safetensors", metadata={"format": "pt"})
    assert relative(logits(own_head), expected_logits(own_head)) < 1e-5


def test_quantize_keeps_untied_head(own_head, tmp_path):
    target = tmp_path / "quantized"
    report = quantize_checkpoint(
        own_head,
        target,
        scheme=Scheme.parse("w8a16-sym-g32"),
        output_format="compressed-tensors",
        progress=False,
    )
    assert any("lm_head is kept" in warning for warning in report.warnings)
    assert json.loads((target / "config.json").read_text())["tie_word_embeddings"] is False
    exact, theirs = expected_logits(own_head), expected_logits(target)
    assert relative(theirs, exact) < 0.05
    assert relative(logits(target), theirs) < 1e-4
