"""EAGLE and Medusa heads against their equations, written out; their layouts on disk."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from formats.errors import CheckpointError, InputError
from qserve.speculation.config import guess_method
from qserve.speculation.heads import eagle, medusa
from tests.qserve.speculation.head_steps import (
    HEAD,
    Text,
    context_of,
    load_target,
    nothing,
    write_head,
)
from tests.qserve.speculation.test_eagle3_head import norm

S, K = 11, 3


@pytest.fixture(scope="module")
def target(tiny_model):
    return load_target(tiny_model("llama"))


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 512, (40,), generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def hidden(target, ids):
    """The input of the target's output matrix [S, C]."""
    text = Text(target, nothing())
    seen = []
    text.drafter.propose = lambda step: seen.append(step.hidden_TC)
    text.step(ids, 0, S, num_drafts=0)
    return seen[0]


def eagle_reference(t, hidden, ids, target, **wrong):
    """Logits of K greedy drafts: fc, a layer without a norm before attention, no final norm."""
    state, tokens, positions = hidden, ids[1 : S + 1], torch.arange(S)
    past = (torch.zeros(4, 0, 16),) * 2
    found = []
    for _ in range(K):
        parts = [target.embedding.weight[tokens], state]
        x = torch.cat(parts[::-1] if wrong.get("state_first") else parts, -1)
        x = x @ t["fc.weight"].T + t.get("fc.bias", 0)
        residual = x
        if wrong.get("input_norm"):
            x = norm(x, torch.ones(64))
        p = "layers.0."
        q, k, v = (
            (x @ t[f"{p}self_attn.{n}_proj.weight"].T).view(len(x), -1, 16).transpose(0, 1)
            for n in "qkv"
        )
        turns = positions[:, None] * 100.0 ** (-torch.arange(0, 16, 2) / 16)

        def turned(x, turns=turns):
            pair = torch.view_as_complex(torch.stack([x[..., :8], x[..., 8:]], -1))
            out = pair * torch.polar(torch.ones_like(turns), turns)
            return torch.cat([out.real, out.imag], -1)

        k, v = turned(k).repeat_interleave(2, 0), v.repeat_interleave(2, 0)
        past = tuple(torch.cat(both, 1) for both in zip(past, (k, v), strict=True))
        scores = turned(q) @ past[0].transpose(1, 2) / math.sqrt(16)
        rows, keys = scores.shape[1:]
        seen = torch.arange(keys) <= torch.arange(keys - rows, keys)[:, None]
        shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out = (shares @ past[1]).transpose(0, 1).flatten(1)
        x = residual + out @ t[f"{p}self_attn.o_proj.weight"].T
        y = norm(x, t[f"{p}post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(y @ t[f"{p}mlp.gate_proj.weight"].T)
        up = y @ t[f"{p}mlp.up_proj.weight"].T
        state = x + (gate * up) @ t[f"{p}mlp.down_proj.weight"].T
        read = norm(state, target.norm.weight) if wrong.get("last_norm") else state
        logits = read[-1] @ target.head.weight.T
        found.append(logits)
        state, tokens = state[-1:], logits.argmax(-1, keepdim=True)
        positions = positions[-1:] + 1
    return torch.stack(found)


def eagle_drafts(target, folder, ids):
    text = Text(target, eagle.build(context_of(folder, target, method="eagle")))
    text.step(ids, 0, 5, num_drafts=K)
    _, logits = text.step(ids, 5, S - 5, num_drafts=K, last=S - 6)
    return torch.cat(logits)


@pytest.mark.parametrize("extra", [(), ("fc.bias", "embed_tokens.weight")])
def test_eagle_follows_the_equations(extra, target, ids, hidden, tmp_path):
    """A plain Llama config is an EAGLE head's, as its authors published them."""
    made = write_head(tmp_path, {"architectures": ["LlamaForCausalLM"], **HEAD}, extra=extra)
    assert guess_method(str(tmp_path)) == "eagle"
    embedding = made.get("embed_tokens.weight", target.embedding.weight)
    stand_in = type("Target", (), {"embedding": type("E", (), {"weight": embedding})})
    stand_in.head, stand_in.norm = target.head, target.norm
    expected = eagle_reference(made, hidden, ids, stand_in)
    torch.testing.assert_close(eagle_drafts(target, tmp_path, ids), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reading", ["state_first", "input_norm", "last_norm"])
def test_wrong_eagle_equations_fail_comparison(reading, target, ids, hidden, tmp_path):
    made = write_head(tmp_path, HEAD)
    wrong = eagle_reference(made, hidden, ids, target, **{reading: True})
    assert (eagle_drafts(target, tmp_path, ids) - wrong).abs().max() > 0.05


def write_medusa(folder, file_name, *, heads=3, layers=2, prefix=""):
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for head in range(heads):
        for layer in range(layers):
            tensors[f"{head}.{layer}.linear.weight"] = torch.randn(64, 64, generator=generator) / 8
            tensors[f"{head}.{layer}.linear.bias"] = torch.randn(64, generator=generator)
        tensors[f"{head}.{layers}.weight"] = torch.randn(512, 64, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    config = {"medusa_num_heads": heads, "medusa_num_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    stored = {prefix + name: tensor for name, tensor in tensors.items()}
    if file_name.endswith(".pt"):
        torch.save(stored, folder / file_name)
    else:
        save_file(stored, folder / file_name)
    return tensors


@pytest.mark.parametrize(
    "file_name, prefix",
    [
        ("medusa_lm_head.pt", ""),
        ("medusa_lm_head.safetensors", ""),
        ("model.safetensors", "medusa_head."),
    ],
)
def test_medusa_follows_the_equations(file_name, prefix, target, ids, hidden, tmp_path):
    t = write_medusa(tmp_path, file_name, prefix=prefix)
    drafter = medusa.build(context_of(tmp_path, target, method="medusa"))
    text = Text(target, drafter)
    text.step(ids, 0, 5, num_drafts=K)
    drafts, logits = text.step(ids, 5, S - 5, num_drafts=2, last=S - 6)
    assert drafts.shape == (1, 2)
    for head in range(2):
        x = hidden[-1]
        for layer in range(2):
            weight, bias = (t[f"{head}.{layer}.linear.{n}"] for n in ("weight", "bias"))
            x = x + torch.nn.functional.silu(x @ weight.T + bias)
        expected = x @ t[f"{head}.2.weight"].T
        torch.testing.assert_close(logits[head][0], expected, rtol=1e-4, atol=1e-4)


def test_medusa_drafts_no_more_than_it_has_heads(target, tmp_path):
    write_medusa(tmp_path, "medusa_lm_head.safetensors")
    with pytest.raises(InputError, match="expected at most 3, one per Medusa head, found 4"):
        medusa.build(context_of(tmp_path, target, count=4, method="medusa"))


def test_medusa_of_another_model_is_refused(target, tmp_path):
    tensors = write_medusa(tmp_path, "medusa_lm_head.safetensors")
    tensors["1.2.weight"] = torch.zeros(300, 64)
    save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(
        CheckpointError, match=r"1.2.weight: expected \[512, 64\].*found \[300, 64\]"
    ):
        medusa.build(context_of(tmp_path, target, method="medusa"))
