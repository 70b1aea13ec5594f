"""Every model family that the project knows: names, shapes, biases, norms and splits, a row each.

Facts alone, without torch: all four packages read them. What a served family computes stands in
qserve/model/families/. Sizes are called as in config.json; "q" and "kv" are head_dim times a
number of heads.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from formats.errors import CheckpointError

Flag = bool | str  # fixed, or the key of config.json that holds it
Split = Literal["outputs", "inputs"]
Shape = tuple[tuple[str, ...], ...]  # of each dim the sizes that it is the sum of

ATTENTION = "self_attn"  # the module of a layer that has its KV scales
HEAD = "lm_head.weight"
MAX_LAYERS = 10_000  # far more than any model has
# Ends of names that older writers store although every reader computes the tensor itself.
DERIVED = ("rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """One linear of a layer, as checkpoints store it."""

    name: str  # below the layer
    outputs: tuple[str, ...]
    inputs: str
    bias: Flag

    @property
    def shape(self) -> Shape:
        """Of the weight, [N, K]."""
        return (self.outputs, (self.inputs,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """Linears of one input, which servers multiply as one matrix. {e} is an expert's number."""

    name: str  # of that matrix, below the layer
    members: tuple[tuple[str, str], ...]  # name, size of the outputs
    inputs: str
    split: Split = "outputs"  # what is shared out over several GPUs
    bias: Flag = False
    stored_fused: bool = False  # the checkpoint has the one matrix, not its members

    @property
    def linears(self) -> tuple[Linear, ...]:
        """As they are stored."""
        members = [(name, (size,)) for name, size in self.members]
        if self.stored_fused:
            members = [(self.name, tuple(size for _, size in self.members))]
        return tuple(
            Linear(name=name, outputs=outputs, inputs=self.inputs, bias=self.bias)
            for name, outputs in members
        )

    def expert(self, number: int) -> "Projection":
        """The same of one expert."""
        return replace(
            self,
            name=self.name.format(e=number),
            members=tuple((name.format(e=number), size) for name, size in self.members),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """An RMS norm of a layer."""

    name: str
    size: str = "hidden_size"
    feeds: str = ""  # the projection or module that reads it; empty: it stands after one


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The mixture of experts that stands in every layer in place of one feed-forward."""

    module: str  # transformers calls it `mlp`, whatever the checkpoint does
    gate_up: Projection
    down: Projection
    # the chosen experts' shares are made to add up to 1 whatever config.json says
    renormalized: bool = False

    @property
    def router(self) -> str:
        """The linear that chooses; it stays in float."""
        return f"{self.module}.gate"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigRules:
    """What transformers makes of a config.json that does not state everything."""

    may_be_null: tuple[str, ...] = ()
    # By key; without one there are as many KV heads as heads, and head_dim is hidden_size / heads.
    defaults: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture."""

    architecture: str
    model_type: str
    builder: str = ""  # the module of qserve/model/families that builds it; empty: not served
    qkv: Projection
    o: Projection
    gate_up: Projection
    down: Projection
    experts: Experts | None = None  # None: the feed-forward is gate_up and down
    norms: tuple[Norm, ...]
    norm_offset: float = 0.0  # a norm multiplies by (offset + weight)
    activation_key: str = "hidden_act"
    activation: str = "silu"
    window: Literal["none", "all", "layer_types"] = "none"  # layers that slide
    embedding_times_root: bool = False  # embeddings are multiplied by sqrt(hidden_size)
    rules: ConfigRules | None = None  # None: the doctor leaves its config and tensors alone
    layer: str = "model.layers.{i}"
    num_layers_key: str = "num_hidden_layers"
    embedding: str = "model.embed_tokens.weight"
    last_norm: str = "model.norm.weight"
    head: str = HEAD

    @property
    def served(self) -> bool:
        """By qserve."""
        return bool(self.builder)

    @property
    def dense(self) -> tuple[Projection, ...]:
        """The projections that every layer has once, in the order they run."""
        attention = (self.qkv, self.o)
        return attention if self.experts else (*attention, self.gate_up, self.down)

    def projections(self, num_experts: int = 0) -> Iterator[Projection]:
        """Every projection of a layer, in the order they run."""
        yield from self.dense
        if self.experts:
            for number in range(num_experts):
                yield self.experts.gate_up.expert(number)
                yield self.experts.down.expert(number)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Of a layer, as stored, without those of experts."""
        return tuple(linear for projection in self.dense for linear in projection.linears)

    def layer_tensors(self, config: Mapping[str, Any]) -> dict[str, Shape]:
        """A layer's tensors in a float checkpoint, by their names below the layer."""
        projections = self.projections(num_experts(config) or 0)
        linears = [linear for projection in projections for linear in projection.linears]
        shapes = {f"{linear.name}.weight": linear.shape for linear in linears}
        for linear in linears:
            if is_set(linear.bias, config):
                shapes[f"{linear.name}.bias"] = (linear.outputs,)
        shapes |= {f"{norm.name}.weight": ((norm.size,),) for norm in self.norms}
        if self.experts:
            shapes[f"{self.experts.router}.weight"] = (("num_experts",), ("hidden_size",))
        return shapes

    @property
    def model_tensors(self) -> dict[str, Shape]:
        """The tensors outside of layers. A tied model has no head, or a copy nobody reads."""
        return {
            self.embedding: (("vocab_size",), ("hidden_size",)),
            self.last_norm: (("hidden_size",),),
            self.head: (("vocab_size",), ("hidden_size",)),
        }

    def tensors(self, config: Mapping[str, Any]) -> dict[str, Shape]:
        """Every tensor of a float checkpoint by its full name."""
        shapes = self.model_tensors
        if config.get("tie_word_embeddings", False):
            del shapes[self.head]
        for number in range(config[self.num_layers_key]):
            prefix = self.layer.format(i=number)
            shapes |= {f"{prefix}.{name}": s for name, s in self.layer_tensors(config).items()}
        return shapes

    def sizes(self, config: Mapping[str, Any]) -> dict[str, int | None]:
        """The numbers that shapes name; None where config.json does not say."""
        stated = {k: v for k, v in config.items() if k in _NUMBERS and (v is None or _is_size(v))}
        numbers = {**(self.rules.defaults if self.rules else {}), **stated}
        found = {name: numbers.get(name) for name in _NUMBERS}
        heads, hidden, head_dim = (
            found[name] for name in ("num_attention_heads", "hidden_size", "head_dim")
        )
        kv_heads = heads if found["num_key_value_heads"] is None else found["num_key_value_heads"]
        if head_dim is None and heads and hidden:
            head_dim = found["head_dim"] = hidden // heads
        for name, count in (("q", heads), ("kv", kv_heads)):
            found[name] = count * head_dim if count and head_dim else None
        return {**found, "num_experts": num_experts(config)}


_NUMBERS = (
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def is_set(flag: Flag, config: Mapping[str, Any]) -> bool:
    """What a flag says of the model of a config.json."""
    return bool(config.get(flag, False)) if isinstance(flag, str) else flag


def num_experts(config: Mapping[str, Any]) -> int | None:
    """Of one layer; config.json calls it one thing or the other, whatever the architecture."""
    count = config.get("num_experts", config.get("num_local_experts"))
    return count if _is_size(count) else None


def size(names: tuple[str, ...], sizes: Mapping[str, int | None]) -> int | None:
    """The sum of the sizes of these names; None where one is not known."""
    found = [sizes.get(name) for name in names]
    return None if None in found else sum(found)


_Q, _K, _V, _O = (f"self_attn.{name}_proj" for name in "qkvo")
_QKV = Projection(
    name="self_attn.qkv_proj",
    members=((_Q, "q"), (_K, "kv"), (_V, "kv")),
    inputs="hidden_size",
)
_GATE_UP = Projection(
    name="mlp.gate_up_proj",
    members=(("mlp.gate_proj", "intermediate_size"), ("mlp.up_proj", "intermediate_size")),
    inputs="hidden_size",
)
_BEFORE_ATTENTION = Norm(name="input_layernorm", feeds=_QKV.name)
_HEAD_NORMS = tuple(Norm(name=f"self_attn.{x}_norm", size="head_dim") for x in "qk")

_O_PROJ = Projection(name=_O, members=((_O, "hidden_size"),), inputs="q", split="inputs")
_DOWN = Projection(
    name="mlp.down_proj",
    members=(("mlp.down_proj", "hidden_size"),),
    inputs="intermediate_size",
    split="inputs",
)
# What a row has unless it says otherwise, and what several rows have.
_USUAL = {
    "qkv": _QKV,
    "o": _O_PROJ,
    "gate_up": _GATE_UP,
    "down": _DOWN,
    "norms": (_BEFORE_ATTENTION, Norm(name="post_attention_layernorm", feeds=_GATE_UP.name)),
}
_ATTENTION_BIAS = {
    "qkv": replace(_QKV, bias="attention_bias"),
    "o": replace(_O_PROJ, bias="attention_bias"),
}
_GEMMA_NORMS = (
    _BEFORE_ATTENTION,
    Norm(name="post_attention_layernorm"),
    Norm(name="pre_feedforward_layernorm", feeds=_GATE_UP.name),
    Norm(name="post_feedforward_layernorm"),
)
_GEMMA = {
    **_ATTENTION_BIAS,
    "norm_offset": 1.0,
    "activation_key": "hidden_activation",
    "activation": "gelu_pytorch_tanh",
    "window": "layer_types",
    "embedding_times_root": True,
}


def _norms_before(module: str) -> tuple[Norm, Norm]:
    """Of a layer whose feed-forward is `module`."""
    return _BEFORE_ATTENTION, Norm(name="post_attention_layernorm", feeds=module)


def _experts(module: str, gate: str, up: str, down: str, inner: str, **flags: bool) -> Experts:
    """Experts below `module`, whose linears have these names and `inner` features."""
    prefix = f"{module}.experts.{{e}}"
    return Experts(
        module=module,
        gate_up=Projection(
            name=f"{prefix}.gate_up",
            members=((f"{prefix}.{gate}", inner), (f"{prefix}.{up}", inner)),
            inputs="hidden_size",
        ),
        down=Projection(
            name=f"{prefix}.{down}",
            members=((f"{prefix}.{down}", "hidden_size"),),
            inputs=inner,
            split="inputs",
        ),
        **flags,
    )


def _family(architecture: str, model_type: str, **different: Any) -> Family:
    """The usual row with what is different."""
    return Family(architecture=architecture, model_type=model_type, **{**_USUAL, **different})


FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        _family(
            "LlamaForCausalLM",
            "llama",
            builder="llama",
            **_ATTENTION_BIAS,
            gate_up=replace(_GATE_UP, bias="mlp_bias"),
            down=replace(_DOWN, bias="mlp_bias"),
            rules=ConfigRules(may_be_null=("num_key_value_heads", "head_dim")),
        ),
        _family(
            "MistralForCausalLM",
            "mistral",
            builder="llama",
            window="all",
            rules=ConfigRules(may_be_null=("head_dim",), defaults={"num_key_value_heads": 8}),
        ),
        _family(
            "Qwen2ForCausalLM",
            "qwen2",
            builder="llama",
            qkv=replace(_QKV, bias=True),
            window="layer_types",
            rules=ConfigRules(
                may_be_null=("num_key_value_heads", "head_dim"),
                defaults={"num_key_value_heads": 32},
            ),
        ),
        _family(
            "Qwen3ForCausalLM",
            "qwen3",
            builder="qwen3",
            **_ATTENTION_BIAS,
            norms=(*_USUAL["norms"], *_HEAD_NORMS),
            window="layer_types",
            rules=ConfigRules(
                may_be_null=("num_key_value_heads",),
                defaults={"num_key_value_heads": 32, "head_dim": 128},
            ),
        ),
        _family(
            "Phi3ForCausalLM",
            "phi3",
            qkv=replace(_QKV, stored_fused=True),
            gate_up=replace(_GATE_UP, stored_fused=True),
            window="all",
        ),
        _family("Gemma2ForCausalLM", "gemma2", **_GEMMA, norms=_GEMMA_NORMS),
        _family("Gemma3ForCausalLM", "gemma3_text", **_GEMMA, norms=(*_GEMMA_NORMS, *_HEAD_NORMS)),
        _family(
            "MixtralForCausalLM",
            "mixtral",
            experts=_experts(
                "block_sparse_moe", "w1", "w3", "w2", "intermediate_size", renormalized=True
            ),
            norms=_norms_before("block_sparse_moe"),
            window="all",
        ),
        _family(
            "Qwen3MoeForCausalLM",
            "qwen3_moe",
            **_ATTENTION_BIAS,
            experts=_experts("mlp", "gate_proj", "up_proj", "down_proj", "moe_intermediate_size"),
            norms=(*_norms_before("mlp"), *_HEAD_NORMS),
            window="all",
        ),
    )
}


def served_architectures() -> tuple[str, ...]:
    """What qserve serves."""
    return tuple(name for name, family in FAMILIES.items() if family.served)


def check_num_layers(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError where config.json states more layers than any model has.

    Readers make lists of that many layers, and those of 10^9 take gigabytes.
    """
    count = config.get("num_hidden_layers")
    if isinstance(count, int) and count > MAX_LAYERS:
        raise CheckpointError(
            "config.json num_hidden_layers",
            f"expected {MAX_LAYERS} or less, found {count}",
            "copy it from the float model",
        )


def checked_family(config: Mapping[str, Any]) -> Family | None:
    """The family of config.json's model_type, where the doctor knows its rules."""
    for family in FAMILIES.values():
        if family.rules is not None and family.model_type == config.get("model_type"):
            return family
    return None
