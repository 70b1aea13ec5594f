"""Values of the row of dots3-note: latent attention in two geometries.

Layers with an indexer attend to the keys that it selects from the whole context. The other layers
have a window, other numbers of heads and other widths of latents ("local"). Their queries and
latents are multiplied by the root of hidden_size / rank after their norms.
"""

from dataclasses import replace
from typing import Any

from formats.architecture.columns import Norm
from formats.architecture.experts import SharedExpert
from formats.architecture.projection import Projection
from formats.architecture.rows.latent_parts import (
    GLM_LITE,
    INDEXER,
    KEYS_VALUES,
    LATENTS,
    QUERIES,
)
from formats.architecture.rows.parts import NAMES, O_PROJ, gated, norms_before

INDEXED = "indexed_attention"
KEY_NORM = "self_attn.k_rope_only_layernorm"  # of the rotated key that all heads share
_GATES = "self_attn.g_proj"


def _kind(kind: str, widths: str) -> dict[str, Any]:
    """Return the fields of one kind of layers. `widths`: prefix of the names of its widths."""
    (q_a, _), (kv_a, _) = LATENTS.members
    (q_b, _), (kv_b, _) = QUERIES.members[0], KEYS_VALUES.members[0]
    queries, latents = f"{widths}q_lora_rank", f"{widths}kv_lora_rank"
    first, second = norms_before("mlp")
    return {
        "qkv": replace(LATENTS, members=((q_a, queries), (kv_a, f"{kind}_latent"))),
        "latent": (
            replace(QUERIES, members=((q_b, f"{kind}_latent_q"),), inputs=queries),
            replace(KEYS_VALUES, members=((kv_b, f"{kind}_latent_kv"),), inputs=latents),
        ),
        "o": replace(O_PROJ, inputs=f"{kind}_o"),
        "head_gates": Projection(
            name=_GATES,
            members=((_GATES, f"num_{kind}_attention_heads"),),
            inputs="hidden_size",
            float_because="one output per head, which gates it",
        ),
        "norms": (
            replace(first, feeds=LATENTS.name),
            second,
            Norm(name="self_attn.q_a_layernorm", size=queries, feeds=q_b),
            Norm(name="self_attn.kv_a_layernorm", size=latents, feeds=kv_b),
            Norm(name=KEY_NORM, size="qk_rope_head_dim"),
        ),
    }


DOTS_3: dict[str, Any] = {
    **GLM_LITE,
    **_kind("local", "local_"),
    "builder": "latent.dots3",
    "full_layers": _kind("global", ""),
    "full_type": INDEXED,
    "window": "layer_types",
    "indexer": replace(
        INDEXER, kinds_key="layer_types", kind=INDEXED, shared=False, interleaved=True
    ),
    "float_linears": tuple(each.name for each in (INDEXER.queries, INDEXER.keys, INDEXER.weights)),
    "experts": replace(
        GLM_LITE["experts"],
        shared=SharedExpert(
            **gated("mlp.shared_experts", *NAMES, "shared_expert_intermediate_size")
        ),
    ),
    "gate_activation": "sigmoid",
    "interleaved_rope": True,
    "draft_layers_key": "",
    "unread_layers_key": "num_nextn_predict_layers",  # an MTP layer, and its embedding
    "draft_prefix": "model.mtp.",
    "variants": (),
    "fixed": {
        **{"attention_bias": False, "mlp_bias": False, "moe_layer_freq": 1},
        **{"scoring_func": ("sigmoid", "noaux_tc"), "topk_method": "noaux_tc"},
        **{"use_dsa": True, "use_sliding_window": True, "indexer_rope_interleave": True},
        **{"apply_mla_qkv_lora_rescale": True, "k_rope_only_layernorm": True},
        **{"attention_gate_type": "headwise", "swa_attention_gate_type": "headwise"},
    },
}
