"""Architecture of Step-3.5: layers with a window have other heads. Needs no torch."""

from collections.abc import Mapping
from typing import Any

from formats.errors import CheckpointError
from formats.gguf.architectures.architecture import Architecture
from formats.gguf.architectures.divisors import ORIGINAL, llama3_divisors, llama3_parameters
from formats.gguf.architectures.layers import REMEDY, by_layer
from formats.gguf.architectures.parts import BEFORE, BY_SIGMOID, EXPERTS, FREQUENCIES, OF_HEADS
from formats.gguf.architectures.uneven import sparse_layers
from formats.gguf.writing.container_writer import Value

_FULL, _SLIDING = "full_attention", "sliding_attention"
_HEADS, _KV_HEADS = "attention.head_count", "attention.head_count_kv"
_ROTATED, _ROTATED_LOCAL = "rope.dimension_count", "rope.dimension_count_swa"
# heads of each layer type; a file omits a type that no layer has
_BY_KIND = ("num_attention_heads", "num_sliding_attention_heads")
_BY_KIND += ("num_global_attention_heads", "num_local_attention_heads")
# config.json key -> metadata: limits by layer of what activations give; 0: none
_LIMITS = {"swiglu_limits": "swiglu_clamp_exp", "swiglu_limits_shared": "swiglu_clamp_shexp"}


def _heads(metadata: Any, kinds: list[str]) -> dict[str, int]:
    """Return the number of heads of each layer type. Raises CheckpointError if it varies."""
    found: dict[str, int] = {}
    stated = by_layer(metadata, _HEADS, len(kinds))
    for kind, heads in zip(kinds, stated, strict=True):
        if type(heads) is not int or heads <= 0 or found.setdefault(kind, heads) != heads:
            raise metadata.wrong(
                _HEADS, f"expected one number in all layers of a kind, found {stated!r:.60}"
            )
    return found


def _limits(metadata: Any, count: int) -> dict[str, list[float]]:
    """Return the limits of each layer, where the file states them. Raises CheckpointError."""
    found = {}
    for key, theirs in _LIMITS.items():
        values = metadata.numbers(theirs)
        if values is None:
            continue
        values = values * count if len(values) == 1 else values
        if len(values) < count or min(values) < 0:
            raise metadata.wrong(
                theirs, f"expected {count} numbers from 0 on, found {values!r:.60}"
            )
        found[key] = values[:count]
    return found


def _config(metadata: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return heads by layer type, layers with experts, and limits. Raises CheckpointError."""
    count, kinds = config["num_hidden_layers"], config["layer_types"]
    heads = _heads(metadata, kinds)
    has_own = metadata.get(_KV_HEADS) is not None
    kv_heads = by_layer(metadata, _KV_HEADS if has_own else _HEADS, count)
    first = kv_heads[0]
    if type(first) is not int or first <= 0 or kv_heads != [first] * count:
        raise metadata.wrong(
            _KV_HEADS, f"expected one number in all layers, found {kv_heads!r:.60}"
        )
    some = next(iter(heads.values()))
    return {
        "num_attention_heads": heads.get(_FULL, some),
        "num_sliding_attention_heads": heads.get(_SLIDING, some),
        "mlp_layer_types": sparse_layers(metadata, count),
        **_limits(metadata, count),
    }


def _rope_config(metadata: Any) -> dict[str, Any]:
    """Return the RoPE parameters of each layer type. Raises CheckpointError.

    As in llama.cpp, layers without a window rotate half of `rope.dimension_count`, and the first
    divisors are theirs.
    """
    width = metadata.size("attention.key_length")
    twice = metadata.size(_ROTATED, width)
    rotated, local = twice // 2, metadata.size(_ROTATED_LOCAL, twice)
    for key, each in ((_ROTATED, rotated), (_ROTATED_LOCAL, local)):
        if not 0 < each <= width or each % 2:
            raise metadata.wrong(
                key, f"expected RoPE on 2 to {width} channels of a head, found {each}"
            )
    kind = metadata.get("rope.scaling.type")
    factor = metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear"))
    if kind not in (None, "none") or factor not in (None, 0.0, 1.0):
        problem = f"{kind!r:.40} with factor {factor} is not supported"
        raise metadata.wrong("rope.scaling.type", problem)
    theta = float(metadata.number("rope.freq_base", 10000.0))
    usual = {"rope_type": "default"}
    full = {**usual, **_scaling(metadata, theta, rotated, local), "rope_theta": theta}
    sliding = {**usual, "rope_theta": float(metadata.number("rope.freq_base_swa", theta))}
    return {
        "rope_parameters": {
            _FULL: {**full, "partial_rotary_factor": rotated / width},
            _SLIDING: {**sliding, "partial_rotary_factor": local / width},
        }
    }


def _scaling(metadata: Any, theta: float, rotated: int, local: int) -> dict[str, Any]:
    """Return Llama 3's parameters of a file with divisors. Raises CheckpointError for others.

    transformers computes no other divisors of Step-3.5.
    """
    if FREQUENCIES not in metadata.gguf.tensors:
        return {}
    divisors = metadata.divisors(FREQUENCIES, max(rotated, local))[: rotated // 2]
    if all(each == 1.0 for each in divisors):
        return {}
    found = llama3_parameters(divisors, theta, rotated)
    if found is None:
        raise CheckpointError(
            f"{metadata.subject}: {FREQUENCIES}",
            f"expected divisors by Llama 3's rule, found {divisors!r:.60}",
            "use the model as safetensors",
        )
    return found


def _ropes(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the RoPE parameters of each layer type; published files state them by layer."""
    kinds, stated = config["layer_types"], config.get("rope_parameters") or {}
    if all(isinstance(stated.get(kind), Mapping) for kind in kinds):
        return {kind: stated[kind] for kind in kinds}
    found = {}
    for kind in dict.fromkeys(kinds):
        rope = {"rope_type": "default"}
        for key, stated_as in (
            ("rope_theta", "rope_theta"),
            ("partial_rotary_factor", "partial_rotary_factors"),
        ):
            value = config.get(stated_as)
            value = value[kinds.index(kind)] if isinstance(value, list) else value
            rope |= {} if value is None else {key: value}
        found[kind] = rope | (config.get("rope_scaling") or {} if kind == _FULL else {})
    return found


def _divisors(rope: Mapping[str, Any], theta: float, rotated: int) -> list[float]:
    """Return the divisors of layers without a window; []: none. Raises CheckpointError."""
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return []
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        return llama3_divisors(theta, rotated, rope["factor"], low, high, rope[ORIGINAL])
    raise CheckpointError(
        "config.json rope_parameters",
        f"expected rope_type default or llama3 in layers without a window, found {kind!r:.40}",
        REMEDY,
    )


def _rope_metadata(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Return RoPE channels, bases and divisors. Raises CheckpointError."""
    ropes, width = _ropes(config), config["head_dim"]
    full = ropes.get(_FULL) or ropes[_SLIDING]
    local = ropes.get(_SLIDING) or full
    kind = local.get("rope_type", "default")
    if _SLIDING in ropes and kind != "default":
        raise CheckpointError(
            "config.json rope_parameters",
            f"expected rope_type default in layers with a window, found {kind!r:.40}",
            REMEDY,
        )
    thetas = [float(rope.get("rope_theta", 10000.0)) for rope in (full, local)]
    rotated, rotated_local = (
        int(width * rope.get("partial_rotary_factor", 1.0)) for rope in (full, local)
    )
    keys = {
        "rope.freq_base": Value(type="f32", value=thetas[0]),
        "rope.freq_base_swa": Value(type="f32", value=thetas[1]),
        _ROTATED: Value(type="u32", value=2 * rotated),  # llama.cpp halves it
        _ROTATED_LOCAL: Value(type="u32", value=rotated_local),
    }
    divisors = _divisors(full, thetas[0], rotated)
    if not divisors:
        return keys, {}
    rest = max(rotated, rotated_local) // 2 - len(divisors)
    return keys, {FREQUENCIES: [*divisors, *[1.0] * rest]}


def _metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return heads and limits by layer. Raises CheckpointError for a model without windows."""
    kinds, full = config["layer_types"], config["num_attention_heads"]
    local = config["num_sliding_attention_heads"]
    found: dict[str, Any] = {
        _HEADS: [local if kind == _SLIDING else full for kind in kinds],
        "leading_dense_block_count": (*config["mlp_layer_types"], "sparse").index("sparse"),
    }
    if _SLIDING not in kinds or not config.get("sliding_window"):
        raise CheckpointError(
            "config.json sliding_window", "expected layers with a window, as in llama.cpp", REMEDY
        )
    for key, theirs in _LIMITS.items():
        if config.get(key) is not None:
            found[theirs] = [float(limit or 0.0) for limit in config[key]]
    return found


STEP = Architecture(
    name="step35",
    family="Step3p5ForCausalLM",
    norms={**BEFORE, **OF_HEADS},
    keys={
        **EXPERTS,
        "n_routed_experts": "expert_count",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        "moe_router_scaling_factor": "expert_weights_scale",
    },
    fixed={
        # llama.cpp adds no biases
        **{"attention_bias": False, "moe_router_scaling_factor": 1.0},
        "pad_token_id": 0,  # transformers takes no None
    },
    constants={**BY_SIGMOID, "expert_weights_norm": True},
    window="pattern",
    sizes_by_layer=True,
    uncompared=("rope_parameters", *_BY_KIND, *_LIMITS),
    rope_config=_rope_config,
    rope_metadata=_rope_metadata,
    more_config=_config,
    more_metadata=_metadata,
    head="own",
)
