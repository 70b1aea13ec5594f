"""Values of a family's row besides projections, experts and states: norms, blocks, positions,
names of MTP layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from formats.architecture.flags import Flag
from formats.architecture.projection import Projection, Shape
from formats.errors import CheckpointError

ATTENTION = "self_attn"  # module of a layer that holds its KV scales
KEY_NORM = f"{ATTENTION}.k_norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """Norm of a layer. Its kind, and whether it has a bias, are fields of the family."""

    name: str
    size: str = "hidden_size"
    # the projection or module that reads it (the first one in a parallel block); empty: after
    # one
    feeds: str = ""
    present: Flag = True
    layers: Literal["all", "attention", "states"] = "all"  # layers that have it

    @property
    def of_attention(self) -> bool:
        return self.name.startswith(f"{ATTENTION}.")

    def is_in(self, blocks: "Blocks") -> bool:
        """Return True if a layer with these blocks has the norm."""
        if self.of_attention or self.layers == "attention":
            return blocks.attention
        return self.layers == "all" or blocks.state


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Blocks of one layer."""

    attention: bool = True
    state: bool = False  # a mixer with a state, instead of or next to attention
    dense: bool = False  # a feed-forward without experts
    experts: bool = False
    layer_input: bool = False  # what adds the layer's own input (LayerInputs)


def lone_block(config: Mapping[str, Any], layer: int) -> Blocks:
    """Return the one block of a layer. Raises CheckpointError for a kind that is not known."""
    kinds = config.get("layer_types")
    kind = kinds[layer] if isinstance(kinds, list) and layer < len(kinds) else None
    kinds_known = ("linear_attention", "full_attention", "mlp", "moe")
    if kind not in kinds_known:
        raise CheckpointError(
            f"config.json kind of layer {layer}",
            f"expected one of {', '.join(kinds_known)}, found {kind!r:.100}",
        )
    state, attention, dense, experts = (kind == each for each in kinds_known)
    return Blocks(state=state, attention=attention, dense=dense, experts=experts)


# of layers in families whose layers have different heads: with full attention, and others
HeadsKind = Literal["global", "local"]


class LayerKind(NamedTuple):
    """Kind of one layer, where layers differ in their heads."""

    full: bool  # it has the fields of Family.full_layers
    shared: bool  # it reads keys and values of an earlier layer


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """Per-layer embeddings: each layer has an input of its own for each token.

    The inputs of all layers are rows of a table, plus a product of the token's embedding. A layer
    gates its input by the residual stream, and adds a projection of it.
    """

    width_key: str  # key of config.json
    table: str  # [tokens, layers width]
    model_projection: str  # linear [layers width, hidden_size], in float
    model_norm: str  # norm of each layer's part of that product
    gate: Projection  # the following are below a layer
    projection: Projection
    norm: str  # of the projection; one of the norms of the row

    @property
    def tensors(self) -> dict[str, Shape]:
        """Return the tensors outside of layers."""
        return {
            self.table: (("vocab_size_per_layer_input",), ("layer_inputs",)),
            f"{self.model_projection}.weight": (("layer_inputs",), ("hidden_size",)),
            self.model_norm: ((self.width_key,),),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """Selects the keys that queries of latent attention see; never quantized here."""

    module: str  # below a layer
    queries: Projection
    keys: Projection
    weights: Projection  # of heads
    norm: str  # of keys, with a bias
    count_key: str  # key of config.json: keys that a query sees
    # key of config.json: "full" for each layer with an indexer; empty: all layers have one
    kinds_key: str = ""
    interleaved: bool = False  # pairs of its rotation, whatever those of attention are

    def is_in(self, layer: int | None, config: Mapping[str, Any]) -> bool:
        """Return True if a layer has an indexer; else it sees what an earlier layer selected.

        Layers that config.json does not list, for drafts, have one.
        """
        kinds = config.get(self.kinds_key)
        if layer is None or not isinstance(kinds, list) or layer >= len(kinds):
            return True
        return kinds[layer] == "full"

    @property
    def tensors(self) -> dict[str, Shape]:
        """Return its tensors below a layer."""
        projections = (self.queries, self.keys, self.weights)
        linears = [linear for each in projections for linear in each.linears]
        norms = {f"{self.norm}.{leaf}": (("index_head_dim",),) for leaf in ("weight", "bias")}
        return {f"{linear.name}.weight": linear.shape for linear in linears} | norms


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """Position embeddings that are added to tokens', in a table with `offset` rows before position
    0: learned, or sinusoids (numerics/sinusoids.py).
    """

    name: str = ""  # name of the table; empty: sinusoids, which no file holds
    offset: int = 0
    length_key: str = "max_position_embeddings"  # key of config.json: rows without the offset


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigRules:
    """transformers' rules for keys that a config.json leaves out."""

    may_be_null: tuple[str, ...] = ()
    # Default by key. Without one, KV heads equal heads and head_dim is hidden_size / heads.
    defaults: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftNames:
    """Names of the tensors of an MTP layer (next_token.py), below its prefix."""

    # Prefix of the decoder layer, which ends in a dot. Empty: the decoder layer has no prefix of
    # its own, and follows the model's layers in number.
    layer: str = ""
    count_key: str = ""  # of config.json, with `layer`: number of MTP layers; 1 if it is absent
    embedding_norm: str = "enorm.weight"
    state_norm: str = "hnorm.weight"
    projection: str = "eh_proj"  # the embedding comes first
    last_norm: str = "shared_head.norm.weight"
    # Copies of the model's own tensors, which are used if these are missing. Empty: always.
    head: str = "shared_head.head"
    embedding: str = "embed_tokens.weight"


LAST_LAYER = DraftNames()  # DeepSeek-V3, GLM-4.5
QWEN_MTP = DraftNames(
    layer="layers.0.",
    count_key="mtp_num_hidden_layers",
    embedding_norm="pre_fc_norm_embedding.weight",
    state_norm="pre_fc_norm_hidden.weight",
    projection="fc",
    last_norm="norm.weight",
    head="",
    embedding="",
)
