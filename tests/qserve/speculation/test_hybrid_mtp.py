"""The MTP layers of Qwen3-Next and Qwen3.5 against transformers' layer; their folders; texts."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from calibrate.pipeline import quantize_checkpoint
from formats.checkpoint import CheckpointReader
from formats.errors import CheckpointError, InputError
from formats.inspection.inspect import inspect_checkpoint
from formats.quant_config import BLOCK, QuantConfig
from formats.scheme import Scheme
from qserve.engine.kv_cache import state_snapshots
from qserve.speculation.heads import mtp
from tests.qserve.model.test_hybrid_prefixes import MODES, chats, make_engine
from tests.qserve.model.variants import edited
from tests.qserve.speculation.head_steps import Text, context_of, load_target
from tests.qserve.speculation.hybrid_mtp_model import FAMILIES, layer_alone, make_hybrid_mtp

S, K = 11, 3


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(family, agreement) -> folder"""
    found = {}

    def make(family, agreement=0.0):
        if (family, agreement) not in found:
            folder = tmp_path_factory.mktemp("mtp") / family
            found[family, agreement] = make_hybrid_mtp(folder, family, agreement)
        return found[family, agreement]

    return make


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 512, (40,), generator=torch.Generator().manual_seed(4))


def offset_norm(x, weight, eps=1e-6):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (1 + weight)


@torch.no_grad()
def reference(folder, family, ids, **wrong):
    """Logits of K greedy drafts after S rows; each pass computes all rows again."""
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    head = layer_alone(family)
    t = load_file(folder / "model.safetensors")
    head.model.norm.weight.copy_(t["mtp.norm.weight"])
    head.lm_head.weight.copy_(target.lm_head.weight)
    states = target.model(ids[None, :S], output_hidden_states=True)
    state = states.last_hidden_state[0]
    if wrong.get("raw_state"):
        raw = []
        hook = target.model.norm.register_forward_pre_hook(lambda _, inputs: raw.append(inputs[0]))
        target.model(ids[None, :S])
        hook.remove()
        state = raw[0][0]
    table, tokens, rows, found = target.model.embed_tokens.weight, ids[1 : S + 1], None, []
    for _ in range(K):
        parts = [
            offset_norm(table[tokens], t["mtp.pre_fc_norm_embedding.weight"]),
            offset_norm(state, t["mtp.pre_fc_norm_hidden.weight"]),
        ]
        x = torch.cat(parts[::-1] if wrong.get("state_first") else parts, -1)
        x = x @ t["mtp.fc.weight"].T
        rows = x if rows is None else torch.cat([rows, x])
        read = head.model(inputs_embeds=rows[None]).last_hidden_state[0]
        logits = head.lm_head(read[-1])
        found.append(logits)
        state, tokens = read[-1:], logits.argmax(-1, keepdim=True)
    return torch.stack(found)


def drafts_of(folder, ids):
    target = load_target(folder)
    text = Text(target, mtp.build(context_of(folder, target, method="mtp")))
    text.step(ids, 0, 5, num_drafts=K)
    _, logits = text.step(ids, 5, S - 5, num_drafts=K, last=S - 6)
    return torch.cat(logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_mtp_layer_follows_equations(made, ids, family):
    found = drafts_of(made(family), ids)
    expected = reference(made(family), family, ids)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reading", ["raw_state", "state_first"])
def test_wrong_equations_fail_comparison(made, ids, reading):
    wrong = reference(made("qwen3_5"), "qwen3_5", ids, **{reading: True})
    assert (drafts_of(made("qwen3_5"), ids) - wrong).abs().max() > 0.05


def test_first_of_several_mtp_layers_drafts(made, ids, tmp_path):
    folder = made("qwen3_5")
    more = {"mtp.layers.1.input_layernorm.weight": torch.zeros(64)}
    two = edited(folder, tmp_path / "two", lambda state: state.update(more))
    assert torch.equal(drafts_of(two, ids), drafts_of(folder, ids))


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (
            lambda s: [s.pop(name) for name in list(s) if name.startswith("mtp.")],
            None,
            "omitted its",
        ),
        (None, {"mtp_num_hidden_layers": 0}, "has no mtp_num_hidden_layers"),
        (lambda s: s.pop("mtp.fc.weight"), None, r"mtp\.fc\.weight.*missing"),
        (
            lambda s: s.update({"mtp.x.weight": torch.ones(2)}),
            None,
            r"that no layer of the model uses.*mtp\.x",
        ),
    ],
)
def test_invalid_mtp_layer_is_refused(made, tmp_path, tensors, config, message):
    folder = made("qwen3_5")
    changed = edited(folder, tmp_path / "x", tensors, lambda c: c.update(config or {}))
    with pytest.raises((CheckpointError, InputError), match=message):
        mtp.build(context_of(changed, load_target(folder), method="mtp"))


@pytest.fixture
def small(monkeypatch):
    """Copies of a few tokens are worth while."""
    monkeypatch.setattr(state_snapshots, "SPACING", 8)
    monkeypatch.setattr(state_snapshots, "MIN_GAIN", 4)


def check_texts(folder, mode, in_flight, count, monkeypatch):
    """Tokens of chats with the layer's drafts are those without."""
    want, *_ = chats(make_engine(folder))
    config = json.dumps({"method": "mtp", "num_speculative_tokens": count, "adaptive": False})
    engine = make_engine(folder, in_flight, speculative_config=config, **MODES[mode])
    verified = []
    monkeypatch.setattr(
        engine.scheduler.speculation, "observe", lambda *counts: verified.append(counts)
    )
    assert chats(engine)[0] == want
    accepted, drafts = (sum(each[index] for each in verified) for index in (1, 0))
    assert 0 < accepted < drafts


TEXTS = [
    ("qwen3_5", "whole", 1, 3),
    pytest.param("qwen3_5_moe", "whole", 1, 3, marks=pytest.mark.exhaustive),
    pytest.param("qwen3_next", "chunked", 1, 2, marks=pytest.mark.exhaustive),
    pytest.param("qwen3_5", "pushed out", 1, 3, marks=pytest.mark.exhaustive),
    pytest.param("qwen3_5", "few copies", 0, 1, marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("family", "mode", "in_flight", "count"), TEXTS)
def test_mtp_drafts_do_not_change_tokens(made, small, monkeypatch, family, mode, in_flight, count):
    check_texts(made(family, 0.7), mode, in_flight, count, monkeypatch)


@pytest.fixture(scope="module")
def quantized(made, tmp_path_factory):
    """A model with an MTP layer, and its W4A16."""
    source, folder = made("qwen3_5", 0.7), tmp_path_factory.mktemp("quantized") / "w4a16"
    quantize_checkpoint(
        source, folder, scheme=Scheme.parse("w4a16-sym-g32"), recipe="rtn", progress=False
    )
    return source, folder


def test_quantized_model_keeps_the_layer_in_float(quantized):
    want, found = (CheckpointReader(each) for each in quantized)
    names = [name for name in want.entries if name.startswith("mtp.")]
    assert len(names) > 10
    assert all(torch.equal(want.get(name), found.get(name)) for name in names)
    block = QuantConfig.from_dict(found.config[BLOCK])
    assert block.scheme_for("mtp.layers.0.mlp.down_proj") is None
    assert block.scheme_for("model.layers.0.mlp.down_proj") is not None


@pytest.mark.exhaustive
def test_quantized_model_drafts(quantized, small, monkeypatch):
    check_texts(quantized[1], "whole", 1, 2, monkeypatch)


@pytest.mark.parametrize("family", FAMILIES)
def test_inspect_reports_mtp_layer(made, tmp_path, family):
    found = inspect_checkpoint(made(family))
    assert found.draft_layers.layers == ("mtp",) and not found.draft_layers.missing
    assert "mtp, " in found.to_text() and '"method": "mtp"' in found.to_text()
    part = edited(made(family), tmp_path / "x", lambda s: s.pop("mtp.norm.weight"))
    assert "unusable: mtp.norm.weight is missing" in inspect_checkpoint(part).to_text()


def test_inspect_without_mtp_layer_reports_none(tiny_model):
    assert inspect_checkpoint(tiny_model("qwen3_next")).draft_layers is None
