"""Values of the rows of Ling 2.6 and of Ring-linear in families.py: lightning attention, experts.

The other layers have latent attention (Ling and Ring 2.5 and 2.6), or the attention of Ling 2
(Ring-linear).
"""

from dataclasses import replace
from typing import Any

from formats.architecture.projection import Projection
from formats.architecture.rows.latent_parts import LATENT, below
from formats.architecture.rows.own_code import BAILING_2
from formats.architecture.states.mixer import StateMixer, StateTensor

_MODULE = "attention"
_DENSE = f"{_MODULE}.dense"
_HEAD_NORMS = ("query_layernorm", "key_layernorm")
LIGHTNING_OF_LING = StateMixer(
    kind="lightning attention",
    module=_MODULE,
    # queries, keys and values of all heads; then the gates of the output
    inputs=Projection(
        name=f"{_MODULE}.qkv_g_proj",
        members=((f"{_MODULE}.query_key_value", "kda_qkv"), (f"{_MODULE}.g_proj", "kda")),
        inputs="hidden_size",
    ),
    out=Projection(name=_DENSE, members=((_DENSE, "hidden_size"),), inputs="kda", split="inputs"),
    others=(
        StateTensor(key="norm", name="g_norm.weight", shape=(("kda",),)),
        *(
            StateTensor(
                key=f"{name[0]}_norm",
                name=f"{name}.weight",
                shape=(("linear_head_dim",),),
                present="use_qk_norm",
                of_heads=False,
            )
            for name in _HEAD_NORMS
        ),
    ),
)
_FIXED = {
    **dict.fromkeys(("use_bias", "use_qkv_bias", "norm_head", "use_sliding_window"), False),
    "score_function": ("sigmoid", None),
    "moe_router_enable_expert_bias": True,
}
RING_LINEAR: dict[str, Any] = {
    **BAILING_2,
    "builder": "hybrid.ling",
    "state_mixer": LIGHTNING_OF_LING,
    "norms": tuple(
        replace(norm, layers="attention") if norm.size == "head_dim" else norm
        for norm in BAILING_2["norms"]
    ),
    "normalized_head": "",
    "fixed": _FIXED,
}
_LATENT = below(_MODULE, LATENT)
LING_2_6: dict[str, Any] = {
    **_LATENT,
    "builder": "hybrid.ling",
    "defaults_of": "deepseek_v3",
    "o": replace(_LATENT["o"], name=_DENSE, members=((_DENSE, "hidden_size"),)),
    "other_names": {"o_proj": "dense"},
    "state_mixer": LIGHTNING_OF_LING,
    "experts": BAILING_2["experts"],
    "embedding": BAILING_2["embedding"],
    "draft_layers_key": "",
    "unread_layers_key": "num_nextn_predict_layers",
    "fixed": _FIXED,
}
