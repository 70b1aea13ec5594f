"""Nemotron 3's experts without a gate: wrong readings are seen, other variants are refused."""

import json
from dataclasses import replace

import pytest
import torch

from qkernels import ops
from qkernels.moe import reference
from qserve.llm import LLM
from qserve.model.blocks.moe import MoeMlp
from tests.qserve.model.variants import TOKENS, edited, logits, relative

NAME = "nemotron_h_moe"


def mixtures(change):
    """`change` of each block with experts of a decoder."""

    def plant(decoder, monkeypatch):
        blocks = [module for module in decoder.modules() if isinstance(module, MoeMlp)]
        assert len(blocks) == 2
        for block in blocks:
            change(block)

    return plant


def routing(**different):
    def change(block):
        block.router.routing = replace(block.router.routing, **different)

    return mixtures(change)


def bias_in_weights(decoder, monkeypatch):
    """The correction is added to the scores for good, not for the choice alone."""
    right = reference.route

    def wrong(logits_ME, routing, correction_E=None, numbers_E=None):
        found = right(logits_ME, routing, correction_E, numbers_E)
        added = correction_E[found.ids_Mk.long()]
        return found._replace(weights_Mk=found.weights_Mk + added * routing.factor)

    monkeypatch.setattr(reference, "route", wrong)


def activation(function):
    """Another activation of the experts that a router chooses."""

    def plant(decoder, monkeypatch):
        monkeypatch.setattr(reference, "glu", lambda x_MI, kind: function(x_MI))

    return plant


def norm_after(decoder, monkeypatch):
    """The norm is applied to what the experts return, not to what they read."""
    for layer in decoder.layers:
        if isinstance(getattr(layer.attention, "mlp", None), MoeMlp):

            def wrong(x_TC, residual_TC, step, cache, aux_states=None, layer=layer):
                plan = layer.attention.plan(x_TC.shape[0])
                residual_TC = layer.norm(x_TC, residual_TC, plan.input)[1]
                out_TC = layer.attention(residual_TC, plan, step, cache)
                return layer.norm(out_TC, torch.zeros_like(out_TC), plan.input)[0], residual_TC

            monkeypatch.setattr(layer, "forward", wrong)


WRONG = {
    "choice without the bias": mixtures(
        lambda block: block.router.correction.zero_()  # as in files that lack it
    ),
    "bias in the weights": bias_in_weights,
    "softmax": routing(scores="softmax"),
    "weights not normalized": routing(normalized=False),
    "without the factor": routing(factor=1.0),
    "without groups": routing(num_groups=1, top_groups=1),
    "expert groups ranked by best expert": routing(group_score="max"),
    "ReLU not squared": activation(torch.relu),
    "the square of all": activation(torch.square),
    "without the shared expert": mixtures(lambda block: setattr(block, "shared", None)),
    "a shared expert with SiLU": mixtures(
        lambda block: setattr(block.shared.mlp, "activation", ops.ActSpec(kind="silu", gated=False))
    ),
    "norm after the experts": norm_after,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_interpretation_fails_comparison(tiny_model, monkeypatch, wrong):
    llm = LLM(tiny_model(NAME), device="cpu", max_model_len=64)
    right = llm.logits(TOKENS)
    with torch.inference_mode():
        WRONG[wrong](llm.engine.runner.decoder, monkeypatch)
    assert relative(llm.logits(TOKENS), right) > 1e-3


def test_published_layer_pattern_is_equivalent(tiny_model, tmp_path):
    """Nemotron 3's files state the kinds of layers as a string, E for experts."""

    def published(config):
        for key in ("layers_block_type", "num_logits_to_keep"):
            del config[key]
        config.update(hybrid_override_pattern="ME*E", num_hidden_layers=4)

    folder = edited(tiny_model(NAME), tmp_path / "published", config=published)
    assert torch.equal(logits(folder), logits(tiny_model(NAME)))


def test_stacks_are_read_as_a_linear_for_each_expert(tiny_model, tmp_path):
    """transformers' modules hold the matrices of all experts in one tensor."""

    def stack(state):
        for stem in [name[:-17] for name in state if name.endswith(".experts.0.up_proj.weight")]:
            for leaf in ("up_proj", "down_proj"):
                each = [state.pop(f"{stem}.{e}.{leaf}.weight") for e in range(8)]
                state[f"{stem}.{leaf}"] = torch.stack(each)

    folder = edited(tiny_model(NAME), tmp_path / "stacked", stack)
    assert any(name.endswith("mixer.experts.up_proj") for name in stored_names(folder))
    assert torch.equal(logits(folder), logits(tiny_model(NAME)))


def stored_names(folder):
    data = (folder / "model.safetensors").read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def activated(block):
    """The linear before the experts is activated, as one of a feed-forward would be."""
    block.before.register_forward_hook(lambda module, args, output: torch.relu(output))


LATENT_WRONG = {
    "activated latent": activated,
    "without the shared expert": lambda block: setattr(block, "shared", None),
    "another linear after the experts": lambda block: block.after.weight.mul_(-1),
    "without the factor": lambda block: setattr(
        block.router, "routing", replace(block.router.routing, factor=1.0)
    ),
}


@pytest.mark.parametrize("wrong", LATENT_WRONG)
def test_wrong_interpretation_of_latent_fails_comparison(tiny_model, wrong):
    """Experts of Nemotron 3's larger models, which read a projection of the layer's input."""
    llm = LLM(tiny_model("nemotron_h_latent"), device="cpu", max_model_len=64)
    right = llm.logits(TOKENS)
    (block,) = (m for m in llm.engine.runner.decoder.modules() if isinstance(m, MoeMlp))
    with torch.inference_mode():
        LATENT_WRONG[wrong](block)
    assert relative(llm.logits(TOKENS), right) > 1e-3
