"""Where a model's tensors are called what: one row per architecture. Knows names, not weights.

A new architecture is a new row of LAYER_MAPS. Its linears are listed in the order they run, those
that share an input together: they will share that input's statistics.
"""

from dataclasses import dataclass, replace
from typing import Any

from formats.errors import CheckpointError, InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePair:
    """Where a factor per channel can move: out of what `linears` read, into `previous`.

    `previous` is a norm, or a linear whose last outputs are what the linears read.
    """

    previous: str
    linears: tuple[str, ...]
    # "norm": one weight per channel. "values": v's heads, each read by several query heads.
    # "up": the factor that the activation function multiplies.
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMap:
    """The tensor names of one architecture. Names inside a layer are local to it."""

    layer: str = "model.layers.{i}"
    num_layers_key: str = "num_hidden_layers"  # of config.json
    linears_by_input: tuple[tuple[str, ...], ...]
    layer_tensors: tuple[
        str, ...
    ]  # besides the linears' weights; others are kept if they are there
    scale_pairs: tuple[ScalePair, ...]
    norm_offset: float = 0.0  # a norm multiplies by (offset + weight)
    rotatable: bool = True  # nothing stands between a linear's output and the residual stream
    embedding_times_root: bool = False  # embeddings are multiplied by sqrt(hidden size)
    # Linears of one expert, {e} its number; the experts' number is this key of config.json.
    expert_linears_by_input: tuple[tuple[str, ...], ...] = ()
    num_experts_key: str = ""
    embedding: str = "model.embed_tokens.weight"
    last_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"

    def prefix(self, layer: int) -> str:
        return self.layer.format(i=layer)

    def inputs(self, config: dict[str, Any]) -> tuple[tuple[str, ...], ...]:
        """Local names of a layer's linears in the order they run; those of one input together."""
        if not self.num_experts_key:
            return self.linears_by_input
        count = _positive(config, self.num_experts_key)
        experts = [
            tuple(name.format(e=expert) for name in group)
            for expert in range(count)
            for group in self.expert_linears_by_input
        ]
        return (*self.linears_by_input, *experts)

    def linear_names(self, layer: int, config: dict[str, Any]) -> list[str]:
        """Full names of a layer's linears, in the order they run."""
        prefix = self.prefix(layer)
        return [f"{prefix}.{local}" for group in self.inputs(config) for local in group]

    def num_layers(self, config: dict[str, Any]) -> int:
        return _positive(config, self.num_layers_key)

    def tied_head(self, config: dict[str, Any]) -> str | None:
        """The head's name where it is the embedding: a copy of it in the file is never read."""
        return self.head if config.get("tie_word_embeddings", False) else None

    def required_tensors(self, config: dict[str, Any]) -> list[str]:
        """Every tensor that a float checkpoint of this architecture must hold."""
        names = []
        for layer in range(self.num_layers(config)):
            names += [f"{name}.weight" for name in self.linear_names(layer, config)]
            names += [f"{self.prefix(layer)}.{local}" for local in self.layer_tensors]
        names += [self.embedding, self.last_norm]
        return names if self.tied_head(config) else [*names, self.head]


def _positive(config: dict[str, Any], key: str) -> int:
    count = config.get(key)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise CheckpointError(
            f"config.json {key}",
            f"expected a number of 1 or more, found {count!r}",
            "mend config.json",
        )
    return count


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_VALUES = ScalePair(previous="self_attn.v_proj", linears=("self_attn.o_proj",), kind="values")
_UP = ScalePair(previous="mlp.up_proj", linears=("mlp.down_proj",), kind="up")

_LLAMA = LayerMap(
    linears_by_input=(_QKV, ("self_attn.o_proj",), _GATE_UP, ("mlp.down_proj",)),
    layer_tensors=("input_layernorm.weight", "post_attention_layernorm.weight"),
    scale_pairs=(
        ScalePair(previous="input_layernorm", linears=_QKV, kind="norm"),
        _VALUES,
        ScalePair(previous="post_attention_layernorm", linears=_GATE_UP, kind="norm"),
        _UP,
    ),
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
