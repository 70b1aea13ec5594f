"""Values of the row of DeepSeek-V4 in families.py.

Names are those of published files. Attention has one head of keys, which are also the values. The
compressors, the indexer, the grouped output projection (wo_a) and the hyper-connections stay in
float.
"""

from typing import Any

from formats.architecture.columns import Norm
from formats.architecture.experts import Router, SharedExpert
from formats.architecture.projection import Projection, Shape
from formats.architecture.rows.parts import experts, gated

SLIDING, SPARSE, HEAVY = (
    f"{kind}_attention" for kind in ("sliding", "compressed_sparse", "heavily_compressed")
)
LATENTS = Projection(
    name="attn.fused_wqa_wkv",
    members=(("attn.wq_a", "q_lora_rank"), ("attn.wkv", "head_dim")),
    inputs="hidden_size",
)
QUERY_NORM, KEY_NORM = "attn.q_norm", "attn.kv_norm"
GROUPED_O = "attn.wo_a"
COMPRESSOR, INDEXER = "attn.compressor", "attn.indexer"
INDEX_COMPRESSOR = f"{INDEXER}.compressor"
_C = ("hidden_size",)


def _compressor(module: str, rate: str, head: str, outputs: str) -> dict[str, Shape]:
    """Return the tensors of a compressor with entries of the size `head`."""
    return {
        f"{module}.wkv.weight": ((outputs,), _C),
        f"{module}.wgate.weight": ((outputs,), _C),
        f"{module}.ape": ((rate,), (outputs,)),
        f"{module}.norm.weight": ((head,),),
    }


_OF_SPARSE: dict[str, Shape] = {
    **_compressor(COMPRESSOR, "compress_rate_csa", "head_dim", "two_heads"),
    **_compressor(INDEX_COMPRESSOR, "compress_rate_csa", "index_head_dim", "two_index_heads"),
    f"{INDEXER}.wq_b.weight": (("index_q",), ("q_lora_rank",)),
    f"{INDEXER}.weights_proj.weight": (("index_n_heads",), _C),
}
_OF_HEAVY = _compressor(COMPRESSOR, "compress_rate_hca", "head_dim", "head_dim")
_HYPER: dict[str, tuple[str, Shape]] = {
    f"hc_{block}_{leaf}": (f"hc_{block}_{leaf}", shape)
    for block in ("attn", "ffn")
    for leaf, shape in (
        ("fn", (("hc_mixes",), ("hc_width",))),
        ("base", (("hc_mixes",),)),
        ("scale", (("hc_scales",),)),
    )
}
_NAMES = ("w1", "w3", "w2")
# The order matters: later names are below renamed modules.
_IN_TRANSFORMERS = {
    **{"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    **{name: f"{name[3:].rpartition('_')[0]}_hc.{name.rpartition('_')[2]}" for name in _HYPER},
    "attn": "self_attn",
    INDEXER: f"{COMPRESSOR}.indexer",
    f"{INDEXER}.wq_b": f"{INDEXER}.q_b_proj",
    f"{INDEXER}.weights_proj": f"{INDEXER}.scorer.weights_proj",
    **{
        f"{INDEX_COMPRESSOR}.{own}": f"{INDEXER}.{theirs}"
        for own, theirs in (
            *(("wkv.weight", "kv_proj.weight"), ("wgate.weight", "gate_proj.weight")),
            *(("ape", "position_bias"), ("norm.weight", "kv_norm.weight")),
        )
    },
    f"{COMPRESSOR}.wkv": f"{COMPRESSOR}.kv_proj",
    f"{COMPRESSOR}.wgate": f"{COMPRESSOR}.gate_proj",
    f"{COMPRESSOR}.ape": f"{COMPRESSOR}.position_bias",
    f"{COMPRESSOR}.norm": f"{COMPRESSOR}.kv_norm",
    "attn.wq_a": "attn.q_a_proj",
    "attn.wq_b": "attn.q_b_proj",
    "attn.wkv": "attn.kv_proj",
    "attn.wo_a": "attn.o_a_proj",
    "attn.wo_b": "attn.o_b_proj",
    QUERY_NORM: "attn.q_a_norm",
    "attn.attn_sink": "attn.sinks",
    "ffn.gate.bias": "ffn.gate.e_score_correction_bias",
    "ffn.shared_experts.w1": "ffn.shared_experts.gate_proj",
    "ffn.shared_experts.w2": "ffn.shared_experts.down_proj",
    "ffn.shared_experts.w3": "ffn.shared_experts.up_proj",
}
_LEAF = ".weight"
DEEPSEEK_V4: dict[str, Any] = {
    "builder": "latent.deepseek_v4",
    "qkv": LATENTS,
    # every rank computes attention of all heads
    "query_up": Projection(
        name="attn.wq_b", members=(("attn.wq_b", "all_q"),), inputs="q_lora_rank"
    ),
    "o": Projection(name="attn.wo_b", members=(("attn.wo_b", "hidden_size"),), inputs="o_latents"),
    "experts": experts(
        "ffn",
        _NAMES,
        "moe_intermediate_size",
        Router(
            scores="sqrtsoftplus",
            normalized=True,
            correction="gate.bias",
            table="gate.tid2eid",
            factor_key="routed_scaling_factor",
        ),
        shared=SharedExpert(**gated("ffn.shared_experts", *_NAMES, "moe_intermediate_size")),
        limits_key="swiglu_limits",
        limits_gates=True,
    ),
    # other linears than qkv read the first norm, too
    "norms": (
        Norm(name="attn_norm"),
        Norm(name="ffn_norm", feeds="ffn"),
        Norm(name=QUERY_NORM, size="q_lora_rank"),
        Norm(name=KEY_NORM, size="head_dim"),
    ),
    "float32_norms": True,
    "float16": False,
    "activation_tensors": {
        **_HYPER,
        "sinks": ("attn.attn_sink", (("all_heads",),)),
        "wo_a": (f"{GROUPED_O}{_LEAF}", (("o_latents",), ("q_of_group",))),
    },
    "kind_tensors": {SPARSE: _OF_SPARSE, HEAVY: _OF_HEAVY},
    "merge_tensors": {
        "fn": ("hc_head_fn", (("hc_mult",), ("hc_width",))),
        "base": ("hc_head_base", (("hc_mult",),)),
        "scale": ("hc_head_scale", (("one",),)),
    },
    "float_linears": (
        GROUPED_O,
        *(name.removesuffix(_LEAF) for name in _OF_SPARSE if name.endswith(f"_b{_LEAF}")),
        *(
            name.removesuffix(_LEAF)
            for name in _OF_SPARSE
            if name.endswith(("wkv.weight", "wgate.weight", "weights_proj.weight"))
        ),
    ),
    "interleaved_rope": True,
    "rope_keys": {SLIDING: "main", SPARSE: "compress", HEAVY: "compress"},
    "inner_key": "moe_intermediate_size",
    "limits_key": "swiglu_limits",
    "names_in_transformers": _IN_TRANSFORMERS,
    "fixed": {
        **{"attention_bias": False, "mlp_bias": False, "norm_topk_prob": True},
        **{"scoring_func": "sqrtsoftplus", "n_shared_experts": 1, "num_key_value_heads": 1},
    },
    "draft_prefix": "mtp.",
    "layer": "layers.{i}",
    "embedding": "embed.weight",
    "last_norm": "norm.weight",
    "head": "head.weight",
}
