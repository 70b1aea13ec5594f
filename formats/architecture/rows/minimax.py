"""Values of the rows of MiniMax-M2 and MiniMax-M3."""

from dataclasses import replace
from typing import Any

from formats.architecture.columns import BlockIndexer
from formats.architecture.experts import Router, SharedExpert
from formats.architecture.projection import Projection
from formats.architecture.rows.parts import (
    HEAD_NORMS,
    NAMES,
    WHOLE_NORMS,
    experts,
    gated,
    norms_before,
)

_MODULE = "block_sparse_moe"
_ROUTER = Router(
    scores="sigmoid",
    normalized=True,
    float32=True,
    correction="e_score_correction_bias",
)
MINIMAX_M2: dict[str, Any] = {
    "experts": experts(_MODULE, ("w1", "w3", "w2"), "intermediate_size", _ROUTER),
    "norms": (*norms_before(_MODULE), *WHOLE_NORMS),
    "fixed": {"scoring_func": "sigmoid", "use_qk_norm": True, "shared_intermediate_size": 0},
}


def _of_indexer(name: str, outputs: str) -> Projection:
    name = f"self_attn.index_{name}_proj"
    return Projection(name=name, members=((name, outputs),), inputs="hidden_size")


_INDEXER = BlockIndexer(
    queries=_of_indexer("q", "block_index_q"),
    keys=_of_indexer("k", "index_head_dim"),
    query_norm="self_attn.index_q_norm",
    key_norm="self_attn.index_k_norm",
    layer_type="minimax_m3_sparse",
)
_SPARSE = "sparse_attention_config"
MINIMAX_M3: dict[str, Any] = {
    "experts": experts(
        _MODULE,
        ("w1", "w3", "w2"),
        "moe_intermediate_size",
        replace(_ROUTER, factor_key="routed_scaling_factor"),
        shared=SharedExpert(
            **gated(f"{_MODULE}.shared_experts", *NAMES, "shared_intermediate_size")
        ),
        clamped=True,
        types_key="mlp_layer_types",
    ),
    "block_indexer": _INDEXER,
    "float_linears": _INDEXER.linears,
    "names_in_transformers": {
        f"{_MODULE}.e_score_correction_bias": f"{_MODULE}.gate.e_score_correction_bias",
        **{
            f"self_attn.index_{name}_{kind}": f"self_attn.indexer.{name}_{kind}"
            for name in "qk"
            for kind in ("proj", "norm")
        },
    },
    "norms": (*norms_before(_MODULE), *HEAD_NORMS),
    "norm_offset": 1.0,
    "float32_norms": True,
    "activation_key": "",  # published files state "swigluoai", transformers' files "silu"
    "inner_key": "dense_intermediate_size",
    # the experts have intermediate_size, layers without experts dense_intermediate_size
    "config_keys": {"moe_intermediate_size": "intermediate_size"},
    "draft_prefix": "model.mtp.",
    "fixed": {
        **{"scoring_func": "sigmoid", "use_routing_bias": True, "n_shared_experts": 1},
        **{"use_qk_norm": True, "qk_norm_type": "per_head", "use_gemma_norm": True},
        **{"attention_output_gate": False, "swiglu_beta": 1.0},
        f"{_SPARSE}.use_sparse_attention": True,
        f"{_SPARSE}.sparse_score_type": "max",
        f"{_SPARSE}.sparse_init_block": 0,
    },
}
