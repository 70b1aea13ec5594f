"""Fixtures of all product tests: a limit on steps without events, a byte-fallback tokenizer, and
the arguments of `qserve serve`."""

import dataclasses

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from qserve.cli import COMMANDS
from qserve.engine.engine import Engine
from qserve.text.tokenizer import Tokenizer

MAX_STEPS_WITHOUT_EVENTS = 1000


@pytest.fixture(autouse=True)
def step_limit(monkeypatch):
    """Fail the test if the engine emits nothing for so many steps, instead of hanging."""
    step, in_vain = Engine.step, 0

    def counted(engine):
        nonlocal in_vain
        events = step(engine)
        in_vain = 0 if events else in_vain + 1
        assert in_vain <= MAX_STEPS_WITHOUT_EVENTS, "the engine emits nothing any more"
        return events

    monkeypatch.setattr(Engine, "step", counted)


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory) -> Tokenizer:
    """A tokenizer like Llama 2's: spaces are part of words, rare characters are bytes."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for token in ["\u2581", "a", "b", "\u2581a", "ab", "\u2581ab", "!"]:
        vocab[token] = len(vocab)
    merges = [("\u2581", "a"), ("a", "b"), ("\u2581a", "b")]
    backend = Backend(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    folder = tmp_path_factory.mktemp("byte_fallback")
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)
    return Tokenizer(folder)


@pytest.fixture
def served(monkeypatch):
    """Arguments that `qserve serve` got."""
    seen = []
    command = dataclasses.replace(COMMANDS["serve"], run=lambda *given: seen.append(given) or 0)
    monkeypatch.setitem(COMMANDS, "serve", command)
    return seen
