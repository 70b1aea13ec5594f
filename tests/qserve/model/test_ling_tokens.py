"""Ling 3: wrong readings are seen, as are files as published, limits of activations, and drafts.

test_hybrid_tokens.py compares its tokens with transformers'.
"""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers.models.bailing_hybrid import modeling_bailing_hybrid

from calibrate.pipeline import quantize_checkpoint
from calibrate.texts.data import CalibrationData
from formats.checkpoint import CheckpointReader, read_json
from formats.errors import InputError
from formats.inspection.inspect import inspect_checkpoint
from formats.quant_config import BLOCK, QuantConfig
from formats.scheme import Scheme
from qkernels.moe.routing import SILU
from qserve.llm import LLM
from qserve.model.blocks.latent.attention import LatentAttention
from qserve.model.blocks.states.kimi_delta import KimiDelta
from qserve.params.sampling_params import SamplingParams
from tests.qserve.model.test_family_tokens import check_greedy
from tests.qserve.model.test_hybrid_tokens import in_transformers
from tests.qserve.model.test_transformers import dense
from tests.qserve.model.variants import TOKENS, edited, logits, relative

FAMILY = "ling_3"


def of_mixers(change):
    def plant(decoder):
        for layer in decoder.layers:
            if isinstance(layer.attention, KimiDelta):
                change(layer.attention)

    return plant


def of_latents(change):
    def plant(decoder):
        for layer in decoder.layers:
            if isinstance(layer.attention, LatentAttention):
                change(layer.attention)

    return plant


def gates_exchanged(mixer):
    """Decays for the gates of the result."""
    inner = mixer.shape.inner
    own, theirs = mixer.in_proj.weight[3 * inner :], mixer.low.weight[:inner]
    kept = own.clone()
    own.copy_(theirs)
    theirs.copy_(kept)


def of_router(**values):
    def plant(decoder):
        for layer in decoder.layers[1:]:
            layer.mlp.router.routing = replace(layer.mlp.router.routing, **values)

    return plant


WRONG = {
    "decays without a bound": of_mixers(lambda each: setattr(each, "decay_bound", 0.0)),
    "another bound": of_mixers(lambda each: setattr(each, "decay_bound", -5.0)),
    "decays and gates swapped": of_mixers(gates_exchanged),
    "wrong exponential of A_log": of_mixers(lambda each: each.a_log.exp_()),
    "decays without dt_bias": of_mixers(lambda each: each.dt_bias.zero_()),
    "latent attention without gates": of_latents(lambda each: setattr(each, "gates", None)),
    "gates of other heads": of_latents(
        lambda each: each.gates.weight.copy_(each.gates.weight.roll(1, 0))
    ),
    "split-half RoPE": of_latents(lambda each: setattr(each.rotary, "interleaved", False)),
    "routing weights without their factor": of_router(factor=1.0),
    "expert groups ranked by best expert": of_router(group_score="max"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_interpretation_fails_comparison(tiny_model, wrong):
    llm = LLM(tiny_model(FAMILY), device="cpu", max_model_len=64)
    right = llm.logits(TOKENS)
    with torch.inference_mode():
        WRONG[wrong](llm.engine.runner.decoder)
    assert relative(llm.logits(TOKENS), right) > 1e-3


def as_published(config):
    """Keys of the published config.json, which states a rotated part, although all rotates."""
    config["architectures"] = ["BailingMoeV3ForCausalLM"]
    for usual, own in (
        ("num_experts_per_tok", "num_experts_per_token"),
        ("norm_topk_prob", "moe_renormalize"),
        ("n_group", "num_expert_group"),
        ("max_position_embeddings", "model_max_length"),
        ("head_dim", "linear_head_dim"),
    ):
        config[usual] = config.pop(own)
    for key in ("linear_num_heads", "linear_conv_kernel_dim", "layer_types", "mlp_layer_types"):
        del config[key]
    config["rope_parameters"]["partial_rotary_factor"] = 0.5
    config.update(q_lora_rank=None, no_kda_lora=True, score_function="sigmoid", use_qk_norm=True)
    config.update(num_nextn_predict_layers=1, gated_attention_proj_granularity_type="head_wise")


def with_other_names(state):
    """An MTP layer, and the usual name of the mixer's last linear."""
    state["model.layers.3.eh_proj.weight"] = torch.ones(64, 128)
    for layer in (0, 2):
        name = f"model.layers.{layer}.attention"
        state[f"{name}.o_proj.weight"] = state.pop(f"{name}.dense.weight")


def test_files_as_published(tiny_model, tmp_path):
    source = tiny_model(FAMILY)
    folder = edited(source, tmp_path / "model", with_other_names, as_published)
    assert "model.layers.2.attention.o_proj.weight" in load_file(folder / "model.safetensors")
    assert torch.equal(logits(folder), logits(source))
    for each in (source, folder):
        problems = inspect_checkpoint(each).problems
        assert all("has no tokenizer" in problem.text for problem in problems), problems


def cut(limit):
    def forward(mlp, x):
        gate, up = mlp.act_fn(mlp.gate_proj(x)), mlp.up_proj(x)
        return mlp.down_proj(gate.clamp(max=limit) * up.clamp(-limit, limit))

    return forward


def test_limits_of_shared_experts(tiny_model, tmp_path, monkeypatch):
    """transformers reads no limits: its last shared expert is cut here."""
    limits = {"share_expert_swiglu_limit_list": [0.0, 0, 0.1]}
    folder = edited(tiny_model(FAMILY), tmp_path / "x", config=lambda c: c.update(limits))
    model = in_transformers(folder)
    shared = model.model.layers[2].mlp.shared_experts
    monkeypatch.setattr(shared, "forward", lambda x: cut(0.1)(shared, x))
    with torch.no_grad():
        want = model(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(folder), want) < 1e-5
    assert relative(logits(tiny_model(FAMILY)), want) > 1e-3


def test_limits_of_routed_experts_are_by_layer(tiny_model, tmp_path):
    limits = {"expert_swiglu_limit_list": [0.0, 0, 0.1, 7.0]}
    folder = edited(tiny_model(FAMILY), tmp_path / "x", config=lambda c: c.update(limits))
    llm = LLM(folder, device="cpu", max_model_len=64)
    glus = [layer.mlp.experts.glu for layer in llm.engine.runner.decoder.layers[1:]]
    assert glus[0] == SILU
    assert glus[1].limit == 0.1
    assert relative(llm.logits(TOKENS), logits(tiny_model(FAMILY))) > 1e-3


def test_queries_from_latents(tiny_model, tmp_path, monkeypatch):
    """Small models state a q_lora_rank, which transformers' class does not have."""
    name, rank = "model.layers.1.attention", 40
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(rank, 64, generator=generator) / 8
    norm = torch.rand(rank, generator=generator) + 0.5

    def with_latents(state):
        b = state.pop(f"{name}.q_proj.weight")[:, :rank].contiguous()
        state |= {
            f"{name}.{key}.weight": value
            for key, value in (("q_a_proj", a), ("q_a_layernorm", norm), ("q_b_proj", b))
        }

    source = tiny_model(FAMILY)
    model = in_transformers(source)
    q_proj = model.model.layers[1].self_attn.q_proj
    b = q_proj.weight.data[:, :rank].clone()
    of_latents = modeling_bailing_hybrid.BailingHybridRMSNorm(rank)
    of_latents.weight.data.copy_(norm)

    def queries(x):
        return nn.functional.linear(of_latents(nn.functional.linear(x, a)), b)

    monkeypatch.setattr(q_proj, "forward", queries)
    folder = edited(source, tmp_path / "x", with_latents, lambda c: c.update(q_lora_rank=rank))
    with torch.no_grad():
        want = model(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(folder), want) < 1e-5
    assert relative(logits(source), want) > 1e-3


@pytest.mark.parametrize("changed", [{"kda_safe_gate": False}, {"kda_lower_bound": -1.0}])
def test_gates_of_config_json(tiny_model, tmp_path, changed):
    folder = edited(tiny_model(FAMILY), tmp_path / "x", config=lambda c: c.update(changed))
    with torch.no_grad():
        want = in_transformers(folder)(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(folder), want) < 1e-5


@pytest.mark.exhaustive
def test_solved_weights(tiny_model, tmp_path):
    """A calibrated run: its layers are transformers', decays and gates of heads stay in float."""
    ids_WS = torch.randint(3, 500, (4, 24), generator=torch.Generator().manual_seed(0))
    folder = tmp_path / "model"
    quantize_checkpoint(
        tiny_model(FAMILY),
        folder,
        scheme=Scheme.parse("w4a16-asym-g32"),
        output_format="gptq",
        recipe="gptq",
        calibration=CalibrationData(ids_WS=ids_WS, source="test", seed=0),
        progress=False,
    )
    entries = CheckpointReader(folder).entries
    quantized = {name.removesuffix(".qweight") for name in entries if name.endswith(".qweight")}
    assert {f"model.layers.0.attention.{x}" for x in ("g_proj", "v_proj", "dense")} <= quantized
    assert {f"model.layers.1.attention.{x}" for x in ("kv_b_proj", "dense")} <= quantized
    quant = QuantConfig.from_dict(read_json(folder / "config.json")[BLOCK])
    for name in ("layers.0.attention.f_proj", "layers.0.attention.b_proj"):
        assert quant.scheme_for(f"model.{name}") is None
    assert quant.scheme_for("model.layers.1.attention.g_proj") is None
    model = in_transformers(dense(folder, tmp_path / "dense", torch.float32))
    with torch.no_grad():
        want = model(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(folder), want) < 1e-5


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_drafts_change_no_token(tiny_model, batch_invariant):
    """Rejected rows are left out of states with bounded decays."""
    settings = {"max_model_len": 64, "batch_invariant": batch_invariant}
    llm = LLM(tiny_model(FAMILY), device="cpu", speculative_config=NGRAM, **settings)
    texts = [[5, 9, 77, 5, 9, 77, 5, 9], [8] * 12, [3, 4, 5, 6, 3, 4, 5, 6, 3]]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    outputs = llm.generate(texts, params, use_tqdm=False)
    check_greedy(in_transformers(tiny_model(FAMILY)), texts, outputs)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gated_attention_proj_granularity_type", "element_wise"),
        ("use_mla_nope", True),
        ("no_kda_lora", False),
        ("score_function", "softmax"),
    ],
)
def test_unsupported_variant_is_refused(tiny_model, tmp_path, key, value):
    folder = edited(tiny_model(FAMILY), tmp_path / "x", config=lambda c: c.update({key: value}))
    with pytest.raises(InputError, match=rf"config\.json {key}: expected "):
        logits(folder)
