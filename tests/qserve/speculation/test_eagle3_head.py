"""The EAGLE-3 head against the paper's equations, written out; and readings of them that are wrong.

Legend: S tokens of the text, K drafts, C hidden size, D head dim.
"""

import pytest
import torch

from calibrate.heads.eagle3 import Eagle3Module
from formats.errors import CheckpointError, InputError
from qserve.speculation.heads import eagle3
from tests.qserve.speculation.head_steps import (
    HEAD,
    Text,
    context_of,
    load_target,
    nothing,
    write_head,
)

S, K = 13, 3
EAGLE3 = {**HEAD, "draft_vocab_size": 512}
BIASES = tuple(f"layers.0.self_attn.{each}_proj.bias" for each in "qkv")
CASES = {
    "original": (EAGLE3, {}),
    "norm before residual": ({**EAGLE3, "norm_before_residual": True}, {}),
    "post-norm recurs": ({**EAGLE3, "norm_output": True}, {}),
    "a norm of each state": ({**EAGLE3, "fc_norm": True}, {}),
    "a norm of all states": ({**EAGLE3, "norm_before_fc": True}, {}),
    "fewer draft tokens": ({**EAGLE3, "draft_vocab_size": 100}, {"extra": ("d2t",)}),
    "three layers": ({**EAGLE3, "num_hidden_layers": 3}, {"first": "layers.0"}),
    "biases": (EAGLE3, {"extra": (*BIASES, "fc.bias")}),
    "head norms": (
        {**EAGLE3, "model_type": "qwen3", "head_dim": 32},
        {"extra": tuple(f"layers.0.self_attn.{each}_norm.weight" for each in "qk")},
    ),
    "an embedding of its own": (EAGLE3, {"extra": ("embed_tokens.weight",)}),
    "the target's output matrix": (EAGLE3, {"without": ("lm_head.weight",)}),
    "two layers of its own choice": ({**EAGLE3, "eagle_aux_hidden_state_layer_ids": [0, 2]}, {}),
}
WRONG = {
    "the state before the embedding": {"state_first": True},
    "each layer one layer later": {"layer_shift": 1},
    "the residual is the normed state": {"normed_residual": True},
    "the post-norm state recurs": {"post_norm": True},
    "tokens are not shifted": {"token_shift": 0},
    "no norm of the state": {"no_hidden_norm": True},
    "drafts one position early": {"same_position": True},
}


def norm(x, weight, eps=1e-5):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def reference(t, config, states, ids, embedding, head, **wrong):
    """Logits of each of K drafts, greedy, from all rows' states: no pages, no blocks.

    `t`: tensors by canonical name. `states`: every residual state of the target [S, C].
    """
    aux_layers = [layer + 1 for layer in config.get("eagle_aux_hidden_state_layer_ids", [])] or [
        2,
        1,
        0,
    ]
    aux = [states[layer + wrong.get("layer_shift", 0)] for layer in aux_layers]
    if config.get("fc_norm"):
        aux = [norm(state, t[f"fc_norm.{n}.weight"]) for n, state in enumerate(aux)]
    x = torch.cat(aux, -1)
    if config.get("norm_before_fc"):
        x = norm(x, t["input_norm.weight"])
    state = x @ t["fc.weight"].T + t.get("fc.bias", 0)
    shift, rows = wrong.get("token_shift", 1), len(states[0])
    tokens, positions = ids[shift : rows + shift], torch.arange(rows)
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    angles = config["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
    past = [(torch.zeros(heads, 0, dim),) * 2 for _ in range(config["num_hidden_layers"])]
    found = []
    for _ in range(K):
        embedded = embedding[tokens]
        for number in range(config["num_hidden_layers"]):
            p = f"layers.{number}."

            def product(x, name, p=p):
                return x @ t[f"{p}{name}.weight"].T + t.get(f"{p}{name}.bias", 0)

            residual = state
            if number == 0:
                normed = norm(state, t[f"{p}hidden_norm.weight"])
                if wrong.get("no_hidden_norm"):
                    normed = state
                if config.get("norm_before_residual") or wrong.get("normed_residual"):
                    residual = normed
                parts = [norm(embedded, t[f"{p}input_layernorm.weight"]), normed]
                x = torch.cat(parts[::-1] if wrong.get("state_first") else parts, -1)
            else:
                x = norm(state, t[f"{p}input_layernorm.weight"])
            q, k, v = (
                product(x, f"self_attn.{n}_proj").view(len(x), -1, dim).transpose(0, 1)
                for n in "qkv"
            )
            if f"{p}self_attn.q_norm.weight" in t:
                q = norm(q, t[f"{p}self_attn.q_norm.weight"])
                k = norm(k, t[f"{p}self_attn.k_norm.weight"])
            turns = positions[:, None] * angles

            def turned(x, turns=turns):
                low, high = x[..., : dim // 2], x[..., dim // 2 :]
                return torch.cat(
                    [
                        low * turns.cos() - high * turns.sin(),
                        high * turns.cos() + low * turns.sin(),
                    ],
                    -1,
                )

            shared = heads // config["num_key_value_heads"]
            k, v = (
                torch.cat([old, new.repeat_interleave(shared, 0)], 1)
                for old, new in zip(past[number], (turned(k), v), strict=True)
            )
            past[number] = (k, v)
            scores = turned(q) @ k.transpose(1, 2) * dim**-0.5
            rows, keys = scores.shape[1:]
            seen = torch.arange(keys) <= torch.arange(keys - rows, keys)[:, None]
            shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out = (shares @ v).transpose(0, 1).flatten(1)
            x = residual + product(out, "self_attn.o_proj")
            y = norm(x, t[f"{p}post_attention_layernorm.weight"])
            gate = torch.nn.functional.silu(product(y, "mlp.gate_proj"))
            state = x + product(gate * product(y, "mlp.up_proj"), "mlp.down_proj")
        read = norm(state, t["norm.weight"])
        logits = read[-1] @ head.T
        if "d2t" in t:
            full = torch.full((config["vocab_size"],), -torch.inf)
            full[t["d2t"] + torch.arange(len(t["d2t"]))] = logits
            logits = full
        found.append(logits)
        post = config.get("norm_output") or wrong.get("post_norm")
        state = (read if post else state)[-1:]
        tokens = logits.argmax(-1, keepdim=True)
        positions = positions[-1:] + (0 if wrong.get("same_position") else 1)
    return torch.stack(found)


@pytest.fixture(scope="module")
def target(tiny_model):
    return load_target(tiny_model("llama"))


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 512, (40,), generator=torch.Generator().manual_seed(3))


def drafted(target, folder, ids):
    """Logits [K, V] after two chunks of a prompt, the second one a verify that refused its end."""
    drafter = eagle3.build(context_of(folder, target))
    text = Text(target, drafter)
    empty, logits = text.step(ids, 0, 6, num_drafts=K)
    assert empty.shape == (0, K) and all(len(each) == 0 for each in logits)
    # rows beyond S are drafts that came to nothing: the newest token follows row S - 1
    drafts, logits = text.step(ids, 6, S - 6 + 2, num_drafts=K, last=S - 7)
    assert torch.equal(drafts[0], torch.cat(logits).argmax(-1))
    return torch.cat(logits)


def states_of(target, ids):
    text = Text(target, nothing((0, 1, 2, 3)))
    caught = []
    text.drafter.propose = lambda step: caught.append(step.aux_states)
    text.step(ids, 0, S, num_drafts=0)
    return caught[0]


@pytest.mark.parametrize("case", CASES)
def test_head_follows_the_equations(case, target, ids, tmp_path):
    config, how = CASES[case]
    made = write_head(tmp_path, config, **how)
    embedding = made.get("embed_tokens.weight", target.embedding.weight)
    head = made.get("lm_head.weight", target.head.weight)
    found = drafted(target, tmp_path, ids)
    expected = reference(made, config, states_of(target, ids), ids, embedding, head)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reading", WRONG)
def test_wrong_equations_fail_comparison(reading, target, ids, tmp_path):
    made = write_head(tmp_path, EAGLE3)
    arguments = (made, EAGLE3, states_of(target, ids), ids, target.embedding.weight)
    found = drafted(target, tmp_path, ids)
    wrong = reference(*arguments, made["lm_head.weight"], **WRONG[reading])
    # the first pass uses no recurrent state, and all of its rows are in position
    rows = slice(1, None) if reading in ("the post-norm state recurs",) else slice(None)
    if reading == "drafts one position early":
        rows = slice(1, None)
    assert (found[rows] - wrong[rows]).abs().max() > 0.05


def test_aux_states_are_residuals_between_layers(target, ids):
    """transformers' numbering: 0 is the embedding, the number of layers the last, not normed."""
    states = states_of(target, ids)
    assert torch.equal(states[0], target.embedding(ids[:S], torch.arange(S)))
    last = norm(states[3], target.norm.weight, target.norm.eps)
    text = Text(target, nothing())
    seen = []
    text.drafter.propose = lambda step: seen.append(step.hidden_TC)
    text.step(ids, 0, S, num_drafts=0)
    torch.testing.assert_close(seen[0], last)


def test_verified_rows_overwrite_draft_keys(target, ids, tmp_path):
    """Drafts of a step write keys of the head's own states; the next step rewrites them."""
    write_head(tmp_path, EAGLE3)
    once = Text(target, eagle3.build(context_of(tmp_path, target)))
    _, expected = once.step(ids, 0, S, num_drafts=K, last=S - 1)
    twice = Text(target, eagle3.build(context_of(tmp_path, target)))
    twice.step(ids, 0, 9, num_drafts=K, last=8, given=[1, 2, 3])
    _, found = twice.step(ids, 9, S - 9, num_drafts=K, last=S - 10)
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", ["original", "post-norm recurs", "three layers", "biases"])
def test_training_chain_equals_engine_drafts(case, target, ids, tmp_path):
    """Step j of the training-time test is draft j after a chain of true tokens."""
    config, how = CASES[case]
    made = write_head(tmp_path, config, **how)
    drafter = eagle3.build(context_of(tmp_path, target))
    given = ids[S + 1 : S + 1 + K].tolist()
    _, found = Text(target, drafter).step(ids, 0, S, num_drafts=K, last=S - 1, given=given)

    present = {name.split(".")[-2] for name in made if name.endswith(".bias")}
    module = Eagle3Module(drafter.head.config, target.embedding.weight, frozenset(present))
    module.load_state_dict(made)
    states = states_of(target, ids)
    aux = torch.cat([states[layer] for layer in drafter.aux_layers], -1)
    # rows after the last one have other tokens, which must not affect it
    aux = torch.cat([aux, torch.full((K, aux.shape[1]), 9.0)])
    with torch.no_grad():
        expected = [step[0, S - 1] for step in module.steps(ids[None, : S + K], aux[None], K)]
    torch.testing.assert_close(torch.cat(found), torch.stack(expected), rtol=1e-4, atol=1e-4)


def test_heads_of_another_model_are_refused(target, tmp_path):
    write_head(tmp_path / "wide", {**EAGLE3, "target_hidden_size": 80})
    with pytest.raises(CheckpointError, match="target_hidden_size: expected 64 .* found 80"):
        eagle3.build(context_of(tmp_path / "wide", target))
    write_head(tmp_path / "aux_layers", {**EAGLE3, "eagle_aux_hidden_state_layer_ids": [0, 1, 7]})
    with pytest.raises(
        CheckpointError, match=r"expected 3 auxiliary layers of a target model with 3 layers"
    ):
        eagle3.build(context_of(tmp_path / "aux_layers", target))
    write_head(tmp_path / "eagle", HEAD)
    with pytest.raises(InputError, match="contains a head of kind eagle"):
        eagle3.build(context_of(tmp_path / "eagle", target))


@pytest.mark.parametrize(
    "offsets, problem",
    [
        (None, "d2t: is missing, but the draft vocabulary has 100 tokens"),
        (torch.full((100,), 500), "maps to tokens outside the vocabulary of 512"),
        (-torch.arange(100), "maps several draft ids to one token"),
    ],
)
def test_tables_of_draft_tokens_are_checked(offsets, problem, target, tmp_path):
    from safetensors.torch import load_file, save_file

    write_head(tmp_path, {**EAGLE3, "draft_vocab_size": 100})
    tensors = load_file(tmp_path / "model.safetensors")
    if offsets is not None:
        tensors["d2t"] = offsets
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=problem):
        eagle3.build(context_of(tmp_path, target))
