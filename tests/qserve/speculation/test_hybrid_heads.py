"""Heads and draft models on models with states: equations, texts, and steps in graphs."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from qserve.engine.kv_cache import state_snapshots
from tests.qserve.model.test_hybrid_prefixes import chats, make_engine
from tests.qserve.model.variants import edited
from tests.qserve.speculation.head_steps import HEAD, load_target, write_head
from tests.qserve.speculation.hybrid_mtp_model import make_hybrid_mtp
from tests.qserve.speculation.test_block_heads import DFLASH, DSPARK
from tests.qserve.speculation.test_eagle3_head import EAGLE3, S, drafted, reference

FAMILIES = ["qwen3_5", "lfm2", "falcon_h1", "qwen3_next"]
EAGLE = {**HEAD, "architectures": ["LlamaForCausalLMEagle"], "max_position_embeddings": 256}
KINDS = {
    "eagle3": {**EAGLE3, "max_position_embeddings": 256},
    "eagle": EAGLE,
    "peagle": {**EAGLE3, "ptd_token_id": 500},
    "dflash": DFLASH,
    "dspark": DSPARK,
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Copies of a few tokens are worth while."""
    monkeypatch.setattr(state_snapshots, "SPACING", 8)
    monkeypatch.setattr(state_snapshots, "MIN_GAIN", 4)


def vocabulary(folder, at):
    """The folder with a tokenizer of numbered tokens."""
    folder = edited(folder, at)
    words = {f"t{token}": token for token in range(512)}
    tokenizer = {"model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def tokens_of(folder, in_flight=0, **config):
    engine = make_engine(folder, in_flight, speculative_config=json.dumps(config))
    verified = []
    engine.scheduler.speculation.observe = lambda *counts: verified.append(counts)
    return chats(engine)[0], verified


@pytest.mark.parametrize("family", FAMILIES)
def test_eagle3_reads_auxiliary_hidden_states(tiny_model, tmp_path, family):
    """transformers' states of the model, the paper's equations of the head."""
    folder = tiny_model(family)
    ids = torch.randint(0, 512, (40,), generator=torch.Generator().manual_seed(3))
    made = write_head(tmp_path, EAGLE3)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        states = model(ids[None, :S], output_hidden_states=True).hidden_states
    target = load_target(folder)
    states = [state[0] for state in states]
    embedding, head = target.embedding.weight, made["lm_head.weight"]
    expected = reference(made, EAGLE3, states, ids, embedding, head)
    found = drafted(target, tmp_path, ids)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "family", "in_flight"),
    [
        ("eagle3", "qwen3_5", 1),
        ("eagle3", "granite_hybrid", 1),
        ("eagle", "lfm2", 0),
        ("eagle", "qwen3_next", 1),
        ("peagle", "qwen3_5", 1),
        ("dflash", "qwen3_next", 1),
        ("dspark", "qwen3_5", 0),
    ],
)
def test_tokens_with_heads_equal_tokens_without(tiny_model, tmp_path, kind, family, in_flight):
    """Random heads, nearly all of whose drafts are rejected."""
    write_head(tmp_path, KINDS[kind])
    want, *_ = chats(make_engine(tiny_model(family)))
    found, verified = tokens_of(
        *(tiny_model(family), in_flight),
        **{"model": str(tmp_path), "num_speculative_tokens": 3, "adaptive": False},
    )
    assert found == want
    assert any(accepted < drafts for drafts, accepted in verified)


def test_dense_model_drafts_for_a_hybrid(tiny_model, tmp_path):
    target = vocabulary(tiny_model("qwen3_5"), tmp_path / "target")
    draft = vocabulary(tiny_model("llama"), tmp_path / "draft")
    want, *_ = chats(make_engine(target))
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    found, verified = tokens_of(target, 1, adaptive=False, **config)
    assert found == want and verified


@pytest.mark.parametrize("in_flight", [1, pytest.param(0, marks=pytest.mark.exhaustive)])
def test_steps_in_graphs(replayed, tmp_path, in_flight):
    """Graphs with their padding and fixed places keep states right."""
    folder = make_hybrid_mtp(tmp_path / "model", "qwen3_5", 0.7)
    want, *_ = chats(make_engine(folder))
    config = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
    engine = make_engine(folder, in_flight, speculative_config=json.dumps(config))
    engine.runner.capture_graphs(6, engine.max_model_len)
    engine.runner.layer_caches.covered.covered_P.fill_(-1000)
    verified = []
    engine.scheduler.speculation.observe = lambda *counts: verified.append(counts)
    assert chats(engine)[0] == want
    accepted, drafts = (sum(each[index] for each in verified) for index in (1, 0))
    assert 0 < accepted < drafts
    assert any(len(rows.rows_R) < key.num_requests for key, rows in replayed if key.count == 4)
