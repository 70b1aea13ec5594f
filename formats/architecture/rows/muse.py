"""Values of the row of Muse Glimmer in families.py, a text model of a vision-language model.

Queries and keys are normed without weights, as are embeddings. Norms after branches have their own
epsilon, `post_norm_eps`.
"""

from dataclasses import replace
from typing import Any

from formats.architecture.columns import Norm
from formats.architecture.rows.parts import BEFORE_ATTENTION, GATE_UP, O_PROJ, QKV

_BIAS = "attention_bias"
_Q, *_KV = QKV.members
_NORMS = (
    BEFORE_ATTENTION,
    Norm(name="post_attention_layernorm"),
    Norm(name="pre_feedforward_layernorm", feeds=GATE_UP.name),
    Norm(name="post_feedforward_layernorm"),
)
MUSE_GLIMMER: dict[str, Any] = {
    "builder": "afmoe",
    "qkv": replace(QKV, members=(_Q, ("self_attn.gate_proj", "q"), *_KV)),
    "o": O_PROJ,
    "gated_attention": True,
    "norms": tuple(replace(norm, offset=1.0) for norm in _NORMS),
    "float32_norms": True,
    "plain_embedding_norm": True,
    "activation_key": "hidden_activation",
    "window": "layer_types",
    "theta_key": "layer_rope_theta",
    "logits_factor_key": "output_multiplier",
    "logits_cap_key": "final_logit_softcapping",
    "class_in_transformers": "MuseGlimmerTextModel",
    "fixed": {_BIAS: False},
}
