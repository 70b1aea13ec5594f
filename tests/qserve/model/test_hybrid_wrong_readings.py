"""Wrong readings of layers with states change logits or later tokens: test_hybrid_tokens.py would
see them."""

import pytest
import torch

from qkernels import ops
from qkernels.delta_net import reference as delta_reference
from qserve.llm import LLM
from qserve.model.blocks.states.delta_net import DeltaNet
from tests.qserve.model.test_hybrid_tokens import DELTA_NETS, MODES, greedy, prompts
from tests.qserve.model.variants import TOKENS, relative
from tests.qserve.model.wrong_readings import other_rotation, without_offset


def mixers(wanted, change):
    """`change` of each layer's attention, or of each layer's net."""

    def plant(decoder, monkeypatch):
        for layer in decoder.layers:
            if isinstance(layer.attention, DeltaNet) == wanted:
                change(layer.attention)

    return plant


def nets(change):
    return mixers(True, change)


def attentions(change):
    return mixers(False, change)


def split_mixed(change):
    """`change` of (q, k, v, g, beta) as the state's update gets them."""

    def plant(decoder, monkeypatch):
        right = delta_reference.split_mixed
        monkeypatch.setattr(
            delta_reference, "split_mixed", lambda mixed, *rest: change(mixed, *right(mixed, *rest))
        )

    return plant


def any_length(mixed_TC, q, k, v, g, beta):
    """Queries and keys as long as they come."""
    H, K = q.shape[1:]
    qk = mixed_TC[:, : mixed_TC.shape[1] - v[0].numel()]
    lengths = qk.unflatten(1, (-1, K)).norm(dim=-1).chunk(2, 1)
    of_q, of_k = (x.repeat_interleave(H // x.shape[1], 1)[..., None] for x in lengths)
    return q * of_q, k * of_k, v, g, beta


def queries_unscaled(mixed_TC, q, k, v, g, beta):
    return q * q.shape[-1] ** 0.5, k, v, g, beta


def key_heads_in_turn(mixed_TC, q, k, v, g, beta):
    """Value head h reads key head h mod J, not h div (H / J)."""
    order = [0, 2, 1, 3]
    return q[:, order], k[:, order], v, g, beta


def conv_state(change):
    """`change` of what the convolution kept, before each step."""

    def plant(decoder, monkeypatch):
        right = ops.causal_conv_

        def wrong(x_TC, weight_CW, bias_C, conv_PCL, *others):
            conv_PCL.copy_(change(conv_PCL))
            return right(x_TC, weight_CW, bias_C, conv_PCL, *others)

        monkeypatch.setattr(ops, "causal_conv_", wrong)

    return plant


def memory(change):
    """`change` of the states, before each step."""

    def plant(decoder, monkeypatch):
        right = ops.delta_rule_

        def wrong(*args, **named):
            args[5].copy_(change(args[5]))
            return right(*args, **named)

        monkeypatch.setattr(ops, "delta_rule_", wrong)

    return plant


def gates_exchanged(net):
    net.gates.weight = torch.cat(net.gates.weight.chunk(2)[::-1])


def z_for_values(net):
    shape = net.shape
    qk, v, z = net.in_proj.weight.split([2 * shape.keys, shape.values, shape.values])
    net.in_proj.weight = torch.cat([qk, z, v])


def stored_by_head(attention):
    """All queries and then all gates, where the file has [query | gate] of each head."""
    H, D = attention.num_heads, attention.head_dim
    both, rest = attention.qkv_proj.weight.split([2 * H * D, attention.num_kv_heads * 2 * D])
    both = both.unflatten(0, (2, H, D)).transpose(0, 1).flatten(0, 2)
    attention.qkv_proj.weight = torch.cat([both, rest])


def gate_with_the_other_sign(attention):
    H, D = attention.num_heads, attention.head_dim
    attention.qkv_proj.weight[H * D : 2 * H * D] *= -1


def more_rotates(attention):
    attention.rotary.cos_sin = attention.rotary.cos_sin.repeat_interleave(2, 1)


def change_tensor(name, function):
    return nets(lambda net: setattr(net, name, function(getattr(net, name))))


WRONG = {
    "queries and keys not L2-normalized": split_mixed(any_length),
    "queries that are not scaled": split_mixed(queries_unscaled),
    "key heads interleaved": split_mixed(key_heads_in_turn),
    "decay by half": split_mixed(lambda _, q, k, v, g, beta: (q, k, v, g / 2, beta)),
    "writes with the other sign": split_mixed(lambda _, q, k, v, g, beta: (q, k, v, g, -beta)),
    "decay without dt_bias": change_tensor("dt_bias", torch.zeros_like),
    "wrong exponential of A_log": change_tensor("a_log", torch.exp),
    "delta-net norm adds 1": change_tensor("norm", lambda norm: norm + 1),
    "convolution one token late": change_tensor("conv_weight", lambda weight: weight.roll(1, 1)),
    "convolution taps reversed": change_tensor("conv_weight", lambda weight: weight.flip(1)),
    "b and a swapped": nets(gates_exchanged),
    "z used as values": nets(z_for_values),
    "norm weights without offset 1": lambda decoder, _: without_offset(decoder),
    "QK norm weights without offset 1": attentions(lambda each: each.q_norm.sub_(1)),
    "gate of attention by head": attentions(stored_by_head),
    "gate of attention with the other sign": attentions(gate_with_the_other_sign),
    "larger rotary dimension": attentions(more_rotates),
    "interleaved RoPE": lambda decoder, _: other_rotation(decoder.layers[1]),
}


# Visible in decode steps only.
WRONG_LATER = {
    "convolution state cleared": conv_state(torch.zeros_like),
    "convolution state keeps oldest token": conv_state(lambda c: c.flip(2)),
    "recurrent state cleared": memory(torch.zeros_like),
    "recurrent state transposed": memory(lambda s: s.transpose(2, 3).contiguous().view_as(s)),
    "recurrent state of another slot": memory(lambda s: s.roll(1, 0)),
}


@pytest.mark.parametrize("name", DELTA_NETS)
def test_wrong_interpretation_fails_comparison(hybrid, monkeypatch, name):
    """One start for all readings; the decoder gets its right weights back after each."""
    llm = LLM(hybrid(name), device="cpu", max_model_len=64)
    decoder, right = llm.engine.runner.decoder, llm.logits(TOKENS)
    kept = {
        module: {name: buffer.clone() for name, buffer in module.named_buffers(recurse=False)}
        for module in decoder.modules()
    }
    for wrong, plant in WRONG.items():
        with monkeypatch.context() as patch, torch.inference_mode():
            plant(decoder, patch)
            assert relative(llm.logits(TOKENS), right) > 1e-3, wrong
        for module in decoder.modules():
            for buffer, value in kept[module].items():
                setattr(module, buffer, value.clone())
        for layer in decoder.layers:
            if not isinstance(layer.attention, DeltaNet):
                layer.attention.rotary.interleaved = False
        assert relative(llm.logits(TOKENS), right) == 0, f"not mended: {wrong}"


def test_wrong_state_fails_comparison(hybrid, monkeypatch):
    """By the tokens of requests that go on, from chunk to chunk and from token to token."""
    llm = LLM(hybrid("qwen3_5"), device="cpu", max_model_len=64, **MODES["chunked"])

    def tokens():
        return [output.outputs[0].token_ids for output in greedy(llm, prompts()[1:4], 4)]

    right = tokens()
    for wrong, plant in WRONG_LATER.items():
        with monkeypatch.context() as patch:
            plant(llm.engine.runner.decoder, patch)
            assert tokens() != right, wrong
    assert tokens() == right
