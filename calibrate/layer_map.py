"""What quantizing a model asks of its family: linears by input, and where factors can move.

Made from the family's row in formats/families.py. Linears are listed in the order they run, those
that share an input together: they will share that input's statistics. Knows names, not weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from formats.errors import CheckpointError, InputError
from formats.families import FAMILIES
from formats.family import Family, Projection


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

    layer: str
    num_layers_key: str  # of config.json
    linears_by_input: tuple[tuple[str, ...], ...]
    layer_tensors: tuple[
        str, ...
    ]  # besides the linears' weights; others are kept if they are there
    scale_pairs: tuple[ScalePair, ...]
    norm_offset: float  # a norm multiplies by (offset + weight)
    rotatable: bool  # nothing stands between a linear's output and the residual stream
    family: Family
    # A mixture of experts: where it is on disk (transformers calls it `mlp`), and whether the
    # chosen experts' shares are made to add up to 1 whatever config.json says.
    experts_module: str = ""
    renormalized: bool = False
    expert_linears_by_input: tuple[tuple[str, ...], ...] = ()  # {e}: the expert's number
    embedding: str
    last_norm: str
    head: str

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
        return self.head if self.family.is_tied(config) else None

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


def layer_map(family: Family) -> LayerMap:
    """What a row says to those who quantize."""
    # Biases that config.json switches on are kept if they are there.
    biases = [f"{linear.name}.bias" for linear in family.linears if linear.bias is True]
    experts = family.experts
    return LayerMap(
        layer=family.layer,
        num_layers_key=family.num_layers_key,
        linears_by_input=tuple(_stored(projection) for projection in family.dense),
        layer_tensors=(
            *(f"{norm.name}.weight" for norm in family.norms),
            *biases,
            *((f"{experts.router}.weight",) if experts else ()),
        ),
        scale_pairs=tuple(_scale_pairs(family)),
        norm_offset=family.norm_offset,
        # a router reads the residual stream, and a norm after a linear stands in its way
        rotatable=not experts and all(n.feeds or n.size == "head_dim" for n in family.norms),
        family=family,
        experts_module=experts.module if experts else "",
        renormalized=bool(experts and experts.renormalized),
        expert_linears_by_input=(
            (_stored(experts.gate_up), _stored(experts.down)) if experts else ()
        ),
        embedding=family.embedding,
        last_norm=family.last_norm,
        head=family.head,
    )


def _stored(projection: Projection) -> tuple[str, ...]:
    """The names of its linears."""
    return tuple(linear.name for linear in projection.linears)


def _scale_pairs(family: Family) -> Iterator[ScalePair]:
    """In the order they run. Of experts none: the router reads their input too, in float."""
    norm_of = {norm.feeds: norm.name for norm in family.norms}
    if family.qkv.name in norm_of:
        yield ScalePair(previous=norm_of[family.qkv.name], linears=_stored(family.qkv), kind="norm")
    yield ScalePair(previous=_stored(family.qkv)[-1], linears=_stored(family.o), kind="values")
    if family.experts:
        return
    gate_up = _stored(family.gate_up)
    if family.gate_up.name in norm_of:
        yield ScalePair(previous=norm_of[family.gate_up.name], linears=gate_up, kind="norm")
    yield ScalePair(previous=gate_up[-1], linears=_stored(family.down), kind="up")


def find_layer_map(config: dict[str, Any]) -> LayerMap:
    """That of config.json's architecture. Raises InputError where there is none."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in FAMILIES:
        raise InputError(
            f"architecture {name!r}",
            f"unknown; known: {', '.join(FAMILIES)}",
            "a family is a row of FAMILIES in formats/families.py",
        )
    return layer_map(FAMILIES[name])
