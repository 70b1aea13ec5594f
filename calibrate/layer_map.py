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
    # A mixture of experts: where it is on disk (transformers calls it `mlp`), and whether the
    # chosen experts' shares are made to add up to 1 whatever config.json says.
    experts_module: str = ""
    renormalized: bool = False
    expert_linears_by_input: tuple[tuple[str, ...], ...] = ()  # {e}: the expert's number
    embedding: str = "model.embed_tokens.weight"
    last_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"

    def prefix(self, layer: int) -> str:
        return self.layer.format(i=layer)

    def inputs(self, config: dict[str, Any]) -> tuple[tuple[str, ...], ...]:
        """Local names of a layer's linears in the order they run; those of one input together."""
        if not self.experts_module:
            return self.linears_by_input
        experts = [
            tuple(name.format(e=expert) for name in group)
            for expert in range(self.num_experts(config))
            for group in self.expert_linears_by_input
        ]
        return (*self.linears_by_input, *experts)

    def linear_names(self, layer: int, config: dict[str, Any]) -> list[str]:
        """Full names of a layer's linears, in the order they run."""
        prefix = self.prefix(layer)
        return [f"{prefix}.{local}" for group in self.inputs(config) for local in group]

    def num_experts(self, config: dict[str, Any]) -> int:
        """Of one layer; config.json calls it one thing or the other, whatever the architecture."""
        return _positive(config, "num_experts" if "num_experts" in config else "num_local_experts")

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

_GEMMA = replace(
    _LLAMA,
    layer_tensors=(
        *_LLAMA.layer_tensors,
        "pre_feedforward_layernorm.weight",
        "post_feedforward_layernorm.weight",
    ),
    scale_pairs=(
        ScalePair(previous="input_layernorm", linears=_QKV, kind="norm"),
        _VALUES,
        ScalePair(previous="pre_feedforward_layernorm", linears=_GATE_UP, kind="norm"),
        _UP,
    ),
    norm_offset=1.0,
    rotatable=False,
    embedding_times_root=True,
)
# The router reads what the experts read and stays in float: no factor moves through that norm.
_EXPERTS = replace(
    _LLAMA,
    linears_by_input=(_QKV, ("self_attn.o_proj",)),
    scale_pairs=(
        ScalePair(previous="input_layernorm", linears=_QKV, kind="norm"),
        _VALUES,
    ),
    rotatable=False,
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
    "Phi3ForCausalLM": replace(
        _LLAMA,
        linears_by_input=(
            ("self_attn.qkv_proj",),
            ("self_attn.o_proj",),
            ("mlp.gate_up_proj",),
            ("mlp.down_proj",),
        ),
        scale_pairs=(
            ScalePair(previous="input_layernorm", linears=("self_attn.qkv_proj",), kind="norm"),
            replace(_VALUES, previous="self_attn.qkv_proj"),
            ScalePair(
                previous="post_attention_layernorm", linears=("mlp.gate_up_proj",), kind="norm"
            ),
            replace(_UP, previous="mlp.gate_up_proj"),
        ),
    ),
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": replace(
        _GEMMA,
        layer_tensors=(
            *_GEMMA.layer_tensors,
            "self_attn.q_norm.weight",
            "self_attn.k_norm.weight",
        ),
    ),
    "MixtralForCausalLM": replace(
        _EXPERTS,
        experts_module="block_sparse_moe",
        renormalized=True,
        layer_tensors=(*_LLAMA.layer_tensors, "block_sparse_moe.gate.weight"),
        expert_linears_by_input=(
            ("block_sparse_moe.experts.{e}.w1", "block_sparse_moe.experts.{e}.w3"),
            ("block_sparse_moe.experts.{e}.w2",),
        ),
    ),
    "Qwen3MoeForCausalLM": replace(
        _EXPERTS,
        experts_module="mlp",
        layer_tensors=(
            *_LLAMA.layer_tensors,
            "self_attn.q_norm.weight",
            "self_attn.k_norm.weight",
            "mlp.gate.weight",
        ),
        expert_linears_by_input=(
            ("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj"),
            ("mlp.experts.{e}.down_proj",),
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
