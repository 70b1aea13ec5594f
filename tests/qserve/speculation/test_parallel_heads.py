"""The P-EAGLE head against EAGLE-3's equations over rows of a mask token and a learned state.

Legend: S tokens of the text, K drafts.
"""

import pytest
import torch

from calibrate.heads.parallel import ParallelModule
from formats.errors import CheckpointError
from qserve.speculation.heads import parallel
from tests.qserve.speculation.head_steps import HEAD, Text, context_of, load_target, write_head
from tests.qserve.speculation.test_eagle3_head import S, reference, states_of

K = 4
FLAT = {**HEAD, "draft_vocab_size": 512, "ptd_token_id": 500, "num_hidden_layers": 2}
NESTED = {
    "speculators_model_type": "peagle",
    "transformer_layer_config": HEAD,
    "draft_vocab_size": 100,
    "mask_token_id": 510,
    "fc_norm": True,
}
CASES = {
    "flat": (FLAT, {"extra": ("mask_hidden",)}),
    "without a learned state": (FLAT, {}),
    "of speculators": (NESTED, {"extra": ("mask_hidden", "d2t", "embed_tokens.weight")}),
}
WRONG = {
    "the mask token is the newest token": {"token": None},
    "the state of mask rows is that of the last row": {"state": True},
    "mask rows one position late": {"gap": True},
}


@pytest.fixture(scope="module")
def target(tiny_model):
    return load_target(tiny_model("llama"))


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 500, (40,), generator=torch.Generator().manual_seed(5))


def expected_of(made, config, target, ids, **wrong):
    """Logits [K, V]: draft j is what the row after j mask rows predicts."""
    config = {**config.get("transformer_layer_config", {}), **config}
    embedding = made.get("embed_tokens.weight", target.embedding.weight)
    token = config.get("ptd_token_id", config.get("mask_token_id"))
    token = int(ids[S]) if "token" in wrong else token
    states = list(states_of(target, ids))
    masks = made.get("mask_hidden", torch.zeros(1, 1, 3 * 64)).view(3, 64)
    found = []
    for count in range(K):
        rows = count + (1 if wrong.get("gap") and count else 0)
        longer = torch.cat([ids[: S + 1], torch.full((rows,), token)])
        extended = [torch.cat([state, state[-1:].expand(rows, -1)]) for state in states]
        if not wrong.get("state"):
            for layer, mask in zip((2, 1, 0), masks, strict=True):
                extended[layer] = torch.cat([states[layer], mask.expand(rows, -1)])
        found.append(
            reference(made, config, extended, longer, embedding, made["lm_head.weight"])[0]
        )
    return torch.stack(found)


def drafted(target, folder, ids):
    """Logits [K, V] after two chunks of a prompt, the second one a verify that refused its end."""
    text = Text(target, parallel.build(context_of(folder, target, K, "peagle")))
    empty, logits = text.step(ids, 0, 6, num_drafts=K)
    assert empty.shape == (0, K) and not logits
    drafts, logits = text.step(ids, 6, S - 6 + 2, num_drafts=K, last=S - 7)
    assert torch.equal(drafts[0], torch.cat(logits).argmax(-1))
    return torch.cat(logits)


@pytest.mark.parametrize("case", CASES)
def test_head_follows_the_equations(case, target, ids, tmp_path):
    config, how = CASES[case]
    made = write_head(tmp_path, config, **how)
    found = drafted(target, tmp_path, ids)
    expected = expected_of(made, config, target, ids)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reading", WRONG)
def test_wrong_equations_fail_comparison(reading, target, ids, tmp_path):
    made = write_head(tmp_path, FLAT, extra=("mask_hidden",))
    wrong = expected_of(made, FLAT, target, ids, **WRONG[reading])
    assert (drafted(target, tmp_path, ids)[1:] - wrong[1:]).abs().max() > 0.05


def test_verified_rows_overwrite_draft_keys(target, ids, tmp_path):
    write_head(tmp_path, FLAT, extra=("mask_hidden",))
    once = Text(target, parallel.build(context_of(tmp_path, target, K, "peagle")))
    _, expected = once.step(ids, 0, S, num_drafts=K, last=S - 1)
    twice = Text(target, parallel.build(context_of(tmp_path, target, K, "peagle")))
    twice.step(ids, 0, 9, num_drafts=K, last=8, given=[1, 2, 3, 4])
    _, found = twice.step(ids, 9, S - 9, num_drafts=K, last=S - 10)
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_training_block_equals_engine_drafts(case, target, ids, tmp_path):
    config, how = CASES[case]
    made = write_head(tmp_path, config, **how)
    drafter = parallel.build(context_of(tmp_path, target, K, "peagle"))
    _, found = Text(target, drafter).step(ids, 0, S, num_drafts=K, last=S - 1)
    found = torch.cat(found)

    module = ParallelModule(
        drafter.head.config, made.pop("embed_tokens.weight", target.embedding.weight)
    )
    offsets = made.pop("d2t", None)
    made["mask_hidden"] = made.get("mask_hidden", torch.zeros(1, 1, 3 * 64)).flatten()
    module.load_state_dict(made)
    states = states_of(target, ids)
    aux = torch.cat([states[layer] for layer in drafter.aux_layers], -1)
    # rows after the last one have other states, which must not affect it
    aux = torch.cat([aux, torch.full((K + 1, aux.shape[1]), 9.0)])
    anchors = torch.tensor([4, S - 1])
    with torch.no_grad():
        first, *others = module.parallel(ids[None, : S + K + 1], aux[None], anchors, K)
    expected = torch.stack([first[0, S - 1], *(each[0, 1] for each in others)])
    if offsets is not None:
        found = found[:, offsets + torch.arange(len(offsets))]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_incompatible_mask_tokens_are_refused(target, tmp_path):
    write_head(tmp_path / "token", {**FLAT, "ptd_token_id": 512})
    with pytest.raises(CheckpointError, match="mask token: expected a token id below 512"):
        parallel.build(context_of(tmp_path / "token", target, K, "peagle"))
