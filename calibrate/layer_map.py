"""Where a model's tensors are called what: one row per architecture. Knows names, not weights.

A new architecture is a new row of LAYER_MAPS. Its linears are listed in the order they run, those
that share an input together: they will share that input's statistics.
"""

from dataclasses import dataclass, replace
from typing import Any

from formats.errors import CheckpointError, InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMap:
    """The tensor names of one architecture. Names inside a layer are local to it."""

    layer: str = "model.layers.{i}"
    num_layers_key: str = "num_hidden_layers"  # of config.json
    linears_by_input: tuple[tuple[str, ...], ...]
    layer_tensors: tuple[
        str, ...
    ]  # besides the linears' weights; others are kept if they are there
    model_tensors: tuple[str, ...] = ("model.embed_tokens.weight", "model.norm.weight")
    head: str = "lm_head.weight"

    def prefix(self, layer: int) -> str:
        return self.layer.format(i=layer)

    def linear_names(self, layer: int) -> list[str]:
        """Full names of a layer's linears, in the order they run."""
        return [
            f"{self.prefix(layer)}.{local}" for group in self.linears_by_input for local in group
        ]

    def num_layers(self, config: dict[str, Any]) -> int:
        count = config.get(self.num_layers_key)
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise CheckpointError(
                f"config.json {self.num_layers_key}",
                f"expected the number of layers, found {count!r}",
                "mend config.json",
            )
        return count

    def tied_head(self, config: dict[str, Any]) -> str | None:
        """The head's name where it is the embedding: a copy of it in the file is never read."""
        return self.head if config.get("tie_word_embeddings", False) else None

    def required_tensors(self, config: dict[str, Any]) -> list[str]:
        """Every tensor that a float checkpoint of this architecture must hold."""
        names = []
        for layer in range(self.num_layers(config)):
            names += [f"{name}.weight" for name in self.linear_names(layer)]
            names += [f"{self.prefix(layer)}.{local}" for local in self.layer_tensors]
        names += self.model_tensors
        return names if self.tied_head(config) else [*names, self.head]


_LLAMA = LayerMap(
    linears_by_input=(
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("self_attn.o_proj",),
        ("mlp.gate_proj", "mlp.up_proj"),
        ("mlp.down_proj",),
    ),
    layer_tensors=("input_layernorm.weight", "post_attention_layernorm.weight"),
)

LAYER_MAPS: dict[str, LayerMap] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": replace(
        _LLAMA,
        layer_tensors=(
            *_LLAMA.layer_tensors,
            "self_attn.q_proj.bias",
            "self_attn.k_proj.bias",
            "self_attn.v_proj.bias",
        ),
    ),
    "Qwen3ForCausalLM": replace(
        _LLAMA,
        layer_tensors=(
            *_LLAMA.layer_tensors,
            "self_attn.q_norm.weight",
            "self_attn.k_norm.weight",
        ),
    ),
}


def find_layer_map(config: dict[str, Any]) -> LayerMap:
    """The row of config.json's architecture. Raises InputError where there is none."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in LAYER_MAPS:
        raise InputError(
            f"architecture {name!r}",
            f"unknown; known: {', '.join(LAYER_MAPS)}",
            "an architecture is a row of LAYER_MAPS in calibrate/layer_map.py",
        )
    return LAYER_MAPS[name]
