"""What is known of a model family: the fields of a row of families.py, and what follows from them.

Facts alone, without torch. Sizes are called as in config.json; "q" and "kv" are head_dim times a
number of heads.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from formats.errors import CheckpointError

Split = Literal["outputs", "inputs"]
Shape = tuple[tuple[str, ...], ...]  # of each dim the sizes that it is the sum of


class Stated(NamedTuple):
    """A flag that config.json holds."""

    key: str
    default: bool


Flag = bool | str | Stated  # fixed, or the key of config.json that holds it; without it False
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
    present: Flag = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """How a token chooses its experts. It stays in float."""

    name: str = "gate"  # below the module
    # of x times its weight; softmax_of_chosen: the choice is by the product, the softmax after it
    scores: Literal["softmax", "sigmoid", "softmax_of_chosen"] = "softmax"
    normalized: Flag = False  # the chosen experts' shares are made to add up to 1
    float32: bool = False  # the product, of x and a weight in float32
    rounded: bool = False  # shares are rounded to the dtype of activations
    bias: bool = False  # of the product
    correction: str = ""  # a tensor below the module, added to scores for the choice alone
    # Experts stand in n_group groups, of which topk_group are left by their scores: the best of a
    # group, or the sum of its two best.
    group_score: Literal["", "max", "top2"] = ""
    factor_key: str = ""  # of config.json: shares are multiplied by it


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpert:
    """An expert that every token has."""

    gate_up: Projection
    down: Projection
    gate: str = ""  # a linear of one output, whose sigmoid multiplies it


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The mixture of experts that stands in place of a layer's feed-forward."""

    module: str  # transformers calls it `mlp`, whatever the checkpoint does
    gate_up: Projection
    down: Projection
    routing: Router
    shared: SharedExpert | None = None
    # All experts' matrices are one tensor each, transposed, with biases; gate and up alternate.
    # Or they are MXFP4, in pairs of tensors, as they are.
    fused: bool = False
    clamped: bool = False  # (up + 1) * gate * sigmoid(swiglu_alpha * gate), within swiglu_limit
    # Keys of config.json. The layers that keep the dense feed-forward: a list of them; all before
    # a number; all but each n-th.
    dense_layers_key: str = ""
    first_dense_key: str = ""
    every_key: str = ""

    @property
    def router(self) -> str:
        """The linear that chooses."""
        return f"{self.module}.{self.routing.name}"

    def stand_in(self, layer: int, config: Mapping[str, Any]) -> bool:
        """Whether a layer has them, or a dense feed-forward."""
        if layer in (config.get(self.dense_layers_key) or ()):
            return False
        if layer < (config.get(self.first_dense_key) or 0):
            return False
        return (layer + 1) % (config.get(self.every_key) or 1) == 0

    def tensors(self, config: Mapping[str, Any]) -> dict[str, Shape]:
        """Those besides the experts' linears, by their names below the layer."""
        E = ("num_experts",)
        shapes: dict[str, Shape] = {f"{self.router}.weight": (E, ("hidden_size",))}
        if self.routing.bias:
            shapes[f"{self.router}.bias"] = (E,)
        if self.routing.correction:
            shapes[f"{self.module}.{self.routing.correction}"] = (E,)
        if self.fused:
            C, inner = ("hidden_size",), (self.down.inputs,)
            both, stem = inner * 2, f"{self.module}.experts"
            shapes |= {
                f"{stem}.gate_up_proj": (E, C, both),
                f"{stem}.gate_up_proj_bias": (E, both),
                f"{stem}.down_proj": (E, inner, C),
                f"{stem}.down_proj_bias": (E, C),
            }
        if self.shared and self.shared.gate:
            shapes[f"{self.shared.gate}.weight"] = (("one",), ("hidden_size",))
        return shapes


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
    sinks: str = ""  # a tensor of a layer: a score of each head that takes weight and adds nothing
    norms: tuple[Norm, ...]
    norm_offset: float = 0.0  # a norm multiplies by (offset + weight)
    float32_norms: bool = False  # the factors are float32, and rounding comes after them
    activation_key: str = "hidden_act"
    activation: str = "silu"
    window: Literal["none", "all", "layer_types"] = "none"  # layers that slide
    # Layers that rotate queries and keys; "windows": those that slide, or all where none may.
    rope: Literal["all", "no_rope_layers", "windows"] = "all"
    interleaved_rope: bool = False  # channels 2 i and 2 i + 1 are a pair, not i and i + half
    embedding_times_root: bool = False  # embeddings are multiplied by sqrt(hidden_size)
    embedding_factor_key: str = ""  # of config.json: embeddings are multiplied by it
    logits_divisor_key: str = ""  # logits are divided by it
    logits_cap_key: str = ""  # logits are bent into a range: cap * tanh(logits / cap)
    tied: bool = False  # head and embedding, where config.json does not say
    float16: bool = True  # activations stay within its range
    rules: ConfigRules | None = None  # None: the doctor leaves its config and tensors alone
    layer: str = "model.layers.{i}"
    num_layers_key: str = "num_hidden_layers"
    draft_layers_key: str = ""  # layers behind those, for drafts alone (next_token.py)
    embedding: str = "model.embed_tokens.weight"
    last_norm: str = "model.norm.weight"
    head: str = HEAD

    @property
    def served(self) -> bool:
        """By qserve."""
        return bool(self.builder)

    def draft_layers(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """The prefixes of layers that the model does without."""
        first, count = config.get(self.num_layers_key), config.get(self.draft_layers_key)
        if not (_is_size(first) and _is_size(count)):
            return ()
        numbers = range(first, first + min(count, MAX_LAYERS))
        return tuple(f"{self.layer.format(i=number)}." for number in numbers)

    def is_tied(self, config: Mapping[str, Any]) -> bool:
        """Whether the head is the embedding."""
        return bool(config.get("tie_word_embeddings", self.tied))

    def embedding_factor(self, config: Mapping[str, Any]) -> float:
        """What embeddings are multiplied by."""
        if self.embedding_times_root:
            return config["hidden_size"] ** 0.5
        return config.get(self.embedding_factor_key, 1.0)

    @property
    def dense(self) -> tuple[Projection, ...]:
        """The projections that every layer has once, in the order they run."""
        attention = (self.qkv, self.o)
        return attention if self.experts else (*attention, self.gate_up, self.down)

    def projections(self, num_experts: int = 0, dense: bool = False) -> Iterator[Projection]:
        """Every projection of a layer, in the order they run. `dense`: of one without experts."""
        yield from self.dense
        if self.experts and dense:
            yield from (self.gate_up, self.down)
        elif self.experts:
            for number in range(0 if self.experts.fused else num_experts):
                yield self.experts.gate_up.expert(number)
                yield self.experts.down.expert(number)
            if self.experts.shared:
                yield from (self.experts.shared.gate_up, self.experts.shared.down)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Of a layer, as stored, without those of experts."""
        return tuple(linear for projection in self.dense for linear in projection.linears)

    def layer_tensors(
        self, config: Mapping[str, Any], layer: int | None = None
    ) -> dict[str, Shape]:
        """A layer's tensors in a float checkpoint, by their names below the layer.

        Without a number, of a layer that has experts if the family does.
        """
        dense = bool(
            self.experts and layer is not None and not self.experts.stand_in(layer, config)
        )
        projections = self.projections(num_experts(config) or 0, dense)
        linears = [linear for projection in projections for linear in projection.linears]
        shapes = {f"{linear.name}.weight": linear.shape for linear in linears}
        for linear in linears:
            if is_set(linear.bias, config):
                shapes[f"{linear.name}.bias"] = (linear.outputs,)
        shapes |= {
            f"{norm.name}.weight": ((norm.size,),)
            for norm in self.norms
            if is_set(norm.present, config)
        }
        if self.sinks:
            shapes[self.sinks] = (("num_attention_heads",),)
        if self.experts and not dense:
            shapes |= self.experts.tensors(config)
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
        if self.is_tied(config):
            del shapes[self.head]
        for number in range(config[self.num_layers_key]):
            prefix = self.layer.format(i=number)
            of_layer = self.layer_tensors(config, number)
            shapes |= {f"{prefix}.{name}": shape for name, shape in of_layer.items()}
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
        inner, shared = found["moe_intermediate_size"], config.get("n_shared_experts")
        found["shared_experts"] = inner * shared if inner and _is_size(shared) else None
        return {**found, "num_experts": num_experts(config), "one": 1}


_NUMBERS = (
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
    "shared_expert_intermediate_size",
)


NUM_EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def is_set(flag: Flag, config: Mapping[str, Any]) -> bool:
    """What a flag says of the model of a config.json."""
    if isinstance(flag, Stated):
        return bool(config.get(flag.key, flag.default))
    return bool(config.get(flag, False)) if isinstance(flag, str) else flag


def num_experts(config: Mapping[str, Any]) -> int | None:
    """Of one layer; config.json calls it one thing or the other, whatever the architecture."""
    stated = [config[key] for key in NUM_EXPERTS_KEYS if key in config]
    return stated[0] if stated and _is_size(stated[0]) else None


def size(names: tuple[str, ...], sizes: Mapping[str, int | None]) -> int | None:
    """The sum of the sizes of these names; None where one is not known."""
    found = [sizes.get(name) for name in names]
    return None if None in found else sum(found)


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
