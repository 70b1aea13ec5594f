"""Rows of families without a class in transformers: their code is in the model's folder.

That code is not run. config.json is read with `defaults_of`; calibration builds the layers from the
row. Most differ from Llama only in names and in matrices that are merged on disk.
"""

from dataclasses import replace
from typing import Any

from formats.architecture.columns import Norm
from formats.architecture.experts import Router, SharedExpert
from formats.architecture.flags import Equals, Flag, Stated
from formats.architecture.projection import Projection
from formats.architecture.rows.latent_parts import SARVAM
from formats.architecture.rows.parts import (
    ATTENTION_BIAS,
    GATE_UP,
    GROUPED_ROUTER,
    MLP_BIAS,
    NAMES,
    O_PROJ,
    QKV,
    experts,
    gated,
    norms_before,
)
from formats.architecture.rows.usual import family_row
from formats.architecture.states.plamo import PLAMO_MAMBA

_LLAMA: dict[str, Any] = {"builder": "llama", "defaults_of": "llama"}


def _attention(
    qkv: str, o: str, bias: Flag = False, o_bias: Flag = False, **stored: Any
) -> dict[str, Projection]:
    """Return attention whose queries, keys and values are one matrix on disk."""
    return {
        "qkv": replace(QKV, name=qkv, bias=bias, stored_fused=True, **stored),
        "o": replace(O_PROJ, name=o, members=((o, "hidden_size"),), bias=o_bias),
    }


def _norms(first: str, qkv: str, second: str, feed_forward: str) -> tuple[Norm, Norm]:
    return Norm(name=first, feeds=qkv), Norm(name=second, feeds=feed_forward)


def _gated_mlp(gate: str, up: str, **different: Any) -> dict[str, Projection]:
    """Return a feed-forward with these names of gate and up, and `c_proj` for down."""
    found = gated("mlp", gate, up, "c_proj", "intermediate_size")
    return {**found, "gate_up": replace(found["gate_up"], name="mlp.gate_up_proj", **different)}


_EXAONE = "attn.attention"
EXAONE: dict[str, Any] = {
    **_LLAMA,
    "qkv": replace(
        QKV,
        name=f"{_EXAONE}.qkv_proj",
        members=tuple(
            (f"{_EXAONE}.{x}_proj", size) for x, size in zip("qkv", ("q", "kv", "kv"), strict=True)
        ),
    ),
    "o": replace(
        O_PROJ, name=f"{_EXAONE}.out_proj", members=((f"{_EXAONE}.out_proj", "hidden_size"),)
    ),
    **_gated_mlp("c_fc_0", "c_fc_1"),
    "norms": _norms("ln_1", f"{_EXAONE}.qkv_proj", "ln_2", "mlp.gate_up_proj"),
    "norm_eps_key": "layer_norm_epsilon",
    "activation_key": "activation_function",
    "tied": True,
    "config_keys": {"num_hidden_layers": "num_layers"},
    "layer": "transformer.h.{i}",
    "embedding": "transformer.wte.weight",
    "last_norm": "transformer.ln_f.weight",
}
_INTERNLM_BIAS = Stated("bias", True)
INTERNLM_2: dict[str, Any] = {
    **_LLAMA,
    **_attention("attention.wqkv", "attention.wo", _INTERNLM_BIAS, _INTERNLM_BIAS, by_head=True),
    **gated("feed_forward", "w1", "w3", "w2", "intermediate_size"),
    "norms": _norms("attention_norm", "attention.wqkv", "ffn_norm", "feed_forward.gate_up"),
    "embedding": "model.tok_embeddings.weight",
    "head": "output.weight",
}
_W_PACK = "self_attn.W_pack"
BAICHUAN_7B: dict[str, Any] = {
    **_LLAMA,
    "qkv": replace(QKV, name=_W_PACK, stored_fused=True),
    "norms": _norms("input_layernorm", _W_PACK, "post_attention_layernorm", "mlp.gate_up_proj"),
    "normalized_head": "norm_head",
    "head_norm_dim": 1,
}
# The 13B models have ALiBi. Baichuan 2 has this architecture in both sizes.
BAICHUAN: dict[str, Any] = {
    **BAICHUAN_7B,
    "rope": "none",
    "alibi": True,
    "config_keys": {"max_position_embeddings": "model_max_length"},
    "variants": ((Equals("hidden_size", 4096), {"rope": "all", "alibi": False}),),
}
QWEN_1: dict[str, Any] = {
    **_LLAMA,
    **_attention("attn.c_attn", "attn.c_proj", True),
    # rules.FUSED goes only by names, and w2 is the down projection in other families.
    **_gated_mlp("w2", "w1", apart_elsewhere=True),
    "norms": _norms("ln_1", "attn.c_attn", "ln_2", "mlp.gate_up_proj"),
    "norm_eps_key": "layer_norm_epsilon",
    "activation_key": "",
    "inner_key": "mlp_width",
    "fixed": {"scale_attn_weights": True, "no_bias": True, "visual": None},
    "config_keys": {"head_dim": "kv_channels"},
    "layer": "transformer.h.{i}",
    "embedding": "transformer.wte.weight",
    "last_norm": "transformer.ln_f.weight",
}
_MIXER = "mixer.qkv_proj"
PLAMO_3: dict[str, Any] = {
    "builder": "afmoe",
    "defaults_of": "gemma3_text",  # RoPE parameters for each layer type
    **_attention(_MIXER, "mixer.o_proj"),
    "gate_up": replace(GATE_UP, stored_fused=True),
    "norms": (
        Norm(name="pre_mixer_norm", feeds=_MIXER),
        Norm(name="post_mixer_norm", offset=1 / 5),
        Norm(name="pre_mlp_norm", feeds=GATE_UP.name),
        Norm(name="post_mlp_norm", offset=1 / 5**1.5),
        *(Norm(name=f"mixer.{x}_norm", size="head_dim") for x in "qk"),
    ),
    "norm_offset": 1.0,
    "float32_norms": True,
    "activation_key": "",
    "window": "layer_types",
    "tied": True,
    "fixed": {
        **{"attention_bias": False, "scale_embedding": False},
        "hidden_activation": ("swiglu", None),
    },
    "config_keys": {"sliding_window": "window_size"},
    "layer": "model.layers.layers.{i}",
}
_HEAD_COUNTS = {"q": "num_attention_heads", "k": "num_key_value_heads"}
PLAMO_2: dict[str, Any] = {
    **PLAMO_3,
    "builder": "hybrid.plamo",
    "state_mixer": PLAMO_MAMBA,
    "norms": PLAMO_3["norms"][:4],
    "head_norms": {
        f"{x}_norm": (f"mixer.{x}_weight", ((count,), ("head_dim",)))
        for x, count in _HEAD_COUNTS.items()
    },
    "fixed": {"rms_norm_eps": 1e-6},  # norms of heads have it in any case
    "config_keys": {"head_dim": "hidden_size_per_head", "mamba_n_heads": "mamba_num_heads"},
}
SOLAR: dict[str, Any] = {
    **ATTENTION_BIAS,
    **MLP_BIAS,
    "builder": "solar",
    "defaults_of": "llama",
    "skips": True,
}
_BAILING_QKV = "attention.query_key_value"
_HEAD_NORMS = ("attention.query_layernorm", "attention.key_layernorm")
_SHARED_WIDTH = "shared_expert_intermediate_size"
BAILING: dict[str, Any] = {
    "builder": "moe",
    "defaults_of": "llama",
    **_attention(_BAILING_QKV, "attention.dense", "use_qkv_bias"),
    "experts": experts(
        "mlp",
        NAMES,
        "moe_intermediate_size",
        Router(normalized="norm_topk_prob"),
        shared=SharedExpert(
            **gated("mlp.shared_experts", *NAMES, "shared_expert_intermediate_size")
        ),
        first_dense_key="first_k_dense_replace",
    ),
    "norms": _norms("input_layernorm", _BAILING_QKV, "post_attention_layernorm", "mlp"),
    "normalized_head": "norm_head",
    "head_norm_dim": 0,
    "fixed": {
        **{"use_bias": False, "multi_gate": False, "norm_softmax": False},
        **{"score_function": ("softmax", None), "use_sliding_window": False},
    },
    "embedding": "model.word_embeddings.weight",
}
BAILING_2: dict[str, Any] = {
    **BAILING,
    "experts": replace(
        BAILING["experts"], routing=replace(GROUPED_ROUTER, correction="gate.expert_bias")
    ),
    "norms": (
        *BAILING["norms"],
        *(Norm(name=name, size="head_dim", present="use_qk_norm") for name in _HEAD_NORMS),
    ),
    "fixed": {
        **{"use_bias": False, "score_function": ("sigmoid", None), "router_type": ("topN", None)},
        **{"moe_router_enable_expert_bias": True, "use_sliding_window": False},
    },
    "unread_layers_key": "num_nextn_predict_layers",
}
DEEPSEEK_MOE: dict[str, Any] = {
    "builder": "moe",
    "defaults_of": "llama",
    "experts": experts(
        "mlp",
        NAMES,
        "moe_intermediate_size",
        Router(float32=True, factor_key="routed_scaling_factor"),
        shared=SharedExpert(**gated("mlp.shared_experts", *NAMES, "shared_experts")),
        first_dense_key="first_k_dense_replace",
        types_key="mlp_layer_types",
    ),
    "norms": norms_before("mlp"),
    "float16": False,
    "fixed": {
        **{"attention_bias": False, "mlp_bias": False, "moe_layer_freq": 1, "use_mla": False},
        **{"norm_topk_prob": False, "scoring_func": "softmax"},
        "topk_method": ("greedy", None),
    },
}
OWN_CODE_DENSE = (
    family_row("ExaoneForCausalLM", "EXAONE 3 and 3.5", "exaone", **EXAONE),
    family_row("InternLM2ForCausalLM", "InternLM2", "internlm2", **INTERNLM_2),
    family_row("BaiChuanForCausalLM", "Baichuan 7B", "baichuan", **BAICHUAN_7B),
    family_row("BaichuanForCausalLM", "Baichuan 13B and Baichuan 2", "baichuan", **BAICHUAN),
    family_row("QWenLMHeadModel", "Qwen 1", "qwen", **QWEN_1),
    family_row("SolarForCausalLM", "Solar Pro", "solar", **SOLAR),
    family_row("Plamo2ForCausalLM", "PLaMo 2", "plamo2", **PLAMO_2),
    family_row("Plamo3ForCausalLM", "PLaMo 3", "plamo3", **PLAMO_3),
)
OWN_CODE_MIXTURES = (
    family_row("BailingMoeForCausalLM", "Ling (Bailing MoE)", "bailing_moe", **BAILING),
    family_row("BailingMoeV2ForCausalLM", "Ling 2 and Ring 2", "bailing_moe", **BAILING_2),
    family_row("SarvamMoEForCausalLM", "Sarvam 30B", "sarvam_moe", **BAILING_2),
    family_row("SarvamMLAForCausalLM", "Sarvam 105B", "sarvam_mla", **SARVAM),
    family_row(
        "DeepseekForCausalLM", "DeepSeek-MoE and DeepSeek-OCR (text)", "deepseek", **DEEPSEEK_MOE
    ),
)
