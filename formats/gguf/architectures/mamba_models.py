"""Rows and functions of Mamba, FalconMamba, Mamba 2 and Jamba. Needs no torch."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from formats.architecture.stored_form.mamba import UNSTATED_LENGTH
from formats.errors import CheckpointError
from formats.gguf.architectures.architecture import Architecture
from formats.gguf.architectures.converted import ConvertedTensor
from formats.gguf.architectures.hybrids import mamba_tensors
from formats.gguf.architectures.layers import REMEDY, STATE_SIZES, by_layer, check_sizes
from formats.gguf.architectures.parts import USED

# context length that llama.cpp's converter writes for Mamba, which has no longest context
LLAMA_CPP_LENGTH = 2**20
_KEYS = {
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_state": "ssm.state_size",
    "mamba_dt_rank": "ssm.time_step_rank",
}
_HAS_NORMS = "ssm.dt_b_c_rms"
# keys of Jamba that select layers: (period, offset)
_ATTENTION = ("attn_layer_period", "attn_layer_offset")
_EXPERTS = ("expert_layer_period", "expert_layer_offset")


def _tensors(module: str) -> dict[str, ConvertedTensor]:
    linears = {"ssm_in": "in_proj", "ssm_x": "x_proj", "ssm_dt": "dt_proj", "ssm_out": "out_proj"}
    return {
        **{
            f"{theirs}.weight": ConvertedTensor(name=f"{module}.{ours}.weight")
            for theirs, ours in linears.items()
        },
        "ssm_dt.bias": ConvertedTensor(name=f"{module}.dt_proj.bias"),
        "ssm_conv1d.weight": ConvertedTensor(name=f"{module}.conv1d.weight", shape="taps"),
        "ssm_conv1d.bias": ConvertedTensor(name=f"{module}.conv1d.bias"),
        "ssm_a": ConvertedTensor(name=f"{module}.A_log", exponent=True),
        "ssm_d": ConvertedTensor(name=f"{module}.D"),
    }


def mamba_config(metadata: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the factor of Mamba's channels, and the context length if the file has one."""
    check_sizes(metadata, *_KEYS.values())
    found = {"mamba_expand": _expansion(metadata, config)}
    if config["max_position_embeddings"] == LLAMA_CPP_LENGTH:
        found["max_position_embeddings"] = UNSTATED_LENGTH
    return found


def mamba_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return Mamba's sizes, and zeros for attention and feed-forward, as llama.cpp writes them."""
    length = config["max_position_embeddings"]
    return {
        **_inner(config),
        "context_length": LLAMA_CPP_LENGTH if length == UNSTATED_LENGTH else length,
        **{"feed_forward_length": 0, "attention.head_count": 0, "attention.head_count_kv": 0},
        _HAS_NORMS: config["model_type"] == "falcon_mamba",
    }


def mamba_2_config(metadata: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the width of Mamba 2's heads, the factor of channels, and the context length."""
    *_, heads = check_sizes(metadata, *STATE_SIZES)
    width, rest = divmod(metadata.size("ssm.inner_size"), heads)
    if rest:
        raise metadata.wrong("ssm.inner_size", f"expected {heads} heads of one width")
    return {**mamba_config(metadata, config), "mamba_d_head": width}


def mamba_2_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return Mamba 2's sizes, and zeros for attention and feed-forward."""
    found = mamba_metadata({**config, "mamba_channels": config["intermediate_size"]})
    return {key: value for key, value in found.items() if key != _HAS_NORMS}


def jamba_config(metadata: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return Jamba's layers with attention, by their KV heads, and with experts, by routers."""
    check_sizes(metadata, *_KEYS.values())
    count = config["num_hidden_layers"]
    kv_heads = by_layer(metadata, "attention.head_count_kv", count)
    attention = [layer for layer, heads in enumerate(kv_heads) if heads]
    names = metadata.gguf.tensors
    sparse = [layer for layer in range(count) if f"blk.{layer}.ffn_gate_inp.weight" in names]
    found = {"mamba_expand": _expansion(metadata, config)}
    for keys, layers, text in (
        (_ATTENTION, attention, "attention.head_count_kv"),
        (_EXPERTS, sparse, "expert_count"),
    ):
        values = _selection(layers, count)
        if values is None:
            raise metadata.wrong(text, f"expected evenly spaced layers, found {layers!r:.60}")
        found |= dict(zip(keys, values, strict=True))
    return found if sparse else {**found, "num_experts": 1}


def jamba_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return Jamba's sizes, and its layers with attention, by their KV heads."""
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    layers, attention = range(config["num_hidden_layers"]), config["attn_layer_indices"]
    return {
        **_inner(config),
        "attention.head_count_kv": [heads if layer in attention else 0 for layer in layers],
    }


def _selection(layers: Sequence[int], count: int) -> tuple[int, int] | None:
    """Return the period and the offset that select layers; None: they are not evenly spaced."""
    if not layers:
        return count + 1, count
    period = layers[1] - layers[0] if len(layers) > 1 else count
    selected = [layer for layer in range(count) if layer % period == layers[0]]
    return (period, layers[0]) if selected == list(layers) else None


def _expansion(metadata: Any, config: Mapping[str, Any]) -> int:
    factor, rest = divmod(metadata.size("ssm.inner_size"), config["hidden_size"])
    if rest or not factor:
        raise metadata.wrong("ssm.inner_size", "expected a multiple of the embedding length")
    return factor


def _inner(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of channels. Raises CheckpointError if llama.cpp has another one."""
    channels, hidden = config["mamba_channels"], config["hidden_size"]
    if channels != 2 * hidden:
        raise CheckpointError(
            "config.json intermediate_size" if "expand" in config else "config.json mamba_expand",
            f"expected {2 * hidden} channels, twice hidden_size, as in llama.cpp, found {channels}",
            REMEDY,
        )
    return {"ssm.inner_size": channels}


MAMBA_MODELS = (
    Architecture(
        name="mamba",
        family="MambaForCausalLM",
        also=("FalconMambaForCausalLM",),
        with_norms=(_HAS_NORMS, "FalconMambaForCausalLM"),
        has_attention=False,
        inner_key="ssm.inner_size",
        norms={"attn_norm": "norm"},
        keys=_KEYS,
        # llama.cpp has a bias of the convolution alone
        fixed={"use_bias": False, "use_conv_bias": True},
        # llama.cpp normalizes dt, B and C with the epsilon of the other norms
        needs={"mixer_rms_eps": 1e-6},
        tensors=_tensors("mixer"),
        more_config=mamba_config,
        more_metadata=mamba_metadata,
    ),
    Architecture(
        name="mamba2",
        family="Mamba2ForCausalLM",
        has_attention=False,
        inner_key="ssm.inner_size",
        norms={"attn_norm": "norm"},
        keys={
            "mamba_d_conv": "ssm.conv_kernel",
            "mamba_d_state": "ssm.state_size",
            "mamba_n_groups": "ssm.group_count",
            "mamba_n_heads": "ssm.time_step_rank",
        },
        fixed={"use_bias": False, "use_conv_bias": True},
        needs={"time_step_limit": [0.0, math.inf]},  # llama.cpp has no limits
        tensors=mamba_tensors("mixer"),
        more_config=mamba_2_config,
        more_metadata=mamba_2_metadata,
    ),
    Architecture(
        name="jamba",
        family="JambaForCausalLM",
        norms={"attn_norm": "input_layernorm", "ffn_norm": "pre_ff_layernorm"},
        keys={**_KEYS, **USED, "num_experts": "expert_count"},
        fixed={"mamba_proj_bias": False, "mamba_conv_bias": True},
        tensors={
            **_tensors("mamba"),
            **{
                f"ssm_{name}_norm.weight": ConvertedTensor(name=f"mamba.{name}_layernorm.weight")
                for name in ("dt", "b", "c")
            },
        },
        uncompared=(*_ATTENTION, *_EXPERTS),  # the layers that they select are compared
        more_config=jamba_config,
        more_metadata=jamba_metadata,
    ),
)
