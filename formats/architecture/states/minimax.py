"""Values of the row of MiniMax-Text-01 and M1 in families.py: lightning attention and experts."""

from typing import Any

from formats.architecture.experts import Router
from formats.architecture.projection import Projection
from formats.architecture.rows.parts import experts, norms_before
from formats.architecture.states.mixer import StateMixer, StateTensor

LIGHTNING = StateMixer(
    kind="lightning attention",
    module="self_attn",
    # for each head its queries, keys and values; then the gates of the output
    inputs=Projection(
        name="self_attn.qkv_gate_proj",
        members=(("self_attn.qkv_proj", "lightning_qkv"), ("self_attn.output_gate", "q")),
        inputs="hidden_size",
    ),
    out=Projection(
        name="self_attn.out_proj",
        members=(("self_attn.out_proj", "hidden_size"),),
        inputs="q",
        split="inputs",
    ),
    others=(StateTensor(key="norm", name="norm.weight", shape=(("q",),)),),
)
_FACTORS = {
    f"{usual}_{letter}_factor": f"layernorm_{own}_{letter}"
    for usual, own in (
        ("full_attn", "full_attention"),
        ("linear_attn", "linear_attention"),
        ("mlp", "mlp"),
    )
    for letter in ("alpha", "beta")
}
MINIMAX: dict[str, Any] = {
    "builder": "hybrid.minimax",
    "state_mixer": LIGHTNING,
    "experts": experts(
        "block_sparse_moe", ("w1", "w3", "w2"), "intermediate_size", Router(normalized=True)
    ),
    "norms": norms_before("block_sparse_moe"),
    # tables that transformers stores
    "masks": tuple(
        f"self_attn.{name}" for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
    ),
    "config_keys": _FACTORS,  # keys of files that bring their own code
    "fixed": {"sliding_window": None, "postnorm": True, "shared_intermediate_size": 0},
}
