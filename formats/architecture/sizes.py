"""Values of the sizes that a family's shapes name, if config.json states them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from formats.errors import InputError, config_error

_NUMBERS = (
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
    *("shared_expert_intermediate_size", "shared_intermediate_size"),
    *("moe_shared_expert_intermediate_size", "moe_latent_size"),
    # ERNIE's experts for text and for media, and the number of each
    *("text_expert_size", "media_expert_size", "moe_num_experts"),
    *("intermediate_size_mlp", "global_head_dim", "num_global_key_value_heads"),
    # heads of layers with and without a window, in families whose layers differ in heads
    *("num_global_attention_heads", "num_local_attention_heads", "num_local_key_value_heads"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_conv_kernel_dim"),
    *("linear_key_head_dim", "linear_value_head_dim"),
    *("linear_num_heads", "linear_head_dim"),
    "conv_L_cache",
    # Inkling's profiles of biases, and taps of its convolutions
    *("d_rel", "rel_extent", "sliding_window", "conv_kernel_size", "n_routed_experts"),
    *("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
    *("mamba_channels", "mamba_dt_rank"),
    *("hidden_size_per_layer_input", "vocab_size_per_layer_input"),
    *("laurel_rank", "altup_num_inputs"),
    *("index_n_heads", "index_head_dim"),
    *("o_lora_rank", "o_groups", "num_experts_per_tok", "hc_mult"),
    *("compress_rate_csa", "compress_rate_hca"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    # latents of layers with a window, in families whose layers differ in latents
    *("local_q_lora_rank", "local_kv_lora_rank", "local_qk_nope_head_dim"),
)


# ends of the names of keys with factors
FACTORS = ("factor", "multiplier", "multipliers", "scaling", "scale", "scalar", "softcapping")
NOT_FINITE = "__float__"  # transformers 5 reads a number that is not finite as {NOT_FINITE: text}
MAX_EXPERTS = 32_768  # of a layer; Doge has 16,384
NUM_EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


def is_size(value: Any) -> bool:
    """Return True for an integer above 0."""
    return type(value) is int and value > 0


def stated_size(
    config: Mapping[str, Any], key: str, remedy: str = "copy it from the float model"
) -> int:
    """Return a size that config.json must state. Raises CheckpointError unless it is above 0."""
    value = config.get(key)
    if not is_size(value):
        raise config_error(key, "a number above 0", value, remedy)
    return value


def layer_numbers(config: Mapping[str, Any], key: str) -> Sequence[Any]:
    """Return a list of layers that config.json states; () if it states none.

    Raises CheckpointError if it is no list.
    """
    found = config.get(key) or ()
    if not isinstance(found, list | tuple):
        raise config_error(key, "a list of numbers of layers", found)
    return found


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    """Raise InputError unless each key/value head has the same number of attention heads."""
    is_known = is_size(num_heads) and is_size(num_kv_heads)
    if not is_known or num_heads < num_kv_heads or num_heads % num_kv_heads:
        raise InputError(
            "config.json num_key_value_heads",
            f"expected a divisor of the {num_heads} attention heads, found {num_kv_heads!r:.80}",
            "copy it from the float model",
        )


def check_eps(key: str, eps: Any) -> None:
    """Raise CheckpointError unless the epsilon of a norm is a finite number and not negative."""
    if type(eps) not in (int, float) or not 0 <= eps < math.inf:
        raise config_error(key, "a finite number of 0 or more", eps)


def factors_not_finite(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the factors of config.json that are NaN or infinity, by key."""
    found = {}
    for key, value in config.items():
        if not key.endswith(FACTORS):
            continue
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, dict) and NOT_FINITE in each:
                each = float(each[NOT_FINITE])
            if isinstance(each, float) and not math.isfinite(each):
                found[key] = each
    return found


def check_factors(config: Mapping[str, Any], applied: Sequence[str] = ()) -> None:
    """Raise CheckpointError for a factor that is not finite, by the name of its key.

    `applied`: keys of factors that the family always applies; null is refused for these, and for
    every multiplier except the one of attention scores, whose default follows from the head's size.
    """
    for key, value in factors_not_finite(config).items():
        raise config_error(key, "a finite number", value)
    for key, value in config.items():
        is_multiplier = key.endswith("_multiplier") and key != "attention_multiplier"
        if value is None and (is_multiplier or key in applied):
            raise config_error(key, "a finite number", value)


def _product(sizes: Mapping[str, int | None], *names: str) -> int | None:
    found = [sizes[name] for name in names]
    return None if None in found else math.prod(found)


def num_experts_key(config: Mapping[str, Any]) -> str:
    """Return the first of the keys for the number of experts that config.json has."""
    return next((key for key in NUM_EXPERTS_KEYS if key in config), NUM_EXPERTS_KEYS[0])


def num_experts(config: Mapping[str, Any]) -> int | None:
    """Return the number of experts per layer; None if config.json states none."""
    stated = config.get(num_experts_key(config))
    return stated if is_size(stated) else None


def size(names: tuple[str, ...], sizes: Mapping[str, int | None]) -> int | None:
    """Return the sum of the named sizes; None if one is unknown."""
    found = [sizes.get(name) for name in names]
    return None if None in found else sum(found)


def _latent_sizes(sizes: Mapping[str, int | None]) -> dict[str, int | None]:
    """Return the output sizes of the projections of latent attention.

    The prefixes "global" and "local" are those of `_sizes_by_kind`.
    """
    return {
        **_latents(sizes, "", "", "num_attention_heads"),
        **_latents(sizes, "global_", "", "num_global_attention_heads"),
        **_latents(sizes, "local_", "local_", "num_local_attention_heads"),
    }


def _latents(
    sizes: Mapping[str, int | None], prefix: str, widths: str, heads_key: str
) -> dict[str, int | None]:
    """Return the sizes of one kind of layers. `widths`: prefix of the keys of its widths."""
    rank, nope, rope, value, heads = (
        sizes[name]
        for name in (
            *(f"{widths}kv_lora_rank", f"{widths}qk_nope_head_dim"),
            *("qk_rope_head_dim", "v_head_dim", heads_key),
        )
    )
    found: dict[str, int | None] = dict.fromkeys(("latent", "latent_q", "latent_kv"))
    if rank and nope and rope and value and heads:
        found = {
            "latent": rank + rope,  # size of a token's cache entry
            "latent_q": heads * (nope + rope),
            "latent_kv": heads * (nope + value),
        }
    return {f"{prefix}{name}": each for name, each in found.items()}


def _compressed_sizes(sizes: Mapping[str, int | None]) -> dict[str, int | None]:
    """Return the sizes of compressed attention and of hyper-connections (DeepSeek-V4)."""
    q, groups, streams = sizes["q"], sizes["o_groups"], sizes["hc_mult"]
    return {
        "all_q": q,  # of all ranks
        "all_heads": sizes["num_attention_heads"],
        "q_of_group": q // groups if q and groups else None,  # heads' results of one group
        "o_latents": _product(sizes, "o_groups", "o_lora_rank"),
        "two_heads": sizes["head_dim"] and 2 * sizes["head_dim"],
        "two_index_heads": sizes["index_head_dim"] and 2 * sizes["index_head_dim"],
        "hc_width": _product(sizes, "hc_mult", "hidden_size"),
        "hc_mixes": streams and (2 + streams) * streams,
        "hc_scales": 3,
    }


def _sizes_by_kind(sizes: Mapping[str, int | None]) -> dict[str, int | None]:
    """Return the attention sizes of layers with and without a window: "local" and "global".

    "v" is the width of values and "o" the input width of o, if keys are wider than values.
    """
    found = {}
    for kind, width in (("global", "global_head_dim"), ("local", "head_dim")):
        heads, kv_heads = f"num_{kind}_attention_heads", f"num_{kind}_key_value_heads"
        for name, count, dim in (
            *(("q", heads, width), ("kv", kv_heads, width)),
            *(("v", kv_heads, "v_head_dim"), ("o", heads, "v_head_dim")),
        ):
            found[f"{kind}_{name}"] = _product(sizes, count, dim)
        found[f"{kind}_relative"] = _product(sizes, heads, "d_rel")
    return found


def _mamba_sizes(sizes: Mapping[str, int | None]) -> dict[str, int | None]:
    """Return the channels of Mamba-2's values, of its convolution and of its first projection."""
    inner = _product(sizes, "mamba_n_heads", "mamba_d_head")
    of_groups = _product(sizes, "mamba_n_groups", "mamba_d_state")
    if not inner or not of_groups:
        return dict.fromkeys(("mamba_inner", "mamba_gated", "mamba_conv", "mamba_in"))
    channels = inner + 2 * of_groups
    return {
        "mamba_inner": inner,
        "mamba_gated": 2 * inner,  # z and x
        "mamba_conv": channels,  # x, B and C
        "mamba_in": inner + channels + sizes["mamba_n_heads"],  # z, then channels, then time steps
    }


def _mamba_1_sizes(sizes: Mapping[str, int | None]) -> dict[str, int | None]:
    """Return the output sizes of the first two projections of Mamba-1."""
    channels, state, rank = (
        sizes[name] for name in ("mamba_channels", "mamba_d_state", "mamba_dt_rank")
    )
    return {
        "mamba_channels_in": channels and 2 * channels,  # x, then z
        "mamba_selection": rank + 2 * state if rank and state else None,  # dt, B and C
    }


def named_sizes(
    config: Mapping[str, Any], defaults: Mapping[str, int], inner_key: str
) -> dict[str, int | None]:
    """Return sizes by name; None if config.json does not state one.

    `inner_key` is config.json's key for the width of a dense feed-forward, usually
    "intermediate_size".
    """
    stated = {k: v for k, v in config.items() if k in _NUMBERS and (v is None or is_size(v))}
    numbers = {**defaults, **stated}
    found = {name: numbers.get(name) for name in _NUMBERS}
    if inner_key != "intermediate_size":
        inner = config.get(inner_key)
        found["intermediate_size"] = inner if is_size(inner) else None
    heads, hidden, head_dim = (
        found[name] for name in ("num_attention_heads", "hidden_size", "head_dim")
    )
    if found["kv_lora_rank"]:  # latent attention: "q" and "kv" are widths of values
        head_dim = found["head_dim"] = found["v_head_dim"]
    kv_heads = heads if found["num_key_value_heads"] is None else found["num_key_value_heads"]
    if head_dim is None and heads and hidden:
        head_dim = found["head_dim"] = hidden // heads
    for name, count in (("q", heads), ("kv", kv_heads)):
        found[name] = count * head_dim if count and head_dim else None
    found["num_global_attention_heads"] = found["num_global_attention_heads"] or heads
    found |= _sizes_by_kind(found)
    found["wide_intermediate_size"] = found["intermediate_size"] and 2 * found["intermediate_size"]
    width, layers = found["hidden_size_per_layer_input"], config.get("num_hidden_layers")
    found["layer_inputs"] = width * layers if width and is_size(layers) else None
    found["altup_squared"] = found["altup_num_inputs"] and found["altup_num_inputs"] ** 2
    found |= _latent_sizes(found)
    found["lightning_qkv"] = found["q"] and 3 * found["q"]
    found["kda"] = _product(found, "linear_num_heads", "linear_head_dim")
    found["kda_qkv"] = found["kda"] and 3 * found["kda"]
    # groups of heads of a norm; one group: its sum is over all heads
    groups = config.get("group_norm_size")
    found["norm_groups"] = groups if is_size(groups) and groups > 1 else heads
    found |= _compressed_sizes(found)
    found["index_q"] = _product(found, "index_n_heads", "index_head_dim")
    found["block_index_q"] = found["index_q"]  # one head for each KV head
    found["q_and_gate"] = found["q"] and 2 * found["q"]
    keys, values = (
        _product(found, f"linear_num_{x}_heads", f"linear_{x}_head_dim") for x in ("key", "value")
    )
    found["delta_k"], found["delta_v"] = keys, values
    found["delta_qkv"] = 2 * keys + values if keys and values else None
    found |= _mamba_sizes(found) | _mamba_1_sizes(found)
    found["short_conv_in"] = hidden and 3 * hidden
    inner, shared = found["moe_intermediate_size"], config.get("n_shared_experts")
    found["shared_experts"] = inner * shared if inner and is_size(shared) else None
    return {**found, "num_experts": num_experts(config), "one": 1}
