"""Functions of rows: kinds of layers and widths that files state in another way than config.json.

Those of `more_config` read metadata, those of `more_metadata` write them. Needs no torch.
"""

from collections.abc import Mapping
from typing import Any

from formats.errors import CheckpointError

REMEDY = "write another format"
_WIDTH = "moe_intermediate_size"


def dense_layers(config: Mapping[str, Any]) -> int:
    """Return the number of layers without experts, which come first. Raises CheckpointError."""
    kinds = config.get("mlp_layer_types")
    if not isinstance(kinds, list):
        return config.get("first_k_dense_replace", 0)
    count = next((i for i, kind in enumerate(kinds) if kind == "sparse"), len(kinds))
    if "dense" in kinds[count:]:
        raise CheckpointError(
            "config.json mlp_layer_types", "expected dense layers before all others", REMEDY
        )
    return count


def dense_first(metadata: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the kinds of feed-forwards: the first layers have no experts."""
    first, count = metadata.get("leading_dense_block_count") or 0, config["num_hidden_layers"]
    kinds = ["dense" if layer < first else "sparse" for layer in range(count)]
    found = {"mlp_layer_types": kinds, "first_k_dense_replace": first}
    shared, width = metadata.get("expert_shared_feed_forward_length"), config.get(_WIDTH)
    if metadata.get("expert_shared_count") is None and shared and width:
        found["n_shared_experts"] = shared // width
    return found


def mellum_config(metadata: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return experts in all layers, and the rotation of layers with and without a window."""
    theta = config["rope_theta"]
    full = {"rope_type": "default", **config.get("rope_scaling", {}), "rope_theta": theta}
    local = float(metadata.number("rope.freq_base_swa", theta))
    sliding = {"rope_type": "default", "rope_theta": local}
    ropes = {"full_attention": full, "sliding_attention": sliding}
    return {**dense_first(metadata, config), "rope_parameters": ropes}


def mellum_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return no more metadata. Raises CheckpointError for what llama.cpp's Mellum is not."""
    if dense_layers(config):
        raise CheckpointError(
            "config.json mlp_layer_types", "expected experts in all layers", REMEDY
        )
    ropes = config.get("rope_parameters") or {}
    thetas = {each["rope_theta"] for each in ropes.values() if isinstance(each, Mapping)}
    if len(thetas) > 1:
        raise CheckpointError(
            "config.json rope_parameters",
            f"expected one rope_theta in all layers, found {sorted(thetas)}",
            REMEDY,
        )
    return {}


def dense_first_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the number of layers without experts, and the width of shared experts."""
    found = {"leading_dense_block_count": dense_layers(config)}
    return found | _shared_width(config)


def _shared_width(config: Mapping[str, Any]) -> dict[str, int]:
    width, count = config.get(_WIDTH), config.get("n_shared_experts")
    return {"expert_shared_feed_forward_length": width * count} if width and count else {}


def ernie_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the width of ERNIE's shared experts, and the layers with experts."""
    return {
        **_shared_width(config),
        "interleave_moe_layer_step": config.get("moe_layer_interval", 1),
        "leading_dense_block_count": config.get("moe_layer_start_index", 1),
    }


def hunyuan_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the width of Hunyuan's experts, which the shared one has, too."""
    width = config["intermediate_size"]
    return {
        "expert_feed_forward_length": width,
        "expert_shared_feed_forward_length": width,
        "expert_shared_count": 1,
    }


def phimoe_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the epsilon of LayerNorm under the key of RMSNorm's, where llama.cpp reads it."""
    return {"attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"])}


def gpt_oss_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return no more metadata. Raises CheckpointError for YaRN with whole bounds.

    Files do not state whether bounds are whole, and are read as the published models.
    """
    rope = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    kind = rope.get("rope_type", rope.get("type"))
    if kind == "yarn" and rope.get("truncate", True):
        raise CheckpointError(
            "config.json truncate", "expected false in rope_parameters, as in gpt-oss", REMEDY
        )
    return {}


def llama4_config(metadata: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return Llama 4's widths, its layers with experts, and what hangs on their number."""
    every, count = metadata.size("interleave_moe_layer_step"), config["num_hidden_layers"]
    return {
        "intermediate_size": metadata.size("expert_feed_forward_length"),
        "intermediate_size_mlp": metadata.size("feed_forward_length"),
        "interleave_moe_layer_step": every,
        "moe_layers": list(range(every - 1, count, every)),
        "no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(count)],
        # llama.cpp decides by the number of experts
        "use_qk_norm": metadata.size("expert_count") != 128,
    }


def llama4_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return Llama 4's widths, and how often a layer has experts. Raises CheckpointError."""
    count, dense = config["num_hidden_layers"], set(config["mlp_only_layers"])
    sparse = [layer for layer in range(count) if layer not in dense]
    every = sparse[0] + 1 if sparse else 1
    if sparse != list(range(every - 1, count, every)):
        raise CheckpointError(
            "config.json moe_layers", "expected every n-th layer, from layer n - 1", REMEDY
        )
    return {
        "feed_forward_length": config["intermediate_size_mlp"],
        "expert_feed_forward_length": config["intermediate_size"],
        "interleave_moe_layer_step": every,
    }


def by_layer(metadata: Any, key: str, count: int) -> list[Any]:
    """Return a value for each layer of a key that states one, or a list."""
    value = metadata.get(key)
    values = list(value) if isinstance(value, list) else [value] * count
    if len(values) < count:
        raise metadata.wrong(key, f"expected {count} values, found {len(values)}")
    return values[:count]


DELTA_SIZES = ("ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank")


def _check_sizes(metadata: Any, *keys: str) -> list[int]:
    """Return sizes that a file must state. Raises CheckpointError."""
    return [metadata.size(key) for key in keys]


def by_intervals(metadata: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the kinds of layers of a model with delta nets, and the width of their values."""
    count = config["num_hidden_layers"]
    _, _, groups, heads = _check_sizes(metadata, *DELTA_SIZES)
    if heads % groups:
        raise metadata.wrong("ssm.time_step_rank", f"expected a multiple of {groups} key heads")
    kinds = _recurrent_kinds(metadata, count, every=4)
    width, rest = divmod(metadata.size("ssm.inner_size"), heads)
    if rest:
        raise metadata.wrong("ssm.inner_size", f"expected {heads} heads of one width")
    return {
        "layer_types": kinds,
        "linear_value_head_dim": width,
    }


def _recurrent_kinds(metadata: Any, count: int, every: int) -> list[str]:
    """Return the kinds of layers that a file states; without: one of `every` has attention."""
    recurrent = metadata.get("attention.recurrent_layers")
    if recurrent is None:
        every = metadata.size("full_attention_interval", every)
        recurrent = [(layer + 1) % every != 0 for layer in range(count)]
    else:
        recurrent = by_layer(metadata, "attention.recurrent_layers", count)
    return ["linear_attention" if each else "full_attention" for each in recurrent]


_ALPHAS = tuple(f"{block}_alpha_factor" for block in ("full_attn", "linear_attn", "mlp"))


def minimax_config(metadata: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the kinds of MiniMax-Text-01's layers, what rotates, and the stream's factor."""
    factor = metadata.number("residual_scale")
    if factor is None:
        raise metadata.wrong("residual_scale", "is missing")
    kinds = _recurrent_kinds(metadata, config["num_hidden_layers"], every=8)
    rotated = metadata.size("rope.dimension_count", config["head_dim"])
    return {"layer_types": kinds, "rotary_dim": rotated, **dict.fromkeys(_ALPHAS, factor)}


def minimax_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return MiniMax-Text-01's kinds of layers, and its factor. Raises CheckpointError."""
    factors = [float(config.get(key, 1.0)) for key in _ALPHAS]
    if len(set(factors)) > 1:
        raise CheckpointError(
            f"config.json {_ALPHAS[1]}",
            f"expected one factor of the residual stream in all blocks, found {factors}",
            REMEDY,
        )
    kinds = config["layer_types"]
    if len(kinds) == 1 and kinds[0] == "linear_attention":
        raise CheckpointError(
            "config.json num_hidden_layers", "expected 2 or more, as in llama.cpp, found 1", REMEDY
        )
    return {
        "residual_scale": factors[0],
        "attention.recurrent_layers": [kind == "linear_attention" for kind in kinds],
    }


def intervals_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the kinds of layers of a model with delta nets, and the width of all value heads.

    Raises CheckpointError where keys and values have other widths: llama.cpp knows one.
    """
    keys, values = config["linear_key_head_dim"], config["linear_value_head_dim"]
    if keys != values:
        raise CheckpointError(
            "config.json linear_value_head_dim",
            f"expected linear_key_head_dim, {keys}, found {values}: llama.cpp has one width",
            REMEDY,
        )
    kinds = config.get("layer_types")
    every = config.get("full_attention_interval") or 4
    if not isinstance(kinds, list):
        count = config["num_hidden_layers"]
        names = ("full_attention", "linear_attention")
        kinds = [names[(layer + 1) % every != 0] for layer in range(count)]
    rotated = _rotated(config)
    return {
        "ssm.inner_size": values * config["linear_num_value_heads"],
        "attention.recurrent_layers": [kind == "linear_attention" for kind in kinds],
        "full_attention_interval": every,
        "rope.dimension_sections": _sections(config, rotated),
    }


def _rotated(config: Mapping[str, Any]) -> int:
    """Return how many channels of a head rotate."""
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 0.25
    return int(width * part)


def _sections(config: Mapping[str, Any], rotated: int) -> list[int]:
    """Return the pairs of channels that rotate by time, height and width: stated, or in three."""
    stated = (config.get("rope_parameters") or {}).get("mrope_section") or []
    pairs = rotated // 2
    if sum(stated) != pairs:
        third = pairs // 3
        stated = [pairs - 2 * third, third, third]
    return [*stated, 0][:4]


def by_kv_heads(kind: str) -> Any:
    """Return a function that reads kinds of layers: those without KV heads are `kind`."""

    def read(metadata: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
        if kind == "conv":
            metadata.size("shortconv.l_cache")
        heads = by_layer(metadata, "attention.head_count_kv", config["num_hidden_layers"])
        return {"layer_types": ["full_attention" if each else kind for each in heads]}

    return read


def kv_heads_metadata(kind: str) -> Any:
    """Return a function that writes kinds of layers: those of `kind` have no KV heads."""

    def write(config: Mapping[str, Any]) -> Mapping[str, Any]:
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        by_layer = [0 if each == kind else heads for each in config["layer_types"]]
        return {"attention.head_count_kv": by_layer}

    return write


def mamba_config(metadata: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the kinds of Granite's layers, and the width of Mamba-2's heads."""
    *_, heads = _check_sizes(metadata, *DELTA_SIZES)
    width, rest = divmod(metadata.size("ssm.inner_size"), heads)
    if rest:
        raise metadata.wrong("ssm.inner_size", f"expected {heads} heads of one width")
    rotates = metadata.get("rope.scaling.finetuned")
    found = {
        "mamba_d_head": width,
        "position_embedding_type": "rope" if rotates is None or rotates else "nope",
    }
    if config.get("num_local_experts") is None:
        found["num_local_experts"] = 0
    return {**by_kv_heads("linear_attention")(metadata, config), **found}


def mamba_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return Granite's kinds of layers, and the width of Mamba-2's heads in all."""
    return {
        **kv_heads_metadata("linear_attention")(config),
        "ssm.inner_size": config["mamba_n_heads"] * config["mamba_d_head"],
        "rope.scaling.finetuned": config.get("position_embedding_type") == "rope",
    }


def bamba_config(metadata: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return Bamba's layers with attention, and the width of Mamba-2's heads."""
    *_, heads = _check_sizes(metadata, *DELTA_SIZES)
    if metadata.get("rope.scaling.finetuned") is False:
        raise metadata.wrong("rope.scaling.finetuned", "expected true, as in Bamba")
    width, rest = divmod(metadata.size("ssm.inner_size"), heads)
    if rest:
        raise metadata.wrong("ssm.inner_size", f"expected {heads} heads of one width")
    kv_heads = by_layer(metadata, "attention.head_count_kv", config["num_hidden_layers"])
    attends = [layer for layer, each in enumerate(kv_heads) if each]
    return {"attn_layer_indices": attends, "mamba_d_head": width}


def bamba_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return Bamba's layers with attention, by their KV heads, and that heads rotate."""
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    attends, layers = config.get("attn_layer_indices") or (), range(config["num_hidden_layers"])
    return {
        "attention.head_count_kv": [heads if layer in attends else 0 for layer in layers],
        "ssm.inner_size": mamba_inner(config),
        "rope.scaling.finetuned": True,
    }


def mamba_inner(config: Mapping[str, Any]) -> int:
    """Return the width of Mamba-2's heads in all."""
    return config["mamba_n_heads"] * config["mamba_d_head"]


def nemotron_config(metadata: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the one block of each of Nemotron-H's layers, and the width of Mamba-2's heads."""
    count = config["num_hidden_layers"]
    _check_sizes(metadata, *DELTA_SIZES)
    heads, widths = (
        by_layer(metadata, key, count) for key in ("attention.head_count_kv", "feed_forward_length")
    )
    wide = "moe" if metadata.get("expert_count") else "mlp"
    kinds = [
        wide if width else "full_attention" if each else "linear_attention"
        for each, width in zip(heads, widths, strict=True)
    ]
    inner = metadata.size("ssm.inner_size") // metadata.size("ssm.time_step_rank")
    found = {"layer_types": kinds, "layers_block_type": kinds, "mamba_d_head": inner}
    if wide == "moe":
        found["mlp_layer_types"] = ["sparse" if kind == "moe" else "dense" for kind in kinds]
    return found


def nemotron_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the one block of each layer: by its KV heads, and the width of its feed-forward."""
    kinds, heads = config["layer_types"], config["num_key_value_heads"]
    wide = config["moe_intermediate_size" if "moe" in kinds else "intermediate_size"]
    return {
        "attention.head_count_kv": [heads if kind == "full_attention" else 0 for kind in kinds],
        "feed_forward_length": [wide if kind in ("mlp", "moe") else 0 for kind in kinds],
        "attention.layer_norm_epsilon": float(config["layer_norm_epsilon"]),
        "ssm.inner_size": mamba_inner(config),
    }


# Falcon-H1's factors, which files have in the weights
FACTORS = (
    *("embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier"),
    *("attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
)


def falcon_h1_config(metadata: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the width of Falcon-H1's mixers, and factors of 1: they are in the weights."""
    *_, heads = _check_sizes(metadata, *DELTA_SIZES)
    inner = metadata.size("ssm.inner_size")
    has_norm = "blk.0.ssm_norm.weight" in metadata.gguf.tensors
    return {
        **dict.fromkeys(FACTORS, 1.0),
        **{"ssm_multipliers": [1.0] * 5, "mlp_multipliers": [1.0, 1.0]},
        **{"mamba_d_ssm": inner, "mamba_d_head": inner // heads, "mamba_rms_norm": has_norm},
    }


def falcon_h1_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the width of Falcon-H1's mixers. Raises CheckpointError for a norm before gates."""
    if config.get("mamba_rms_norm") and config.get("mamba_norm_before_gate", True):
        raise CheckpointError(
            "config.json mamba_norm_before_gate", "expected false, as in llama.cpp", REMEDY
        )
    return {"ssm.inner_size": mamba_inner(config)}


def falcon_h1_factors(theirs: str, config: Mapping[str, Any]) -> list[tuple[int, float]]:
    """Return factors of the rows of a tensor, each with its number of rows; 0: all."""
    gate, down = config.get("mlp_multipliers") or (1.0, 1.0)
    attention = config.get("attention_in_multiplier", 1.0)
    factors = {
        "token_embd": config.get("embedding_multiplier", 1.0),
        "output": config.get("lm_head_multiplier", 1.0),
        **{"ffn_gate": gate, "ffn_down": down, "attn_q": attention, "attn_v": attention},
        "attn_k": attention * config.get("key_multiplier", 1.0),
        "attn_output": config.get("attention_out_multiplier", 1.0),
        "ssm_out": config.get("ssm_out_multiplier", 1.0),
    }
    if theirs != "ssm_in":
        return [(0, factors.get(theirs, 1.0))]
    inner, states = mamba_inner(config), config["mamba_n_groups"] * config["mamba_d_state"]
    rows = (inner, inner, states, states, config["mamba_n_heads"])
    each = config.get("ssm_multipliers") or [1.0] * 5
    factor = config.get("ssm_in_multiplier", 1.0)
    return [(count, own * factor) for count, own in zip(rows, each, strict=True)]


def kimi_config(metadata: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the kinds of Kimi Linear's layers, and the heads of its mixers."""
    _check_sizes(metadata, "ssm.conv_kernel", "kda.head_dim")
    return {
        **by_kv_heads("linear_attention")(metadata, config),
        **dense_first(metadata, config),
        "linear_num_heads": config["num_attention_heads"],
    }


def kimi_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the kinds of Kimi Linear's layers. Raises CheckpointError for other mixers."""
    heads = config["num_attention_heads"]
    if config["linear_num_heads"] != heads:
        raise CheckpointError(
            "config.json linear_num_heads", f"expected {heads}, as in attention", REMEDY
        )
    kinds = config["layer_types"]
    return {
        "attention.head_count_kv": [0 if each == "linear_attention" else 1 for each in kinds],
        "leading_dense_block_count": dense_layers(config),
    }
