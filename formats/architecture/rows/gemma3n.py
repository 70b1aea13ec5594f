"""Values of the row of Gemma 3n in families.py."""

from dataclasses import replace
from typing import Any

from formats.architecture.columns import Norm
from formats.architecture.rows.gemma4 import GEMMA_4, LAYER_INPUTS
from formats.architecture.rows.parts import GEMMA_NORMS, HEAD_NORMS, O_PROJ, QKV

_N, _C, _R = ("altup_num_inputs",), ("hidden_size",), ("laurel_rank",)
# tensors of AltUp and LAuReL (qserve/model/blocks/gemma/altup.py), which are never quantized
_LEARNED = {
    "altup.correct_output_scale": (_C,),
    "altup.correction_coefs.weight": (_N, _N),
    "altup.prediction_coefs.weight": (("altup_squared",), _N),
    "altup.modality_router.weight": (_N, _C),
    "laurel.linear_left.weight": (_R, _C),
    "laurel.linear_right.weight": (_C, _R),
}
_LINEARS = tuple(name.removesuffix(".weight") for name in _LEARNED if name.endswith(".weight"))
_NORMS = (
    # attention is not the only block that reads this norm
    *(replace(norm, feeds="") if norm is GEMMA_NORMS[0] else norm for norm in GEMMA_NORMS),
    Norm(name=LAYER_INPUTS.norm),
    Norm(name="altup.router_norm"),
    Norm(name="laurel.post_laurel_norm"),
    *HEAD_NORMS,
)
GEMMA_3N: dict[str, Any] = {
    **{
        name: value
        for name, value in GEMMA_4.items()
        if name not in ("layer_scalar", "keys_are_values", "wide_shared", "config_keys", "variants")
    },
    "norms": _NORMS,
    # full layers differ only in their RoPE parameters
    "full_layers": {
        "qkv": replace(QKV, bias="attention_bias"),
        "o": replace(O_PROJ, bias="attention_bias"),
    },
    "layer_inputs": LAYER_INPUTS,
    "activation_tensors": {
        name.removesuffix(".weight").rpartition(".")[2]: (name, shape)
        for name, shape in _LEARNED.items()
    },
    "float_linears": _LINEARS,
    "streams": ("model.altup_projections", "model.altup_unembed_projections"),
    "fixed": {
        **{"altup_num_inputs": 4, "altup_active_idx": 0, "altup_correct_scale": True},
        "use_bidirectional_attention": None,
    },
}
