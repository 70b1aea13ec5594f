"""Step-3.5: wrong readings are seen, as are files with published keys, and drafts.

test_family_tokens.py and test_text_part.py compare its tokens with transformers'.
"""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import softplus

from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from formats.inspection.inspect import inspect_checkpoint
from qkernels.moe.routing import SILU, Glu
from qserve.llm import LLM
from qserve.params.sampling_params import SamplingParams
from tests.qserve.model.test_family_tokens import check_greedy
from tests.qserve.model.variants import TOKENS, edited, logits, relative

FAMILY = "step"


def feed_forward(layer):
    """The dense feed-forward of a layer, or its shared expert."""
    return layer.mlp if not hasattr(layer.mlp, "shared") else layer.mlp.shared.mlp


def of_limits(limit, *layers):
    def plant(decoder):
        for layer in layers:
            mlp = feed_forward(decoder.layers[layer])
            mlp.activation = replace(mlp.activation, limit=limit)

    return plant


def of_experts(layer, change):
    def plant(decoder):
        mlp = decoder.layers[layer].mlp
        mlp.experts = replace(mlp.experts, glu=change(mlp.experts.glu))

    return plant


def of_attention(**values):
    def plant(decoder):
        for layer in decoder.layers:
            for name, value in values.items():
                setattr(layer.attention, name, value)

    return plant


def of_router(**values):
    def plant(decoder):
        for layer in decoder.layers[1:]:
            layer.mlp.router.routing = replace(layer.mlp.router.routing, **values)

    return plant


def exchanged_rotations(decoder):
    first, second = (decoder.layers[layer].attention for layer in (0, 1))
    first.rotary, second.rotary = second.rotary, first.rotary


def without_correction(decoder):
    for layer in decoder.layers[1:]:
        layer.mlp.router.correction.zero_()


def norms_without_1(decoder):
    for layer in decoder.layers:
        layer.attention.q_norm.sub_(1)


WRONG = {
    "dense MLP not clamped": of_limits(None, 0),
    "shared expert not clamped": of_limits(None, 3),
    "shared expert clamped by the routed limit": of_limits(0.3, 3),
    "routed experts not clamped": of_experts(2, lambda _: SILU),
    "gates clamped before activation": of_experts(3, lambda glu: Glu(limit=glu.limit)),
    "the limit of another layer": of_experts(2, lambda glu: replace(glu, limit=0.3)),
    "softplus gates": of_attention(activation=softplus),
    "RoPE of the other layer type": exchanged_rotations,
    "experts chosen without the correction": without_correction,
    "routing weights without their factor": of_router(factor=1.0),
    "routing weights not normalized": of_router(normalized=False),
    "QK norm weights without offset 1": norms_without_1,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_interpretation_fails_comparison(tiny_model, wrong):
    llm = LLM(tiny_model(FAMILY), device="cpu", max_model_len=64)
    right = llm.logits(TOKENS)
    with torch.inference_mode():
        WRONG[wrong](llm.engine.runner.decoder)
    assert relative(llm.logits(TOKENS), right) > 1e-3


def as_published(config):
    """Keys of the published config.json, which lists two MTP layers with the others."""
    for usual, own in (
        ("num_key_value_heads", "num_attention_groups"),
        ("n_routed_experts", "moe_num_experts"),
        ("num_experts_per_tok", "moe_top_k"),
    ):
        config[own] = config.pop(usual)
    sparse = [str(i) for i, kind in enumerate(config.pop("mlp_layer_types")) if kind == "sparse"]
    ropes = [config["rope_parameters"][kind] for kind in config["layer_types"]]
    (full,) = (rope for rope in config.pop("rope_parameters").values() if "factor" in rope)
    heads = config.pop("num_sliding_attention_heads")
    config.pop("per_layer_config", None)
    config.pop("query_pre_attn_scalar", None)
    shares = [rope.get("partial_rotary_factor", 1.0) for rope in ropes]
    of_rope = ("rope_theta", "partial_rotary_factor")
    config.update(
        num_nextn_predict_layers=2,
        moe_layers_enum=",".join(sparse),
        layer_types=[*config["layer_types"], *["sliding_attention"] * 2],
        rope_theta=[*(rope["rope_theta"] for rope in ropes), 1e4, 1e4],
        partial_rotary_factors=[*shares, 1.0, 1.0],
        rope_scaling={key: value for key, value in full.items() if key not in of_rope},
        yarn_only_types=["full_attention"],
        use_rope_layers=[],
        swiglu_limits=[*config["swiglu_limits"], 0.0, 0.0],
        swiglu_limits_shared=[*config["swiglu_limits_shared"], 0.0, 0.0],
        attention_other_setting={
            "attention_type": "sliding_attention",
            "num_attention_heads": heads,
            **{"num_attention_groups": 2, "head_dim": 32},
        },
        **{"att_impl_type": "GQA", "zero_centered": True, "sink": False},
        **{"use_head_wise_attn_gate": True, "use_moe_router_bias": True, "need_fp32_gate": True},
        **{"norm_expert_weight": True, "moe_router_activation": "sigmoid"},
    )


def with_mtp_layers(state):
    for layer in (4, 5):
        state[f"model.layers.{layer}.eh_proj.weight"] = torch.ones(64, 128)
        state[f"model.layers.{layer}.self_attn.q_proj.weight"] = torch.ones(256, 64)


def test_files_as_published(tiny_model, tmp_path):
    source = tiny_model(FAMILY)
    folder = edited(source, tmp_path / "model", with_mtp_layers, as_published)
    assert torch.equal(logits(folder), logits(source))
    for each in (source, folder):
        problems = inspect_checkpoint(each).problems
        assert all("has no tokenizer" in problem.text for problem in problems), problems
    entries = CheckpointReader(folder).entries
    assert entries["model.layers.2.moe.experts.5.up_proj.weight"].shape == (32, 64)
    assert "model.layers.2.moe.up_proj.weight" not in entries


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate"),
        ({"moe_router_activation": "softmax"}, "moe_router_activation"),
        ({"yarn_only_types": ["sliding_attention"]}, "yarn_only_types"),
        ({"attention_other_setting": {"head_dim": 16}}, r"attention_other_setting\.head_dim"),
        ({"query_pre_attn_scalar": 64}, "query_pre_attn_scalar"),
        ({"swiglu_limits": [0.0, 0.0, -1.0, 0.0]}, "swiglu_limits"),
        ({"swiglu_limits_shared": [0.0, 0.0, 0.0, -7]}, "swiglu_limits_shared"),
        ({"mlp_layer_types": None, "moe_layers_enum": "1,x"}, "moe_layers_enum"),
    ],
)
def test_unsupported_variant_is_refused(tiny_model, tmp_path, changed, key):
    folder = edited(tiny_model(FAMILY), tmp_path / "x", config=lambda c: c.update(changed))
    with pytest.raises(InputError, match=rf"config\.json {key}: expected "):
        LLM(folder, device="cpu", max_model_len=64)


def test_drafts_change_no_token(tiny_model, transformers_model):
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    llm = LLM(tiny_model(FAMILY), device="cpu", speculative_config=drafts, max_model_len=64)
    texts = [[5, 9, 77, 5, 9, 77, 5, 9], [8] * 12, [3, 4, 5, 6, 3, 4, 5, 6, 3]]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    outputs = llm.generate(texts, params, use_tqdm=False)
    check_greedy(transformers_model(tiny_model(FAMILY)), texts, outputs)
