"""Convert params.json to the config.json of transformers' class for the same layers.

Keys of params.json that are read:

    dim, n_layers, hidden_dim, n_heads, n_kv_heads, head_dim, norm_eps, vocab_size,
    tied_embeddings, max_position_embeddings or max_seq_len, rope_theta, sliding_window (a number,
    or one of each layer of a pattern), yarn (Peng et al. 2023; `beta` and `alpha` are the fast and
    slow rotations), llama_4_scaling, moe, q_lora_rank and other sizes of latent attention,
    vision_encoder.
"""

from collections.abc import Mapping
from typing import Any

from formats.architecture.family import MAX_LAYERS
from formats.architecture.sizes import is_size
from formats.errors import CheckpointError

PARAMS = "params.json"
REMEDY = "copy params.json from the published model"
DENSE, WITH_WINDOWS, SCALED = "MistralForCausalLM", "MinistralForCausalLM", "Ministral3ForCausalLM"
MIXTURE, LATENT = "MixtralForCausalLM", "Mistral4ForCausalLM"
MERGED, PROJECTED = "Mistral3ForConditionalGeneration", "LlavaForConditionalGeneration"
MODEL_TYPES = {
    DENSE: "mistral",
    WITH_WINDOWS: "ministral",
    SCALED: "ministral3",
    MIXTURE: "mixtral",
    LATENT: "mistral4",
    MERGED: "mistral3",
    PROJECTED: "llava",
}
MAX_LENGTH = 128_000  # context of files that state none
# key of config.json -> key of params.json
_SIZES = {
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "vocab_size": "vocab_size",
}
_LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# key of config.json -> key of `moe`, and its default
_MIXTURE = {
    "n_routed_experts": ("num_experts", None),
    "num_experts_per_tok": ("num_experts_per_tok", None),
    "moe_intermediate_size": ("expert_hidden_dim", None),
    "n_shared_experts": ("num_shared_experts", None),
    "first_k_dense_replace": ("first_k_dense_replace", 0),
    "n_group": ("num_expert_groups", 1),
    "topk_group": ("num_expert_groups_per_tok", 1),
    "routed_scaling_factor": ("routed_scale", 1.0),
}
# key of vision_config -> key of vision_encoder
_TOWER = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_TOWER += ("image_size", "patch_size")
MERGE = "patch_merge"  # mm_projector_id of towers whose neighboring patches are merged
# Keys of models that are not supported, unless they are false: words in the error.
_UNSUPPORTED = {
    "multimodal": "speech or an older form of images",
    "use_biases": "biases",
    "lerope": "rotary embeddings with learned frequencies",
}


def config_of(params: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return config.json of a model without a quantization block. Raises CheckpointError.

    `dtype`: name of the dtype of its floats.
    """
    text = _text_config(params)
    text["dtype"] = dtype
    encoder = params.get("vision_encoder")
    if not encoder:
        return text
    if not isinstance(encoder, dict):
        raise _wrong("vision_encoder", "an object", encoder)
    merges = is_merged(params)
    text["tie_word_embeddings"] = bool(params.get("tied_embeddings"))
    whole = {
        "architectures": [MERGED if merges else PROJECTED],
        "model_type": MODEL_TYPES[MERGED if merges else PROJECTED],
        "dtype": dtype,
        "text_config": text,
        "vision_config": _vision_config(encoder),
        "image_token_index": encoder.get("image_token_id", 10),
        "multimodal_projector_bias": bool(encoder.get("adapter_bias", False)),
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "tie_word_embeddings": text["tie_word_embeddings"],
    }
    if merges:
        return {**whole, "spatial_merge_size": _size(encoder, "spatial_merge_size")}
    return {**whole, "vision_feature_select_strategy": "full", "image_seq_length": 1}


def is_merged(params: Mapping[str, Any]) -> bool:
    """Return True if neighboring patches of an image become one embedding."""
    encoder = params.get("vision_encoder")
    return isinstance(encoder, dict) and encoder.get("mm_projector_id") == MERGE


def architecture_of_text(params: Mapping[str, Any]) -> str:
    """Return transformers' class for the text model. Raises CheckpointError."""
    moe = params.get("moe")
    if params.get("kv_lora_rank"):
        if not isinstance(moe, dict) or not moe.get("num_shared_experts"):
            raise CheckpointError(
                f"{PARAMS} moe",
                "models with latent attention are supported only with experts, of which some are"
                " shared",
                "use a Hugging Face checkpoint of the model",
            )
        return LATENT
    if moe:
        return MIXTURE
    if params.get("yarn"):
        return SCALED
    return WITH_WINDOWS if isinstance(params.get("sliding_window"), list) else DENSE


def _text_config(params: Mapping[str, Any]) -> dict[str, Any]:
    kind = params.get("model_type", "transformer")
    if kind != "transformer":
        raise _wrong("model_type", "transformer", kind, "use the model's Hugging Face files")
    for key, words in _UNSUPPORTED.items():
        if params.get(key):
            problem = f"models with {words} are not supported in this format"
            raise CheckpointError(f"{PARAMS} {key}", problem, "use the model's Hugging Face files")
    if params.get("activation", "silu") != "silu":
        raise _wrong("activation", "silu", params["activation"])
    architecture = architecture_of_text(params)
    found: dict[str, Any] = {key: _size(params, own) for key, own in _SIZES.items()}
    heads = found["num_attention_heads"]
    found |= {
        "architectures": [architecture],
        "model_type": MODEL_TYPES[architecture],
        "hidden_act": "silu",
        "num_key_value_heads": _size(params, "n_kv_heads", heads),
        "rms_norm_eps": _number(params, "norm_eps"),
        "tie_word_embeddings": bool(params.get("tied_embeddings", False)),
        "max_position_embeddings": _length(params),
        "attention_bias": False,
        "rope_parameters": _rope_parameters(params),
    }
    if architecture == LATENT:
        return found | _latent(params)
    found["head_dim"] = _size(params, "head_dim", found["hidden_size"] // heads)
    if architecture == MIXTURE:
        found |= _plain_mixture(params)
    return found | _windows(params, found["num_hidden_layers"])


def _latent(params: Mapping[str, Any]) -> dict[str, Any]:
    moe = params["moe"]
    found: dict[str, Any] = {key: _size(params, key) for key in _LATENT_SIZES}
    rank = params.get("q_lora_rank")
    found["q_lora_rank"] = None if rank is None else _size(params, "q_lora_rank")
    for key, (own, default) in _MIXTURE.items():
        value = moe.get(own, default)
        if key == "routed_scaling_factor":
            found[key] = _number(moe, own, 1.0)
        elif type(value) is int and value >= (default is None or default):
            found[key] = value
        else:
            raise _wrong(f"moe.{own}", "a whole number", value)
    every = moe.get("route_every_n", 1)
    if every != 1:
        raise _wrong("moe.route_every_n", "1", every)
    width = found["qk_nope_head_dim"] + found["qk_rope_head_dim"]
    stated = params.get("head_dim", width)
    if stated != width:
        raise _wrong("head_dim", f"qk_nope_head_dim + qk_rope_head_dim, {width}", stated)
    if params.get("sliding_window"):
        raise _wrong("sliding_window", "null in a model with latent attention", "a window")
    return {**found, "norm_topk_prob": True, "rope_interleave": True}


def _plain_mixture(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of experts as in Mixtral: none is shared, and all layers have them."""
    moe = params["moe"]
    if not isinstance(moe, dict):
        raise _wrong("moe", "an object", moe)
    if moe.get("num_shared_experts") or moe.get("first_k_dense_replace"):
        raise CheckpointError(
            f"{PARAMS} moe",
            "shared experts and dense layers are supported only with latent attention",
            "use a Hugging Face checkpoint of the model",
        )
    return {
        "num_local_experts": _size(moe, "num_experts"),
        "num_experts_per_tok": _size(moe, "num_experts_per_tok"),
    }


def _rope_parameters(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return rope_parameters."""
    found: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": _number(params, "rope_theta", 10_000.0),
    }
    if params.get("kv_lora_rank"):
        rotated, plain = (_size(params, f"qk_{part}_head_dim") for part in ("rope", "nope"))
        found["partial_rotary_factor"] = rotated / (rotated + plain)
    yarn, scaling = params.get("yarn"), params.get("llama_4_scaling")
    if not yarn:
        if scaling:
            raise _wrong("llama_4_scaling", "null without yarn", scaling)
        return found
    if not isinstance(yarn, dict):
        raise _wrong("yarn", "an object", yarn)
    length = _size(yarn, "original_max_position_embeddings")
    found |= {
        "rope_type": "yarn",
        "factor": _number(yarn, "factor"),
        "original_max_position_embeddings": length,
        "beta_fast": _number(yarn, "beta"),
        "beta_slow": _number(yarn, "alpha"),
    }
    if not yarn.get("apply_scale", True):
        found["attention_factor"] = 1.0
    elif params.get("kv_lora_rank"):  # the factor applies to the whole of a head's products
        found |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    if scaling:
        if not isinstance(scaling, dict) or scaling.get("original_max_position_embeddings") not in (
            None,
            length,
        ):
            raise _wrong("llama_4_scaling", f"a beta, and the length of yarn, {length}", scaling)
        found["llama_4_scaling_beta"] = _number(scaling, "beta")
    else:
        found["llama_4_scaling_beta"] = 0.0  # transformers' classes require it
    return found


def _length(params: Mapping[str, Any]) -> int:
    stated = params.get("max_position_embeddings") or params.get("max_seq_len")
    if stated is not None:
        if not is_size(stated):
            raise _wrong("max_position_embeddings", "a whole number above 0", stated)
        return stated
    yarn = params.get("yarn")
    if isinstance(yarn, dict):
        return int(_number(yarn, "factor") * _size(yarn, "original_max_position_embeddings"))
    return MAX_LENGTH


def _windows(params: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return the keys of windows; a list is a pattern, repeated over the layers."""
    stated = params.get("sliding_window")
    if isinstance(stated, str) and stated.isdecimal():
        stated = int(stated)
    if not isinstance(stated, list):
        if stated is not None and not is_size(stated):
            raise _wrong("sliding_window", "a whole number above 0, or null", stated)
        return {"sliding_window": stated}
    widths = {each for each in stated if each is not None}
    if not stated or layers % len(stated) or len(widths) > 1 or not all(map(is_size, widths)):
        expected = f"one width and null, in a pattern that divides {layers} layers"
        raise _wrong("sliding_window", expected, stated)
    pattern = [f"{'full' if each is None else 'sliding'}_attention" for each in stated]
    return {
        "sliding_window": next(iter(widths), None),
        "layer_types": pattern * (min(layers, MAX_LAYERS) // len(stated)),
    }


def _vision_config(encoder: Mapping[str, Any]) -> dict[str, Any]:
    heads, hidden = _size(encoder, "num_attention_heads"), _size(encoder, "hidden_size")
    if hidden % heads or encoder.get("head_dim", hidden // heads) != hidden // heads:
        raise _wrong("vision_encoder.head_dim", f"{hidden} / {heads}", encoder.get("head_dim"))
    return {
        **{key: _size(encoder, key) for key in _TOWER},
        "model_type": "pixtral",
        "num_channels": _size(encoder, "num_channels", 3),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "rope_parameters": {
            "rope_type": "axial",
            "rope_theta": _number(encoder, "rope_theta", 10_000.0),
        },
    }


def _size(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a number above 0. Raises CheckpointError."""
    value = values.get(key, default)
    if not is_size(value):
        raise _wrong(key, "a whole number above 0", value)
    return value


def _number(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a number above 0. Raises CheckpointError."""
    value = values.get(key, default)
    if type(value) not in (int, float) or not 0 < value < 1e30:
        raise _wrong(key, "a number above 0", value)
    return float(value)


def _wrong(key: str, expected: str, found: Any, remedy: str = REMEDY) -> CheckpointError:
    return CheckpointError(f"{PARAMS} {key}", f"expected {expected}, found {found!r:.80}", remedy)
