"""LFM2: a wrong reading of its tensors or states is seen; published configs are read."""

import pytest
import torch

from qkernels import ops
from qserve.llm import LLM
from qserve.model.blocks.states.short_conv import ShortConv
from tests.qserve.model.test_hybrid_tokens import MODES, greedy, prompts
from tests.qserve.model.variants import TOKENS, edited, logits, relative


def convolutions(change):
    """`change` of each short convolution of a decoder."""

    def plant(decoder):
        for layer in decoder.layers:
            if isinstance(layer.attention, ShortConv):
                change(layer.attention)

    return plant


def parts_reordered(*order):
    def change(block):
        parts = block.in_proj.weight.chunk(3)
        block.in_proj.weight = torch.cat([parts[part] for part in order])

    return convolutions(change)


def taps_changed(function):
    return convolutions(lambda block: setattr(block, "conv_weight", function(block.conv_weight)))


def norms_of_heads_exchanged(decoder):
    attention = decoder.layers[1].attention
    attention.q_norm, attention.k_norm = attention.k_norm, attention.q_norm


def gate_and_up_exchanged(decoder):
    for layer in decoder.layers:
        weight = layer.mlp.up_proj.weight
        layer.mlp.up_proj.weight = torch.cat(weight.chunk(2)[::-1])


WRONG = {
    "b and c swapped": parts_reordered(1, 0, 2),
    "c and x swapped": parts_reordered(0, 2, 1),
    "convolution taps reversed": taps_changed(lambda weight: weight.flip(1)),
    "convolution one token late": taps_changed(lambda weight: weight.roll(1, 1)),
    "QK norms swapped": norms_of_heads_exchanged,
    "w1 for w3": gate_and_up_exchanged,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_interpretation_fails_comparison(tiny_model, wrong):
    llm = LLM(tiny_model("lfm2"), device="cpu", max_model_len=64)
    right = llm.logits(TOKENS)
    with torch.inference_mode():
        WRONG[wrong](llm.engine.runner.decoder)
    assert relative(llm.logits(TOKENS), right) > 1e-3


@pytest.mark.parametrize(
    "change",
    [torch.zeros_like, lambda states: states.flip(2), lambda states: states.roll(1, 0)],
    ids=["forgotten", "in the other order", "of another slot"],
)
def test_wrong_state_fails_comparison(tiny_model, monkeypatch, change):
    llm = LLM(tiny_model("lfm2"), device="cpu", max_model_len=64, **MODES["chunked"])
    right = [output.outputs[0].token_ids for output in greedy(llm, prompts()[1:4], 4)]
    convolve = ops.short_conv_

    def wrong(mixed_TC, weight_CW, bias_C, conv_PCL, *others):
        conv_PCL.copy_(change(conv_PCL))
        return convolve(mixed_TC, weight_CW, bias_C, conv_PCL, *others)

    monkeypatch.setattr(ops, "short_conv_", wrong)
    assert right != [output.outputs[0].token_ids for output in greedy(llm, prompts()[1:4], 4)]


def test_published_config_keys_are_equivalent(tiny_model, tmp_path):
    """`block_ff_dim`, `full_attn_idxs` and `tie_embedding`, as LFM2's files have them."""

    def published(config):
        for key in ("intermediate_size", "layer_types", "tie_word_embeddings"):
            del config[key]
        config.update(block_ff_dim=128, full_attn_idxs=[1], tie_embedding=True)

    folder = edited(tiny_model("lfm2"), tmp_path / "published", config=published)
    assert torch.equal(logits(folder), logits(tiny_model("lfm2")))
