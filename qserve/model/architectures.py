"""The decoder families, one row each. Knows how they differ, not how they run."""

from dataclasses import dataclass
from typing import Any

from formats.errors import InputError

# A flag of a family: fixed, or the name of the config key that holds it.
Flag = bool | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What one Llama-like family does differently."""

    qkv_bias: Flag = False
    o_bias: Flag = False
    mlp_bias: Flag = False
    qk_norm: bool = False  # RMSNorm over each head's q and k, before the rotation
    window: str = "none"  # which layers slide: "none", "all", or "layer_types" as config lists


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(
        qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"
    ),
    "MistralForCausalLM": Architecture(window="all"),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True, window="layer_types"),
    "Qwen3ForCausalLM": Architecture(
        qkv_bias="attention_bias", o_bias="attention_bias", qk_norm=True, window="layer_types"
    ),
}


def architecture_of(config: dict[str, Any]) -> tuple[str, Architecture]:
    """The row that config.json names. Raises InputError where there is none."""
    names = config.get("architectures")
    for name, architecture in ARCHITECTURES.items():
        if names == [name]:
            return name, architecture
    raise InputError(
        "config.json architectures",
        f"expected one of {', '.join(ARCHITECTURES)}, found {names!r:.200}",
        "a new family is a row in qserve/model/architectures.py",
    )
