"""Helpers of the tests of variants: tokens, their logits, a changed checkpoint."""

import json

import torch
from safetensors.torch import load_file, save_file

from qserve.llm import LLM
from tests.conftest import make_tiny

TOKENS = [3, 17, 200, 5, 9, 77, 41, 300, 8, 1, 2, 500]


def model_maker(tiny_model, tmp_path_factory, variants):
    """Name of a tiny family, or of one of `variants` (arguments of make_tiny) -> its folder."""
    made = {}

    def make(name):
        if name not in variants:
            return tiny_model(name)
        if name not in made:
            made[name] = make_tiny(tmp_path_factory.mktemp("variant") / "model", *variants[name])
        return made[name]

    return make


def logits(folder):
    return LLM(folder, device="cpu", max_model_len=64).logits(TOKENS)


def edited(folder, target, tensors=None, config=None):
    """A copy of a folder with its tensors and its config changed."""
    target.mkdir()
    state = load_file(folder / "model.safetensors")
    value = json.loads((folder / "config.json").read_text())
    for change, thing in ((tensors, state), (config, value)):
        if change:
            change(thing)
    (target / "config.json").write_text(json.dumps(value))
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    return target


def relative(found: torch.Tensor, want: torch.Tensor) -> float:
    """||found - want|| / ||want||."""
    return float((found - want).norm() / want.norm())
