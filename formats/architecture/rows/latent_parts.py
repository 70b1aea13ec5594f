"""Values of the rows of families with multi-head latent attention (MLA) in families.py.

The first projection computes a latent and one rotated key, shared by all heads, for each token;
both are cached. `kv_b_proj` computes the keys and values of all heads from a latent: for each head,
first the rows of its key (W_UK), then the rows of its value (W_UV). Queries come from `q_proj`, or
from a separate latent (`q_a_proj`, `q_b_proj`) if config.json states a q_lora_rank.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from formats.architecture.columns import ATTENTION, Indexer, Norm
from formats.architecture.experts import Router, SharedExpert
from formats.architecture.family import Family
from formats.architecture.flags import Equals, Stated
from formats.architecture.projection import Projection
from formats.architecture.rows.parts import (
    GATE_UP,
    GROUPED_ROUTER,
    MLP_BIAS,
    NAMES,
    O_PROJ,
    experts,
    gated,
    norms_before,
)

_Q, _Q_A, _Q_B, _KV_A, _KV_B = (
    f"self_attn.{name}"
    for name in ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
)
_Q_NORM, _KV_NORM = "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"
LATENTS = Projection(
    name="self_attn.fused_qkv_a_proj",
    members=((_Q_A, "q_lora_rank"), (_KV_A, "latent")),
    inputs="hidden_size",
)
QUERIES = Projection(name=_Q_B, members=((_Q_B, "latent_q"),), inputs="q_lora_rank")
KEYS_VALUES = Projection(name=_KV_B, members=((_KV_B, "latent_kv"),), inputs="kv_lora_rank")
DIRECT = replace(
    LATENTS, name="self_attn.qkv_a_proj", members=((_Q, "latent_q"), (_KV_A, "latent"))
)


def _norms(latents: Projection, feed_forward: str = "mlp") -> tuple[Norm, ...]:
    first, second = norms_before(feed_forward)
    of_values = Norm(name=_KV_NORM, size="kv_lora_rank", feeds=_KV_B)
    of_queries = Norm(name=_Q_NORM, size="q_lora_rank", feeds=_Q_B)
    both = (of_queries, of_values) if latents is LATENTS else (of_values,)
    return (replace(first, feeds=latents.name), second, *both)


LATENT: dict[str, Any] = {
    "builder": "latent.deepseek",
    "qkv": LATENTS,
    "latent": (QUERIES, KEYS_VALUES),
    "o": O_PROJ,
    "norms": _norms(LATENTS),
    "interleaved_rope": Stated("rope_interleave", True),
    "float16": False,
    "draft_layers_key": "num_nextn_predict_layers",
    "variants": (
        (
            Equals("q_lora_rank", None),
            {"qkv": DIRECT, "latent": (KEYS_VALUES,), "norms": _norms(DIRECT)},
        ),
    ),
}


def below(module: str, values: Any) -> Any:
    """Return values of a row, whose attention is below another module than `self_attn`."""
    if isinstance(values, Mapping):
        return {key: below(module, value) for key, value in values.items()}
    if type(values) is tuple:  # flags of variants are named tuples
        return tuple(below(module, value) for value in values)
    if isinstance(values, Projection):
        members = tuple((_moved(module, name), size) for name, size in values.members)
        return replace(values, name=_moved(module, values.name), members=members)
    if isinstance(values, Norm):
        layers = "attention" if values.of_attention else values.layers
        name, feeds = _moved(module, values.name), _moved(module, values.feeds)
        return replace(values, name=name, feeds=feeds, layers=layers)
    return values


def _moved(module: str, name: str) -> str:
    own = f"{ATTENTION}."
    return f"{module}.{name.removeprefix(own)}" if name.startswith(own) else name


def queries_of(family: Family) -> Projection | None:
    """Return the projection from query latents to queries; None: queries have no latents."""
    return family.latent[0] if len(family.latent) == 2 else None


def norm_of(family: Family, latents: str) -> str:
    """Return the name of the norm of latents with this size."""
    return next(norm.name for norm in family.norms if norm.size == latents)


_SHARED = SharedExpert(**gated("mlp.shared_experts", *NAMES, "shared_experts"))
# Biases of latents, and experts only in every n-th layer: no published model has them.
_FIXED: dict[str, Any] = {"attention_bias": False, "mlp_bias": False, "moe_layer_freq": 1}
_BY_BIAS = replace(GROUPED_ROUTER, normalized=Stated("norm_topk_prob", True))
DEEPSEEK_V2: dict[str, Any] = {
    **LATENT,
    "experts": experts(
        "mlp",
        NAMES,
        "moe_intermediate_size",
        Router(
            float32=True,
            group_score="max",
            grouped=Equals("topk_method", "group_limited_greedy"),
            factor_key="routed_scaling_factor",
        ),
        shared=_SHARED,
        first_dense_key="first_k_dense_replace",
    ),
    "interleaved_rope": True,
    "draft_layers_key": "",  # no published model has such layers
    "fixed": {**_FIXED, "norm_topk_prob": False, "scoring_func": "softmax"},
}
DEEPSEEK_V3: dict[str, Any] = {
    **LATENT,
    "experts": experts(
        "mlp",
        NAMES,
        "moe_intermediate_size",
        _BY_BIAS,
        shared=_SHARED,
        first_dense_key="first_k_dense_replace",
    ),
    "fixed": {**_FIXED, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
}
SARVAM: dict[str, Any] = {
    **DEEPSEEK_V3,
    "defaults_of": "deepseek_v3",
    "draft_layers_key": "",
    "fixed": {
        **{"attention_bias": False, "mlp_bias": False, "moe_layer_freq": 1},
        **{"score_function": ("sigmoid", None), "moe_router_enable_expert_bias": (True, None)},
    },
    "config_keys": {"n_routed_experts": "num_experts"},
}
GLM_LITE: dict[str, Any] = {
    **LATENT,
    "experts": experts(
        "mlp",
        NAMES,
        "moe_intermediate_size",
        _BY_BIAS,
        shared=_SHARED,
        types_key="mlp_layer_types",
    ),
    "fixed": {**_FIXED, "topk_method": "noaux_tc"},
}
AFTER_EXPERTS = "post_mlp_layernorm"
AXK_1: dict[str, Any] = {
    **GLM_LITE,
    "norms": (*GLM_LITE["norms"], Norm(name=AFTER_EXPERTS, layers="experts")),
    "names_in_transformers": {AFTER_EXPERTS: f"mlp.{AFTER_EXPERTS}"},
    "draft_layers_key": "",
    "fixed": {**_FIXED, "scoring_func": "sigmoid", "topk_method": ("noaux_tc", None)},
}
_INDEXER = "self_attn.indexer"


def _of_indexer(name: str, outputs: str, inputs: str) -> Projection:
    name = f"{_INDEXER}.{name}"
    return Projection(name=name, members=((name, outputs),), inputs=inputs)


INDEXER = Indexer(
    module=_INDEXER,
    queries=_of_indexer("wq_b", "index_q", "q_lora_rank"),
    keys=_of_indexer("wk", "index_head_dim", "hidden_size"),
    weights=_of_indexer("weights_proj", "index_n_heads", "hidden_size"),
    norm=f"{_INDEXER}.k_norm",
    count_key="index_topk",
)
_FLOAT = tuple(each.name for each in (INDEXER.queries, INDEXER.keys, INDEXER.weights))
DEEPSEEK_V32: dict[str, Any] = {
    **GLM_LITE,
    "fixed": DEEPSEEK_V3["fixed"],
    "indexer": INDEXER,
    "float_linears": _FLOAT,
}
GLM_5: dict[str, Any] = {
    **GLM_LITE,
    "fixed": {**GLM_LITE["fixed"], "indexer_rope_interleave": True},
    "indexer": replace(INDEXER, kinds_key="indexer_types", interleaved=True),
    "float_linears": _FLOAT,
}
MISTRAL_4: dict[str, Any] = {
    **LATENT,
    "experts": experts(
        "mlp",
        NAMES,
        "moe_intermediate_size",
        Router(
            normalized=Stated("norm_topk_prob", True),
            group_score="top2",
            factor_key="routed_scaling_factor",
        ),
        shared=_SHARED,
        first_dense_key="first_k_dense_replace",
        stacks_only=True,
    ),
    "draft_layers_key": "",
    "fixed": {"attention_bias": False},
}
YOUTU: dict[str, Any] = {
    **LATENT,
    "norms": _norms(LATENTS, GATE_UP.name),
    "variants": (
        (
            Equals("q_lora_rank", None),
            {
                "qkv": DIRECT,
                "latent": (KEYS_VALUES,),
                "norms": _norms(DIRECT, GATE_UP.name),
            },
        ),
    ),
    "draft_layers_key": "",
    "fixed": {"attention_bias": False},
    "tied": True,
}
MINICPM_3: dict[str, Any] = {
    **YOUTU,
    **MLP_BIAS,
    "interleaved_rope": False,
    "embedding_factor_key": "scale_emb",
    "logits_divisor_key": "logits_divisor",  # stored_form/ derives it
}
