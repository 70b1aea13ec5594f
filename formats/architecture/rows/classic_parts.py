"""Values of the rows of GPT-2, GPT-J, GPT-BigCode, Falcon and others in families.py."""

from dataclasses import replace
from typing import Any

from formats.architecture.columns import Norm, Positions
from formats.architecture.experts import Router, SharedExpert
from formats.architecture.flags import Equals, Flag, Stated
from formats.architecture.projection import Projection
from formats.architecture.rows.parts import (
    ATTENTION_BIAS,
    DOWN,
    GATE_UP,
    MLP_BIAS,
    NAMES,
    O_PROJ,
    QKV,
    USUAL,
    experts,
    gated,
    norms_before,
    ungated,
)

# canonical key of config.json -> GPT-2's key
GPT_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
_MASKS = ("attn.bias", "attn.masked_bias")


def _linear(name: str, inputs: str, bias: Flag) -> Projection:
    """Return a linear whose output is added to the residual stream."""
    return replace(O_PROJ, name=name, members=((name, "hidden_size"),), inputs=inputs, bias=bias)


_GPT: dict[str, Any] = {
    "norm_kind": "layer",
    "norm_bias": True,
    "norm_eps_key": "layer_norm_epsilon",
    "activation_key": "activation_function",
    "inner_key": "n_inner",
    "config_keys": GPT_KEYS,
    "left_out_prefix": "transformer.",
    "masks": _MASKS,
    "layer": "transformer.h.{i}",
    "embedding": "transformer.wte.weight",
    "last_norm": "transformer.ln_f.weight",
}
GPT2: dict[str, Any] = {
    **_GPT,
    "qkv": replace(QKV, name="attn.c_attn", bias=True, stored_fused=True),
    "o": _linear("attn.c_proj", "q", True),
    **ungated("mlp.c_fc", "mlp.c_proj", True),
    "norms": (Norm(name="ln_1", feeds="attn.c_attn"), Norm(name="ln_2", feeds="mlp.c_fc")),
    "activations": ("gelu_new", "gelu_pytorch_tanh", "gelu", "relu"),
    "rope": "none",
    "positions": Positions(name="transformer.wpe.weight"),
    "fixed": {
        "add_cross_attention": False,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    },
    "tied": True,
    "transposed": True,
}
GPT_BIGCODE: dict[str, Any] = {
    **GPT2,
    "qkv": replace(GPT2["qkv"], by_head=True),
    "activations": ("gelu_pytorch_tanh", "gelu_new", "gelu", "relu"),
    "transposed": False,
}
_Q, _K, _V = (f"attn.{name}_proj" for name in "qkv")
GPT_J: dict[str, Any] = {
    **_GPT,
    "qkv": replace(QKV, name="attn.qkv_proj", members=((_Q, "q"), (_K, "kv"), (_V, "kv"))),
    "o": _linear("attn.out_proj", "q", False),
    **ungated("mlp.fc_in", "mlp.fc_out", True),
    "parallel": True,
    "norms": (Norm(name="ln_1", feeds="attn.qkv_proj"),),
    "activations": ("gelu_new", "gelu_pytorch_tanh", "gelu"),
    "rotary_dim_key": "rotary_dim",
    "interleaved_rope": True,
    "head_bias": True,
}
# GPT-J with queries, values and keys in one matrix, in blocks of heads
CODEGEN: dict[str, Any] = {
    **GPT_J,
    "qkv": replace(QKV, name="attn.qkv_proj", stored_fused=True, blocks=4),
    "masks": (*_MASKS, "attn.causal_mask"),
}
_NEO = "attn.attention"
GPT_NEO: dict[str, Any] = {
    **GPT2,
    "qkv": replace(
        QKV,
        name=f"{_NEO}.qkv_proj",
        members=tuple(
            (f"{_NEO}.{x}_proj", size) for x, size in zip("qkv", ("q", "kv", "kv"), strict=True)
        ),
    ),
    "o": _linear(f"{_NEO}.out_proj", "q", True),
    "norms": (Norm(name="ln_1", feeds=f"{_NEO}.qkv_proj"), Norm(name="ln_2", feeds="mlp.c_fc")),
    "inner_key": "intermediate_size",
    "window": "layer_types",
    "config_keys": {
        **{"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"},
        "sliding_window": "window_size",
    },
    "masks": tuple(f"{_NEO}.{name}" for name in ("bias", "masked_bias")),
    "fixed": {},
    "transposed": False,
}
# Norms, RoPE and biases of ERNIE 4.5, and its experts.
ERNIE: dict[str, Any] = {
    name: replace(projection, bias="use_bias")
    for name, projection in (("qkv", QKV), ("o", O_PROJ), ("gate_up", GATE_UP), ("down", DOWN))
} | {"interleaved_rope": True, "tied": True}
ERNIE_MOE: dict[str, Any] = {
    **ERNIE,
    "experts": experts(
        "mlp",
        NAMES,
        "moe_intermediate_size",
        Router(
            normalized=True,
            float32=True,
            rounded=True,
            correction="moe_statics.e_score_correction_bias",
            correction_is_row=True,
        ),
        shared=SharedExpert(**gated("mlp.shared_experts", *NAMES, "shared_experts")),
        dense_layers_key="mlp_only_layers",
    ),
    "names_in_transformers": {"mlp.moe_statics": "mlp.gate.moe_statics"},
    "norms": norms_before("mlp"),
    "fixed": {"use_bias": False},
    "draft_prefix": "model.mtp_",
    "config_keys": {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
}
# ERNIE 4.5 VL's text model: experts for text, and others for the tokens of images.
ERNIE_VL: dict[str, Any] = {
    **ERNIE_MOE,
    "experts": experts(
        "mlp",
        NAMES,
        "text_expert_size",
        replace(ERNIE_MOE["experts"].routing, correction_is_row=False),
        shared=SharedExpert(
            **gated("mlp.shared_experts", *NAMES, "moe_shared_expert_intermediate_size")
        ),
        media_inner="media_expert_size",
        types_key="mlp_layer_types",
    ),
    "names_in_transformers": {},
    "class_in_transformers": "Ernie4_5_VLMoeTextModel",
    "config_keys": {"num_experts_per_tok": "moe_k"},
}
NORMS_OF_ROTATED_HEADS = tuple(
    Norm(name=f"self_attn.{x}_layernorm", size="head_dim") for x in ("query", "key")
)
HUNYUAN: dict[str, Any] = {
    **ATTENTION_BIAS,
    "builder": "hunyuan",
    "norms": (*USUAL["norms"], *NORMS_OF_ROTATED_HEADS),
}
HUNYUAN_MOE: dict[str, Any] = {
    **HUNYUAN,
    "norms": (*norms_before("mlp"), *HUNYUAN["norms"][2:]),
    "experts": experts(
        "mlp",
        NAMES,
        "intermediate_size",
        Router(name="gate.wg", is_linear=True, normalized=True, float32=True),
        shared=SharedExpert(**gated("mlp.shared_mlp", *NAMES, "intermediate_size")),
    ),
    "config_keys": {"num_experts_per_tok": "moe_topk"},
}
GRANITE: dict[str, Any] = {
    **ATTENTION_BIAS,
    "builder": "granite",
    "embedding_factor_key": "embedding_multiplier",
    "logits_divisor_key": "logits_scaling",
}
OLMO_1: dict[str, Any] = {
    **ATTENTION_BIAS,
    "norms": tuple(replace(norm, feeds="") for norm in USUAL["norms"]),
    "norm_kind": "layer",
    "norm_weights": False,
    "norm_eps_key": "",
    "fixed": {"clip_qkv": None},
}
_POST_NORM = Stated("use_post_norm", True)
HYPERCLOVA: dict[str, Any] = {
    **ATTENTION_BIAS,
    **MLP_BIAS,
    "builder": "granite",
    "norms": (
        *USUAL["norms"],
        Norm(name="post_norm1", present=_POST_NORM),
        Norm(name="post_norm2", present=_POST_NORM),
    ),
    "embedding_factor_key": "embedding_multiplier",
    "logits_factor_key": "logits_scaling",
}
GRANITE_MOE: dict[str, Any] = {
    **GRANITE,
    "experts": experts(
        "block_sparse_moe",
        ("w1", "w3", "w2"),
        "intermediate_size",
        Router(name="router.layer", scores="softmax_of_chosen", rounded=True),
        stacks=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
        stacks_only=True,
    ),
    "names_in_transformers": {
        "block_sparse_moe.router.layer.weight": "block_sparse_moe.router.weight"
    },
    "norms": norms_before("block_sparse_moe"),
}
# Granite with windows: sinks, and a separate theta for each layer
GRANITE_SWA: dict[str, Any] = {
    "sinks": "self_attn.sinks",
    "window": "layer_types",
    "theta_key": "layer_rope_theta",
    "tied": True,
}
_INPUT, _OUTPUT = "shared_mlp.input_linear", "shared_mlp.output_linear"
GRANITE_MOE_SHARED: dict[str, Any] = {
    **GRANITE_MOE,
    "experts": replace(
        GRANITE_MOE["experts"],
        shared=SharedExpert(
            gate_up=Projection(
                name=_INPUT,
                members=(
                    ("shared_mlp.gate_proj", "shared_intermediate_size"),
                    ("shared_mlp.up_proj", "shared_intermediate_size"),
                ),
                inputs="hidden_size",
                stored_fused=True,
            ),
            down=Projection(
                name=_OUTPUT,
                members=((_OUTPUT, "hidden_size"),),
                inputs="shared_intermediate_size",
                split="inputs",
            ),
        ),
    ),
}
# as transformers writes it
GRANITE_SWA_EXPERTS = replace(
    GRANITE_MOE["experts"],
    routing=replace(GRANITE_MOE["experts"].routing, name="router"),
    stacks=tuple(f"block_sparse_moe.experts.{name}" for name in ("gate_up_proj", "down_proj")),
)
GRANITE_MOE_SWA: dict[str, Any] = {
    **GRANITE_MOE_SHARED,
    **GRANITE_SWA,
    "experts": replace(GRANITE_SWA_EXPERTS, shared=GRANITE_MOE_SHARED["experts"].shared),
    "names_in_transformers": {},
    "tied": False,
}
_BLOOM_QKV, _BLOOM_UP = "self_attention.query_key_value", "mlp.dense_h_to_4h"
BLOOM: dict[str, Any] = {
    "qkv": replace(QKV, name=_BLOOM_QKV, bias=True, stored_fused=True, by_head=True),
    "o": _linear("self_attention.dense", "q", True),
    **ungated(_BLOOM_UP, "mlp.dense_4h_to_h", True),
    "norms": (
        Norm(name="input_layernorm", feeds=_BLOOM_QKV),
        Norm(name="post_attention_layernorm", feeds=_BLOOM_UP),
    ),
    "norm_kind": "layer",
    "norm_bias": True,
    "norm_eps_key": "layer_norm_epsilon",
    "activations": ("gelu_pytorch_tanh",),
    "rope": "none",
    "alibi": True,
    "embedding_norm": "transformer.word_embeddings_layernorm.weight",
    "fixed": {"apply_residual_connection_post_layernorm": False},
    "tied": True,
    "config_keys": {
        **{"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
        "hidden_size": "n_embed",
    },
    "left_out_prefix": "transformer.",
    "layer": "transformer.h.{i}",
    "embedding": "transformer.word_embeddings.weight",
    "last_norm": "transformer.ln_f.weight",
}
MPT: dict[str, Any] = {
    "qkv": replace(QKV, name="attn.Wqkv", stored_fused=True),
    "o": _linear("attn.out_proj", "q", False),
    **ungated("ffn.up_proj", "ffn.down_proj", False),
    "norms": (Norm(name="norm_1", feeds="attn.Wqkv"), Norm(name="norm_2", feeds="ffn.up_proj")),
    "norm_kind": "layer",
    "norm_eps_key": "layer_norm_epsilon",
    "activations": ("gelu",),
    "rope": "none",
    "alibi": True,
    "fixed": {
        **{"attn_config.alibi": True, "attn_config.clip_qkv": None, "attn_config.qk_ln": False},
        **{"attn_config.prefix_lm": False, "attn_config.softmax_scale": None},
        # transformers ignores other values, but the code in the model's folder uses them
        **{"attn_config.alibi_bias_max": 8, "attn_config.attn_type": "multihead_attention"},
        **{"expansion_ratio": 4, "no_bias": True, "logit_scale": None},
    },
    "tied": True,
    "config_keys": {
        **{"hidden_size": "d_model", "num_hidden_layers": "n_layers"},
        **{"num_attention_heads": "n_heads", "max_position_embeddings": "max_seq_len"},
    },
    "layer": "transformer.blocks.{i}",
    "embedding": "transformer.wte.weight",
    "last_norm": "transformer.norm_f.weight",
}
_FALCON_QKV, _FALCON_UP = "self_attention.query_key_value", "mlp.dense_h_to_4h"
_ONE, _TWO = (Equals("num_ln_in_parallel_attn", count) for count in (1, 2))
FALCON: dict[str, Any] = {
    "qkv": replace(QKV, name=_FALCON_QKV, bias="bias", stored_fused=True, by_head=True),
    "o": _linear("self_attention.dense", "q", "bias"),
    **ungated(_FALCON_UP, "mlp.dense_4h_to_h", "bias"),
    "parallel": _ONE,
    "norms": (
        Norm(name="input_layernorm", feeds=_FALCON_QKV, present=_ONE),
        Norm(name="ln_attn", feeds=_FALCON_QKV, present=_TWO),
        Norm(name="ln_mlp", feeds=_FALCON_UP, present=_TWO),
    ),
    "norm_kind": "layer",
    "norm_bias": True,
    "norm_eps_key": "layer_norm_epsilon",
    "activation_key": "activation",
    "activations": ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu"),
    "inner_key": "ffn_hidden_size",
    "fixed": {"parallel_attn": True},
    "variants": (
        (
            "alibi",  # RW
            {
                "alibi": True,
                "scaled_alibi": True,
                "rope": "none",
                "parallel": False,
                "norms": (
                    Norm(name="input_layernorm", feeds=_FALCON_QKV),
                    Norm(name="post_attention_layernorm", feeds=_FALCON_UP),
                ),
                "fixed": {"parallel_attn": False, "new_decoder_architecture": False},
            },
        ),
    ),
    "tied": True,
    "layer": "transformer.h.{i}",
    "embedding": "transformer.word_embeddings.weight",
    "last_norm": "transformer.ln_f.weight",
}
_FEED_FORWARD = gated("feed_forward", *NAMES, "intermediate_size_mlp")
LLAMA_4: dict[str, Any] = {
    **ATTENTION_BIAS,
    **_FEED_FORWARD,
    "experts": experts(
        "feed_forward",
        NAMES,
        "intermediate_size",
        Router(name="router", is_linear=True, scores="sigmoid", rounded=True),
        shared=SharedExpert(**gated("feed_forward.shared_expert", *NAMES, "intermediate_size")),
        dense_layers_key="mlp_only_layers",
        stacks=("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
        stacks_transposed=True,
        stacks_only=True,
        scaled_inputs=True,
    ),
    "norms": norms_before("feed_forward"),
    "rope": "no_rope_layers",
    "interleaved_rope": True,
    "fixed": {"num_experts_per_tok": 1},
}
