"""LayerMap: the structure of a model family for quantization, built from formats/families.py.

It lists a layer's linears in the order they run. Linears that share an input are listed together,
because they share its statistics. It also lists where scale factors can be moved (ScalePair).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from formats.architecture.experts import Experts
from formats.architecture.family import Family
from formats.architecture.flags import is_set
from formats.architecture.float_linears import kept_in_float, routing_linears
from formats.architecture.projection import Projection
from formats.architecture.refused import check_not_refused
from formats.architecture.sizes import num_experts_key, stated_size
from formats.architecture.variant_check import check_variant
from formats.errors import InputError
from formats.families import FAMILIES

FIX_CONFIG = "fix config.json"  # remedy: the folder is the float model itself


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePair:
    """Modules between which a factor per channel can move: from `linears`' inputs to `previous`.

    `previous` is a norm, or a linear whose last outputs are the inputs of `linears`.
    """

    previous: str
    linears: tuple[str, ...]
    # Type of `previous`. "norm": a norm with one weight per channel. "values": v_proj; several
    # query heads read each of its heads. "up": the linear whose output is multiplied by the gate,
    # or passed to ReLU.
    kind: str
    # Linears of an indexer that read the same input. They stay in float, and take the factors, too.
    in_float: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMap:
    """Tensor names of one architecture. Names of tensors in a layer lack the layer's prefix."""

    layer: str
    num_layers_key: str  # in config.json
    layer_tensors: tuple[str, ...]  # required tensors of a layer, besides the linears' weights
    norm_offset: float  # a norm multiplies by (offset + weight)
    rotatable: bool  # no norm or gate between a linear's output and the residual stream
    family: Family
    embedding: str
    last_norm: str
    head: str

    def prefix(self, layer: int) -> str:
        return self.layer.format(i=layer)

    @property
    def experts(self) -> Experts | None:
        """Description of the family's routed experts, or None if it has none."""
        return self.family.experts

    def has_experts(self, config: dict[str, Any], layer: int) -> bool:
        """True if a layer has experts."""
        return self.experts is not None and self.experts.is_in(layer, config)

    def has_own_linears(self, config: dict[str, Any], layer: int) -> bool:
        """True if the layer's experts have one tensor per matrix."""
        return self.has_experts(config, layer) and not self.experts.fused

    def has_state(self, config: dict[str, Any], layer: int) -> bool:
        """True if a layer has a recurrent state instead of attention."""
        return self.family.has_state(layer, config)

    def inputs(self, config: dict[str, Any], layer: int) -> tuple[tuple[str, ...], ...]:
        """Local names of a layer's linears in the order they run, grouped by input."""
        count = self.num_experts(config) if self.has_own_linears(config, layer) else 0
        row = self.family.of_layer(layer, config)
        readers = row.first_projections(config, layer)
        others = [p for p in row.projections(row.blocks(config, layer), count) if p not in readers]
        first = tuple(name for projection in readers for name in _stored(projection))
        return (*([first] if first else []), *map(_stored, others))

    @property
    def expert_modules(self) -> str:
        """Prefix of the local names of experts' linears; empty if there are none."""
        return f"{self.experts.stem}." if self.experts else ""

    def expert_kind(self, local: str) -> str | None:
        """Return the name of a linear within its expert, such as down_proj, or None."""
        if not self.experts or not local.startswith(self.expert_modules):
            return None
        number, _, kind = local.removeprefix(self.expert_modules).partition(".")
        return kind if number.isdecimal() else None

    def reads_experts_input(self, local: str) -> bool:
        """Return True for an expert's linear with the same input as the router."""
        kind = self.expert_kind(local)
        if kind is None:
            return False
        return any(
            linear.name.rpartition(".")[2] == kind for linear in self.experts.gate_up.linears
        )

    def is_for_media(self, config: dict[str, Any], local: str) -> bool:
        """Return True for a linear of an expert that sees only tokens of images and videos."""
        if self.expert_kind(local) is None or not self.experts.media_inner:
            return False
        number = int(local.removeprefix(self.expert_modules).partition(".")[0])
        return number >= self.num_experts(config) // 2

    def kept_in_float(self, config: dict[str, Any]) -> dict[str, str]:
        """Return the reason by full name for linears that stay in float by default."""
        return kept_in_float(self.family, config)

    def routing_linears(self, config: dict[str, Any]) -> dict[str, str]:
        """Return the reason by full name for linears that are never quantized, such as routers."""
        return routing_linears(self.family, config)

    def scale_pairs(self, config: dict[str, Any], layer: int) -> tuple[ScalePair, ...]:
        """Return the scale pairs of a layer, in the order they run."""
        return tuple(_scale_pairs(self.family.of_layer(layer, config), config, layer))

    def required_in_layer(self, config: dict[str, Any], layer: int) -> tuple[str, ...]:
        """Required tensors of a layer besides the linears' weights; others are kept if present."""
        names, blocks = self.layer_tensors, self.family.blocks(config, layer)
        row = self.family.of_layer(layer, config)
        own = {norm.name for norm in row.norms if norm.is_in(blocks)}
        lacking = tuple(f"{norm.name}." for norm in self.family.norms if norm.name not in own)
        names = [name for name in names if not name.startswith(lacking)] if lacking else names
        if not blocks.attention:
            biases = tuple(f"{linear.name}.bias" for linear in self.family.linears)
            names = [name for name in names if name not in biases]
        if blocks.state:
            names = (*names, *row.state_mixer.tensors(config))
        if blocks.dense:
            names = (*names, *row.dense_tensors)
        names = (*names, *row.tensors_of_kind(config, layer))
        if not self.has_experts(config, layer):
            return names
        return (*names, *self.experts.tensors(config, layer))

    def linear_names(self, layer: int, config: dict[str, Any]) -> list[str]:
        """Full names of a layer's linears, in the order they run."""
        prefix = self.prefix(layer)
        return [f"{prefix}.{local}" for group in self.inputs(config, layer) for local in group]

    def num_experts(self, config: dict[str, Any]) -> int:
        """Return the number of experts per layer. Raises CheckpointError if none is stated."""
        return stated_size(config, num_experts_key(config), FIX_CONFIG)

    def num_layers(self, config: dict[str, Any]) -> int:
        return stated_size(config, self.num_layers_key, FIX_CONFIG)

    def tied_head(self, config: dict[str, Any]) -> str | None:
        """Return the head's name if it is tied to the embedding (a copy is ignored), else None."""
        return self.head if self.family.is_tied(config) else None

    def required_tensors(self, config: dict[str, Any]) -> list[str]:
        """Every tensor that a float checkpoint of this architecture must hold."""
        names = []
        for layer in range(self.num_layers(config)):
            names += [f"{name}.weight" for name in self.linear_names(layer, config)]
            required = self.required_in_layer(config, layer)
            names += [f"{self.prefix(layer)}.{local}" for local in required]
        names += [n for n in self.family.model_tensors if n != self.head]
        return names if self.tied_head(config) else [*names, self.head]


def layer_map(family: Family) -> LayerMap:
    """Build the layer map of a family's row."""
    # Biases that config.json switches on are kept if present.
    biases = [f"{linear.name}.bias" for linear in family.linears if linear.bias is True]
    return LayerMap(
        layer=family.layer,
        num_layers_key=family.num_layers_key,
        layer_tensors=(
            *(
                f"{norm.name}.weight"
                for norm in family.norms
                if family.norm_weights and norm.present is True
            ),
            *(
                f"{norm.name}.bias"
                for norm in family.norms
                if family.norm_bias and norm.present is True
            ),
            *biases,
            *([family.layer_scalar] if family.layer_scalar else []),
            *(name for name, _ in family.activation_tensors.values()),
        ),
        norm_offset=family.norm_offset,
        # Rotations of the residual stream are not possible with a router, which reads the stream; a
        # norm between a linear and the stream; gates that multiply channels; or a layer norm, which
        # subtracts the channels' mean.
        rotatable=family.norm_kind == "rms"
        and not (family.experts or family.state_mixer or family.gated_attention or family.latent)
        and all(n.feeds or n.size == "head_dim" for n in family.norms),
        family=family,
        embedding=family.embedding,
        last_norm=family.last_norm,
        head=family.head,
    )


def _stored(projection: Projection) -> tuple[str, ...]:
    """Names of a projection's linears."""
    return tuple(linear.name for linear in projection.linears)


def _scale_pairs(family: Family, config: Mapping[str, Any], layer: int) -> Iterator[ScalePair]:
    """Yield the scale pairs of a layer in the order they run.

    Experts have none, because the router reads their input in float; nor have the norms that feed
    both experts and attention.
    """
    blocks = family.blocks(config, layer)
    norm_of = {
        norm.feeds: norm.name
        for norm in family.norms
        if is_set(norm.present, config) and norm.is_in(blocks)
    }
    feeds_router = blocks.experts and is_set(family.parallel, config)
    if family.qkv.name in norm_of and not feeds_router:
        readers = family.first_projections(config, layer)
        linears = tuple(name for projection in readers for name in _stored(projection))
        if linears:
            yield ScalePair(
                previous=norm_of[family.qkv.name],
                linears=linears,
                kind="norm",
                in_float=_of_indexers(family, config, layer, family.qkv.inputs),
            )
    if blocks.attention:
        for each in family.latent:
            yield ScalePair(
                previous=norm_of[each.name],
                linears=_stored(each),
                kind="norm",
                in_float=_of_indexers(family, config, layer, each.inputs),
            )
        # Not where v is stored by head next to k (latent attention), and not with a norm on values,
        # which would undo the factors.
        mixes_heads = family.qkv.by_head or family.qkv.blocks
        mixes_heads = mixes_heads or family.latent or family.query_up
        if not (mixes_heads or family.value_norm):
            values = _stored(family.qkv)[-1]
            yield ScalePair(previous=values, linears=_stored(family.o), kind="values")
    if not blocks.dense or (family.experts and not family.experts.with_dense):
        return
    gate_up = _stored(family.gate_up)
    if family.gate_up.name in norm_of:
        yield ScalePair(previous=norm_of[family.gate_up.name], linears=gate_up, kind="norm")
    # Without a gate, a factor commutes with the activation only if it is ReLU (positive factors).
    activation = config.get(family.activation_key, family.activations[0])
    if family.gated or activation == "relu":
        yield ScalePair(previous=gate_up[-1], linears=_stored(family.down), kind="up")


def _of_indexers(
    family: Family, config: Mapping[str, Any], layer: int, inputs: str
) -> tuple[str, ...]:
    """Return the linears of a layer's indexer whose input has the size `inputs`."""
    readers: tuple[Projection, ...] = ()
    if family.indexer is not None and family.indexer.is_in(layer, config):
        readers = (family.indexer.queries, family.indexer.keys, family.indexer.weights)
    if family.block_indexer is not None and family.block_indexer.is_in(layer, config):
        readers = (family.block_indexer.queries, family.block_indexer.keys)
    return tuple(name for each in readers if each.inputs == inputs for name in _stored(each))


def find_layer_map(config: dict[str, Any]) -> LayerMap:
    """Return the layer map of config.json's architecture. Raises InputError if it is unknown."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in FAMILIES:
        check_not_refused(config)
        raise InputError(
            "config.json architectures",
            f"expected one of {len(FAMILIES)} supported architectures, found {names!r:.200}",
            "`qserve families` lists them",
        )
    family = FAMILIES[name].variant(config)
    check_variant(family, config)
    return layer_map(family)
