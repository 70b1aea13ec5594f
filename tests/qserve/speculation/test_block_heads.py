"""DFlash and DSpark heads against their equations, written out; and readings that are wrong.

Legend: S tokens of the text, K drafts, C hidden size, D head dim.
"""

import pytest
import torch

from calibrate.heads.block import BlockModule
from formats.errors import CheckpointError, InputError
from qserve.speculation.config import guess_method
from qserve.speculation.heads import block
from tests.qserve.speculation.head_steps import HEAD, Text, context_of, load_target, write_head
from tests.qserve.speculation.test_eagle3_head import norm, states_of

S, K = 13, 3
LAYERS = {**HEAD, "model_type": "qwen3", "num_hidden_layers": 2, "head_dim": 32}
INNER = {"target_layer_ids": [0, 2], "mask_token_id": 511, "block_size": 5}
DFLASH = {**LAYERS, "architectures": ["DFlashDraftModel"], "dflash_config": INNER}
DSPARK = {**LAYERS, "architectures": ["Qwen3DSparkModel"], **INNER, "markov_rank": 8}
NESTED = {
    "speculators_model_type": "dflash",
    "transformer_layer_config": LAYERS,
    "aux_hidden_state_layer_ids": [1, 3],
    "draft_vocab_size": 100,
    "block_size": 5,
    "mask_token_id": 511,
}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
NORMS = tuple(f"layers.{n}.self_attn.{each}_norm.weight" for n in range(2) for each in "qk")
CASES = {
    "dflash": (DFLASH, {"without": ("lm_head.weight",)}),
    "dflash of speculators": (NESTED, {"extra": ("d2t",)}),
    "some layers slide": ({**DFLASH, **SLIDING}, {}),
    "sliding layers see the whole block": ({**DFLASH, **SLIDING, "is_causal": False}, {}),
    "an embedding of mask tokens": (DFLASH, {"extra": ("mask_embedding", "embed_tokens.weight")}),
    "a cap of logits": ({**DFLASH, "final_logit_softcapping": 2.0, "output_multiplier": 0.5}, {}),
    "dspark": (DSPARK, {}),
    "gated": ({**DSPARK, "markov_head_type": "gated"}, {}),
    "recurrent": ({**DSPARK, "markov_head_type": "rnn"}, {}),
    "without a markov head": ({**DSPARK, "markov_rank": 0}, {}),
    "a confidence head": (
        {**DSPARK, "enable_confidence_head": True, "confidence_head_with_markov": True},
        {"extra": ("confidence_head.proj.weight", "confidence_head.proj.bias")},
    ),
}
WRONG = {
    "each state one layer earlier": {"layer_shift": -1},
    "the context is not normed": {"no_context_norm": True},
    "rows see no later ones": {"is_causal": True},
    "the newest token predicts the first draft": {"first": 0},
    "block one position early": {"position_shift": -1},
    "the context ends one row early": {"context_shift": -1},
}


def reference(t, config, states, ids, embedding, head, **wrong):
    """Logits of each of K drafts, greedy, from all rows' states: no pages, no blocks of a decoder.

    `t`: tensors by canonical name. `states`: every residual state of the target [S, C].
    """
    layers = config.get("transformer_layer_config", config)
    stated = {**config, **config.get("dflash_config", {})}
    aux_layers = stated.get("aux_hidden_state_layer_ids") or [
        t + 1 for t in stated["target_layer_ids"]
    ]
    is_dspark = "Qwen3DSparkModel" in config.get("architectures", ())
    first = wrong.get("first", 0 if is_dspark else 1)
    context = torch.cat([states[layer + wrong.get("layer_shift", 0)] for layer in aux_layers], -1)
    context = context @ t["fc.weight"].T
    if not wrong.get("no_context_norm"):
        context = norm(context, t["hidden_norm.weight"])
    rows = S + wrong.get("context_shift", 0)
    context = context[:rows]
    B, mask = first + K, t.get("mask_embedding", embedding[stated["mask_token_id"]])
    x = torch.cat([embedding[ids[S : S + 1]], mask.expand(B - 1, -1)])
    positions = torch.cat([torch.arange(rows), torch.arange(S, S + B)])
    positions[rows:] += wrong.get("position_shift", 0)
    dim, heads = layers["head_dim"], layers["num_attention_heads"]
    angles = layers["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)

    def turned(x, positions):
        low, high = x.chunk(2, -1)
        turns = positions[:, None] * angles
        return torch.cat(
            [low * turns.cos() - high * turns.sin(), high * turns.cos() + low * turns.sin()], -1
        )

    for number in range(layers["num_hidden_layers"]):
        p = f"layers.{number}."

        def product(x, name, p=p):
            return x @ t[f"{p}{name}.weight"].T

        y = norm(x, t[f"{p}input_layernorm.weight"])
        q = product(y, "self_attn.q_proj").view(B, -1, dim).transpose(0, 1)
        k, v = (
            product(torch.cat([context, y]), f"self_attn.{n}_proj").view(rows + B, -1, dim)
            for n in "kv"
        )
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        q = turned(norm(q, t[f"{p}self_attn.q_norm.weight"]), positions[rows:])
        k = turned(norm(k, t[f"{p}self_attn.k_norm.weight"]), positions)
        shared = heads // layers["num_key_value_heads"]
        k, v = k.repeat_interleave(shared, 0), v.repeat_interleave(shared, 0)
        own, key = torch.arange(S, S + B)[:, None], torch.arange(rows + B)[None]
        key = torch.where(key < rows, key, key - rows + S)
        slides = stated.get("layer_types", [""] * 9)[number] == "sliding_attention"
        is_causal = stated.get("is_causal", slides) or wrong.get("is_causal", False)
        seen = key <= own if is_causal else torch.ones(B, rows + B, dtype=torch.bool)
        if slides and is_causal:
            seen = seen & (key > own - stated["sliding_window"])
        elif slides:  # counted from the end of the block
            seen = seen & (key >= S + B - stated["sliding_window"] - stated["block_size"])
        scores = (q @ k.transpose(1, 2)) * dim**-0.5
        shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        x = x + product((shares @ v).transpose(0, 1).flatten(1), "self_attn.o_proj")
        y = norm(x, t[f"{p}post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(product(y, "mlp.gate_proj"))
        x = x + product(gate * product(y, "mlp.up_proj"), "mlp.down_proj")
    read = norm(x, t["norm.weight"])[first:]
    logits = read @ head.T * stated.get("output_multiplier", 1.0)
    if cap := stated.get("final_logit_softcapping"):
        logits = cap * (logits / cap).tanh()
    rank = stated.get("markov_rank", 0)
    token, state, found = ids[S], torch.zeros(rank), []
    for index in range(K):
        row = logits[index]
        if rank:
            e = t["markov_head.markov_w1.weight"][token]
            if f"{(m := 'markov_head.gate_proj')}.weight" in t:
                inputs = torch.cat([read[index], e])
                e = e * (t[f"{m}.weight"] @ inputs + t[f"{m}.bias"]).sigmoid()
            if f"{(m := 'markov_head.joint_proj')}.weight" in t:
                inputs = torch.cat([state, e, read[index]])
                share, new, out = (t[f"{m}.weight"] @ inputs + t[f"{m}.bias"]).chunk(3)
                state = share.sigmoid() * state + (1 - share.sigmoid()) * new.tanh()
                e = out.tanh()
            row = row + t["markov_head.markov_w2.weight"] @ e
        if "d2t" in t:
            full = torch.full((layers["vocab_size"],), -torch.inf)
            full[t["d2t"] + torch.arange(len(t["d2t"]))] = row
            row = full
        token = row.argmax()
        found.append(row)
    return torch.stack(found)


@pytest.fixture(scope="module")
def target(tiny_model):
    return load_target(tiny_model("llama"))


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 511, (40,), generator=torch.Generator().manual_seed(3))


def opened(folder, target, count=K):
    return block.build(context_of(folder, target, count, guess_method(str(folder))))


def drafted(target, folder, ids):
    """Logits [K, V] after two chunks of a prompt, the second one a verify that refused its end."""
    text = Text(target, opened(folder, target))
    empty, logits = text.step(ids, 0, 6, num_drafts=K)
    assert empty.shape == (0, K) and not logits
    # rows beyond S are drafts that came to nothing: the newest token follows row S - 1
    drafts, logits = text.step(ids, 6, S - 6 + 2, num_drafts=K, last=S - 7)
    assert torch.equal(drafts[0], torch.cat(logits).argmax(-1))
    return torch.cat(logits)


@pytest.mark.parametrize("case", CASES)
def test_head_follows_the_equations(case, target, ids, tmp_path):
    config, how = CASES[case]
    made = write_head(tmp_path, config, **{**how, "extra": (*NORMS, *how.get("extra", ()))})
    embedding = made.get("embed_tokens.weight", target.embedding.weight)
    head = made.get("lm_head.weight", target.head.weight)
    expected = reference(made, config, states_of(target, ids), ids, embedding, head)
    found = drafted(target, tmp_path, ids)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("most", [1, 4, 7])
def test_grouped_attention_rows(most, target, ids, tmp_path, monkeypatch):
    """4 rows of 2 query heads for each KV head: one row at a time, two at a time."""
    write_head(tmp_path, DFLASH, extra=NORMS)
    expected = drafted(target, tmp_path, ids)
    monkeypatch.setattr(block, "DECODE_MAX_ROWS", most)
    assert block.folded_rows(4, 2) == (1 if most == 1 else 2)
    torch.testing.assert_close(drafted(target, tmp_path, ids), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reading", WRONG)
def test_wrong_equations_fail_comparison(reading, target, ids, tmp_path):
    made = write_head(tmp_path, DFLASH, extra=NORMS)
    arguments = (made, DFLASH, states_of(target, ids), ids, target.embedding.weight)
    wrong = reference(*arguments, made["lm_head.weight"], **WRONG[reading])
    assert (drafted(target, tmp_path, ids) - wrong).abs().max() > 0.05


@pytest.mark.parametrize("config", [DFLASH, DSPARK], ids=["dflash", "dspark"])
def test_verified_rows_overwrite_draft_keys(config, target, ids, tmp_path):
    write_head(tmp_path, config, extra=NORMS)
    once = Text(target, opened(tmp_path, target))
    _, expected = once.step(ids, 0, S, num_drafts=K, last=S - 1)
    twice = Text(target, opened(tmp_path, target))
    twice.step(ids, 0, 9, num_drafts=K, last=8, given=[1, 2, 3])
    _, found = twice.step(ids, 9, S - 9, num_drafts=K, last=S - 10)
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "case",
    ["dflash of speculators", "some layers slide", "recurrent", "an embedding of mask tokens"],
)
def test_training_block_equals_engine_drafts(case, target, ids, tmp_path):
    """A block of training, whose tokens are the text's, drafts as the engine after them."""
    config, how = CASES[case]
    made = write_head(tmp_path, config, **{**how, "extra": (*NORMS, *how.get("extra", ()))})
    drafter = opened(tmp_path, target)
    given = ids[S + 1 : S + 1 + K].tolist()
    _, found = Text(target, drafter).step(ids, 0, S, num_drafts=K, last=S - 1, given=given)

    embedding = made.pop("embed_tokens.weight", target.embedding.weight)
    made.setdefault("lm_head.weight", target.head.weight)
    module = BlockModule(drafter.head.config, embedding)
    module.mask_embedding = made.pop("mask_embedding", None)
    offsets = made.pop("d2t", None)
    module.load_state_dict(made)
    states = states_of(target, ids)
    aux = torch.cat([states[layer] for layer in drafter.aux_layers], -1)
    # rows after the anchor have other states, which must not affect it
    aux = torch.cat([aux, torch.full((K + 1, aux.shape[1]), 9.0)])
    with torch.no_grad():
        expected = module(ids[None, : S + K + 1], aux[None], torch.tensor([4, S]), K)[0, 1]
    found = torch.cat(found)
    if offsets is not None:
        found = found[:, offsets + torch.arange(len(offsets))]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_incompatible_heads_are_refused(target, tmp_path):
    write_head(tmp_path / "wide", {**DFLASH, "target_hidden_size": 80})
    with pytest.raises(CheckpointError, match="target_hidden_size: expected 64 .* found 80"):
        opened(tmp_path / "wide", target)
    states = {**INNER, "target_layer_ids": [0, 5]}
    write_head(tmp_path / "states", {**DFLASH, "dflash_config": states})
    with pytest.raises(
        CheckpointError, match=r"target_layer_ids: .* with 3 layers, found \[0, 5\]"
    ):
        opened(tmp_path / "states", target)
    write_head(tmp_path / "head", DFLASH)
    with pytest.raises(InputError, match="expected at most 4, since the head has blocks of 5 rows"):
        opened(tmp_path / "head", target, count=5)
    mask = {**INNER, "mask_token_id": 512}
    write_head(tmp_path / "mask", {**DFLASH, "dflash_config": mask})
    with pytest.raises(CheckpointError, match="mask_token_id: expected a token id below 512"):
        opened(tmp_path / "mask", target)
    with pytest.raises(InputError, match="contains a head of kind dflash"):
        block.build(context_of(tmp_path / "head", target, K, "dspark"))
