"""MiniMax-Text-01 and M1: wrong readings of lightning attention are seen, as are published files.

test_hybrid_tokens.py compares its tokens with transformers'.
"""

import json

import pytest
import torch
from transformers.models.minimax import modeling_minimax

from calibrate.pipeline import quantize_checkpoint
from calibrate.texts.data import CalibrationData
from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from formats.scheme import Scheme
from qserve.llm import LLM
from qserve.model.blocks.states import lightning
from qserve.model.blocks.states.lightning import LightningAttention
from qserve.params.sampling_params import SamplingParams
from tests.qserve.model.test_family_tokens import check_greedy
from tests.qserve.model.test_hybrid_tokens import in_transformers
from tests.qserve.model.test_transformers import dense
from tests.qserve.model.variants import TOKENS, edited, logits, relative

FAMILY = "minimax"
TABLES = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")


def of_mixers(change):
    def plant(decoder):
        for layer in decoder.layers:
            if isinstance(layer.attention, LightningAttention):
                change(layer.attention)

    return plant


def of_layers(change):
    def plant(decoder):
        for layer in decoder.layers:
            change(layer)

    return plant


def parts_exchanged(mixer):
    """Keys for values."""
    inner = mixer.heads * mixer.head_dim
    v, k, rest = mixer.in_proj.weight.split([inner, inner, 2 * inner])
    mixer.in_proj.weight = torch.cat([k, v, rest])


def slopes_of_first_layer(decoder):
    for layer in decoder.layers[2:]:
        layer.attention.a_log = decoder.layers[0].attention.a_log


def factors_exchanged(layer):
    layer.attention_alpha, layer.mlp_alpha = layer.mlp_alpha, layer.attention_alpha


WRONG = {
    "keys used as values": of_mixers(parts_exchanged),
    "heads in the other order": of_mixers(lambda m: m.a_log.copy_(m.a_log.flip(0))),
    "slopes alike in all layers": slopes_of_first_layer,
    "norm adds 1": of_mixers(lambda m: m.norm.add_(1)),
    "factors of the stream swapped": of_layers(factors_exchanged),
    "branches without their factor": of_layers(lambda m: setattr(m.attention_end, "factor", 1.0)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_interpretation_fails_comparison(tiny_model, wrong):
    llm = LLM(tiny_model(FAMILY), device="cpu", max_model_len=64)
    right = llm.logits(TOKENS)
    with torch.inference_mode():
        WRONG[wrong](llm.engine.runner.decoder)
    assert relative(llm.logits(TOKENS), right) > 1e-3


def test_missing_activation_fails_comparison(tiny_model, monkeypatch):
    right = logits(tiny_model(FAMILY))
    monkeypatch.setattr(lightning, "silu", lambda x: x)
    assert relative(logits(tiny_model(FAMILY)), right) > 1e-3


def test_eps_of_the_mixers_norm_is_its_own(tiny_model, tmp_path):
    """transformers' default, whatever config.json states."""
    folder = edited(
        tiny_model(FAMILY), tmp_path / "model", config=lambda c: c.update(rms_norm_eps=0.05)
    )
    with torch.no_grad():
        want = in_transformers(folder)(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(folder), want) < 1e-5


FACTORS = {
    "full_attn": "layernorm_full_attention",
    "linear_attn": "layernorm_linear_attention",
    "mlp": "layernorm_mlp",
}


@pytest.mark.parametrize("name", ["MiniMaxText01", "MiniMaxM1"])
def test_files_with_remote_code(tiny_model, tmp_path, name):
    """Their keys of config.json differ, and no table is stored."""

    def as_published(config):
        kinds = config.pop("layer_types")
        config["attn_type_list"] = [int(kind == "full_attention") for kind in kinds]
        for usual, own in FACTORS.items():
            for letter in ("alpha", "beta"):
                config[f"{own}_{letter}"] = config.pop(f"{usual}_{letter}_factor")
        config.update(architectures=[f"{name}ForCausalLM"], postnorm=True)
        config["model_type"] = {"MiniMaxM1": "minimax_m1"}.get(name, "minimax_text_01")

    def without_tables(state):
        for key in [key for key in state if key.endswith(TABLES)]:
            del state[key]

    source = tiny_model(FAMILY)
    folder = edited(source, tmp_path / "model", without_tables, as_published)
    assert torch.equal(logits(folder), logits(source))


def test_partial_rotary(tiny_model, tmp_path, monkeypatch):
    """`rotary_dim` of published files, which transformers does not read."""
    folder = edited(
        tiny_model(FAMILY), tmp_path / "model", config=lambda c: c.update(rotary_dim=16)
    )
    rotate = modeling_minimax.apply_rotary_pos_emb

    def rotate_first(q, k, cos, sin, unsqueeze_dim=1):
        parts = [x.split([16, x.shape[-1] - 16], -1) for x in (q, k)]
        turned = rotate(*(first for first, _ in parts), cos, sin, unsqueeze_dim)
        return tuple(torch.cat([t, x], -1) for t, (_, x) in zip(turned, parts, strict=True))

    monkeypatch.setattr(modeling_minimax, "apply_rotary_pos_emb", rotate_first)
    model = in_transformers(folder)
    rotary = model.model.rotary_emb
    theta = json.loads((folder / "config.json").read_text())["rope_parameters"]["rope_theta"]
    rotary.inv_freq = theta ** -(torch.arange(0, 16, 2).float() / 16)
    with torch.no_grad():
        want = model(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(folder), want) < 1e-5
    assert relative(logits(tiny_model(FAMILY)), want) > 1e-3
    with pytest.raises(InputError, match="rotary_dim: transformers rotates all of a head"):
        solve(folder, tmp_path / "solved")


def solve(source, folder):
    ids_WS = torch.randint(3, 500, (4, 24), generator=torch.Generator().manual_seed(0))
    quantize_checkpoint(
        source,
        folder,
        scheme=Scheme.parse("w4a16-asym-g32"),
        output_format="gptq",
        recipe="gptq",
        calibration=CalibrationData(ids_WS=ids_WS, source="test", seed=0),
        progress=False,
    )


@pytest.mark.exhaustive
def test_solved_weights(tiny_model, tmp_path):
    """A calibrated run: its layers are transformers'."""
    folder = tmp_path / "model"
    solve(tiny_model(FAMILY), folder)
    assert "model.layers.0.self_attn.output_gate.qweight" in CheckpointReader(folder).entries
    model = in_transformers(dense(folder, tmp_path / "dense", torch.float32))
    with torch.no_grad():
        want = model(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(folder), want) < 1e-5


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_drafts_change_no_token(tiny_model, batch_invariant):
    settings = {"max_model_len": 64, "batch_invariant": batch_invariant}
    llm = LLM(tiny_model(FAMILY), device="cpu", speculative_config=NGRAM, **settings)
    texts = [[5, 9, 77, 5, 9, 77, 5, 9], [8] * 12, [3, 4, 5, 6, 3, 4, 5, 6, 3]]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    outputs = llm.generate(texts, params, use_tqdm=False)
    check_greedy(in_transformers(tiny_model(FAMILY)), texts, outputs)


def test_norms_before_branches_are_refused(tiny_model, tmp_path):
    folder = edited(
        tiny_model(FAMILY), tmp_path / "model", config=lambda c: c.update(postnorm=False)
    )
    with pytest.raises(InputError, match=r"config\.json postnorm: expected true, found false"):
        logits(folder)
