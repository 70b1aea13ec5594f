"""Values of the row of Ling 3 in families.py: Kimi Delta Attention, and gated latent attention.

Decays and gates have one matrix each (`f_proj`, `g_proj`), and the logarithm of decays has a bound.
"""

from dataclasses import replace
from typing import Any

from formats.architecture.experts import SharedExpert
from formats.architecture.projection import Projection
from formats.architecture.rows.latent_parts import LATENT, below
from formats.architecture.rows.parts import GROUPED_ROUTER, NAMES, experts, gated
from formats.architecture.states.kimi import KIMI_DELTA, KIMI_LINEAR

_MODULE = "attention"
_O = f"{_MODULE}.dense"
_LATENT = below(_MODULE, LATENT)
_SIZES = {**dict.fromkeys(("q", "k", "v", "f", "g"), "kda"), "b": "linear_num_heads"}


def _reading(name: str, *letters: str, **different: Any) -> Projection:
    """Return a projection of the mixer's input, with these members."""
    members = tuple((f"{_MODULE}.{x}_proj", _SIZES[x]) for x in letters)
    return Projection(name=f"{_MODULE}.{name}", members=members, inputs="hidden_size", **different)


_DELTA = replace(
    KIMI_DELTA,
    module=_MODULE,
    inputs=_reading("kda_qkvg_proj", "q", "k", "v", "g"),
    gates=_reading(
        "kda_fb_proj", "f", "b", float_because="controls what each token writes and forgets"
    ),
    gate_linears=(),
    out=replace(KIMI_DELTA.out, name=_O, members=((_O, "hidden_size"),)),
    others=tuple(
        replace(each, shape=(("linear_num_heads",),), axis=0) if each.key == "a_log" else each
        for each in KIMI_DELTA.others
        if each.key not in ("f_a", "f_b", "g_a", "g_b", "b")
    ),
)
_GATES = f"{_MODULE}.g_proj"
LING_3: dict[str, Any] = {
    **_LATENT,
    "builder": "hybrid.kimi_linear",
    "o": replace(_LATENT["o"], name=_O, members=((_O, "hidden_size"),)),
    "head_gates": Projection(
        name=_GATES,
        members=((_GATES, "num_attention_heads"),),
        inputs="hidden_size",
        float_because="one output per head, which gates it",
    ),
    "gate_activation": "sigmoid",
    "state_mixer": _DELTA,
    "experts": experts(
        "mlp",
        NAMES,
        "moe_intermediate_size",
        replace(GROUPED_ROUTER, correction="gate.expert_bias"),
        shared=SharedExpert(**gated("mlp.shared_experts", *NAMES, "shared_experts")),
        types_key="mlp_layer_types",
        limits_key="expert_swiglu_limit_list",
    ),
    "limits_key": "share_expert_swiglu_limit_list",
    "names_in_transformers": {
        _MODULE: "self_attn",
        _O: f"{_MODULE}.o_proj",
        f"{_MODULE}.f_proj": f"{_MODULE}.forget_gate.f_proj",
        **{f"{_MODULE}.{x}": f"{_MODULE}.forget_gate.{x}" for x in ("A_log", "dt_bias")},
        "mlp.gate.expert_bias": "mlp.gate.e_score_correction_bias",
    },
    "joined_in_transformers": {
        f"{_MODULE}.conv1d.weight": tuple(f"{_MODULE}.{x}_conv1d.weight" for x in "qkv"),
    },
    "other_names": {"o_proj": "dense"},
    "embedding": "model.word_embeddings.weight",
    "draft_layers_key": "",
    "unread_layers_key": "num_nextn_predict_layers",
    "config_keys": KIMI_LINEAR["config_keys"],
    "fixed": {
        **dict.fromkeys(("attention_bias", "use_bias", "use_qkv_bias", "use_kda_lora"), False),
        **dict.fromkeys(("use_mla_nope", "use_nGPT", "value_norm", "up_proj_norm"), False),
        **{"scale_router_input": False, "no_kda_lora": True, "score_function": ("sigmoid", None)},
        "moe_router_enable_expert_bias": True,
        "gated_attention_proj_granularity_type": ("head_wise", None),
    },
}
