"""What quantizing a model asks of its family: linears by input, and where factors can move.

Made from the family's row in formats/families.py. Linears are listed in the order they run, those
that share an input together: they will share that input's statistics. Knows names, not weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from formats.errors import CheckpointError, InputError
from formats.families import FAMILIES
from formats.family import NUM_EXPERTS_KEYS, Experts, Family, Projection


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
    layer_tensors: tuple[
        str, ...
    ]  # besides the linears' weights; others are kept if they are there
    norm_offset: float  # a norm multiplies by (offset + weight)
    rotatable: bool  # nothing stands between a linear's output and the residual stream
    family: Family
    embedding: str
    last_norm: str
    head: str

    def prefix(self, layer: int) -> str:
        return self.layer.format(i=layer)

    @property
    def experts(self) -> Experts | None:
        """What stands in place of the feed-forward in some layers or all; None: in none."""
        return self.family.experts

    def has_experts(self, config: dict[str, Any], layer: int) -> bool:
        """Whether a layer has experts in place of a dense feed-forward."""
        return self.experts is not None and self.experts.stand_in(layer, config)

    def has_own_linears(self, config: dict[str, Any], layer: int) -> bool:
        """Whether the layer has experts whose matrices are tensors of their own."""
        return self.has_experts(config, layer) and not self.experts.fused

    def has_state(self, config: dict[str, Any], layer: int) -> bool:
        """Whether a layer has a state in place of attention."""
        return self.family.has_state(layer, config)

    def inputs(self, config: dict[str, Any], layer: int) -> tuple[tuple[str, ...], ...]:
        """Local names of a layer's linears in the order they run; those of one input together."""
        dense = not self.has_experts(config, layer)
        count = self.num_experts(config) if self.has_own_linears(config, layer) else 0
        has_state = self.has_state(config, layer)
        groups = tuple(map(_stored, self.family.projections(count, dense, has_state)))
        if has_state:  # what makes queries, keys and values, and its gates
            return ((*groups[0], *groups[1]), *groups[2:])
        return groups

    def kept_in_float(self, config: dict[str, Any]) -> dict[str, str]:
        """Full names of linears that nobody quantizes unasked, and why."""
        net, found = self.family.delta_net, {}
        for layer in range(self.num_layers(config)):
            if self.has_state(config, layer):
                names = [f"{self.prefix(layer)}.{local}" for local in _stored(net.gates)]
                found |= dict.fromkeys(names, net.gates.float_because)
        return found

    def scale_pairs(self, config: dict[str, Any], layer: int) -> tuple[ScalePair, ...]:
        """Where factors of a layer can move, in the order they run."""
        return tuple(_scale_pairs(self.family, self.has_state(config, layer)))

    def required_in_layer(self, config: dict[str, Any], layer: int) -> tuple[str, ...]:
        """Its tensors besides the linears' weights; others are kept if they are there."""
        names = self.layer_tensors
        if self.has_state(config, layer):
            of_attention = tuple(f"{norm.name}." for norm in self.family.norms if norm.of_attention)
            biases = tuple(f"{linear.name}.bias" for linear in self.family.linears)
            names = [n for n in names if not n.startswith(of_attention) and n not in biases]
            names += self.family.delta_net.tensors
        if not self.has_experts(config, layer):
            return tuple(names)
        return (*names, *self.experts.tensors(config))

    def linear_names(self, layer: int, config: dict[str, Any]) -> list[str]:
        """Full names of a layer's linears, in the order they run."""
        prefix = self.prefix(layer)
        return [f"{prefix}.{local}" for group in self.inputs(config, layer) for local in group]

    def num_experts(self, config: dict[str, Any]) -> int:
        """Of one layer; config.json calls it one thing or the other, whatever the architecture."""
        return _positive(config, next((k for k in NUM_EXPERTS_KEYS if k in config), "num_experts"))

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
            required = self.required_in_layer(config, layer)
            names += [f"{self.prefix(layer)}.{local}" for local in required]
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
    return LayerMap(
        layer=family.layer,
        num_layers_key=family.num_layers_key,
        layer_tensors=(
            *(f"{norm.name}.weight" for norm in family.norms if norm.present is True),
            *biases,
        ),
        norm_offset=family.norm_offset,
        # a router reads the residual stream, a norm after a linear stands in its way, and so does
        # what multiplies values channel by channel
        rotatable=not (family.experts or family.delta_net or family.gated_attention)
        and all(n.feeds or n.size == "head_dim" for n in family.norms),
        family=family,
        embedding=family.embedding,
        last_norm=family.last_norm,
        head=family.head,
    )


def _stored(projection: Projection) -> tuple[str, ...]:
    """The names of its linears."""
    return tuple(linear.name for linear in projection.linears)


def _scale_pairs(family: Family, has_state: bool) -> Iterator[ScalePair]:
    """In the order they run. Of experts none: the router reads their input too, in float."""
    norm_of = {norm.feeds: norm.name for norm in family.norms}
    if has_state:
        net = family.delta_net
        linears = (*_stored(net.inputs), *_stored(net.gates))
        yield ScalePair(previous=norm_of[family.qkv.name], linears=linears, kind="norm")
    else:
        if family.qkv.name in norm_of:
            linears = _stored(family.qkv)
            yield ScalePair(previous=norm_of[family.qkv.name], linears=linears, kind="norm")
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
