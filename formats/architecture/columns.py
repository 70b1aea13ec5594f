"""Values of a family's row for norms, blocks, positions, indexers and MTP layers."""

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
    """Norm of a layer. The family states its kind and whether it has a bias."""

    name: str
    size: str = "hidden_size"
    # projection or module that reads the norm (in a parallel block, the first one); empty: the
    # norm comes after a block
    feeds: str = ""
    present: Flag = True
    offset: float | None = None  # instead of the family's norm_offset
    layers: Literal["all", "attention", "states", "experts"] = "all"  # layers that have it

    @property
    def of_attention(self) -> bool:
        return self.name.startswith(f"{ATTENTION}.")

    def is_in(self, blocks: "Blocks") -> bool:
        """Return True if a layer with these blocks has the norm."""
        if self.of_attention or self.layers == "attention":
            return blocks.attention
        if self.layers == "experts":
            return blocks.experts
        return self.layers == "all" or blocks.state


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """The blocks of one layer."""

    attention: bool = True
    state: bool = False  # a recurrent mixer, instead of or next to attention
    dense: bool = False  # a feed-forward without experts
    experts: bool = False
    layer_input: bool = False  # the block that adds a per-layer embedding (LayerInputs)


def lone_block(config: Mapping[str, Any], layer: int) -> Blocks:
    """Return the single block of a layer. Raises CheckpointError for an unknown kind."""
    kinds = config.get("layer_types")
    kind = kinds[layer] if isinstance(kinds, list) and layer < len(kinds) else None
    kinds_known = ("linear_attention", "full_attention", "mlp", "moe")
    if kind not in kinds_known:
        raise CheckpointError(
            f"config.json layer_types[{layer}]",
            f"expected one of {', '.join(kinds_known)}, found {kind!r:.100}",
            "copy config.json from the float model",
        )
    state, attention, dense, experts = (kind == each for each in kinds_known)
    return Blocks(state=state, attention=attention, dense=dense, experts=experts)


# Kinds of layers if layers differ in their heads: "global" for full attention, else "local".
HeadsKind = Literal["global", "local"]


class LayerKind(NamedTuple):
    """Kind of one layer, if layers differ in their heads."""

    full: bool  # the fields of Family.full_layers apply
    shared: bool  # the layer reads keys and values of an earlier layer


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """Per-layer embeddings: each layer has its own input for each token.

    The input of a layer is its part of a table's row plus its part of a product with the token's
    embedding. The layer gates the input by the residual stream and adds a projection of the result.
    """

    width_key: str  # key of config.json
    table: str  # [tokens, layers width]
    model_projection: str  # linear [layers width, hidden_size], in float
    model_norm: str  # norm of each layer's part of the product
    gate: Projection  # this and the following are named below a layer
    projection: Projection
    norm: str  # norm of the projection's output; listed in the family's norms

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
    """Indexer of sparse attention: selects the keys that a query of latent attention attends to.

    The indexer is never quantized here.
    """

    module: str  # below a layer
    queries: Projection
    keys: Projection
    weights: Projection  # projection to the weights of heads
    norm: str  # norm of keys, with a bias
    count_key: str  # key of config.json: number of keys that a query sees
    # key of config.json: list with "full" for each layer with an indexer; empty: all layers have it
    kinds_key: str = ""
    kind: str = "full"  # the entry of layers with an indexer
    # Layers without an indexer attend to the keys that an earlier layer's indexer selected; False:
    # to those in their window.
    shared: bool = True
    interleaved: bool = False  # interleaved RoPE in the indexer; attention may differ

    def is_in(self, layer: int | None, config: Mapping[str, Any]) -> bool:
        """Return True if a layer has an indexer.

        Draft layers, which config.json does not list, have one.
        """
        kinds = config.get(self.kinds_key)
        if layer is None or not isinstance(kinds, list) or layer >= len(kinds):
            return True
        return kinds[layer] == self.kind

    @property
    def tensors(self) -> dict[str, Shape]:
        """Return the indexer's tensors, by name below a layer."""
        projections = (self.queries, self.keys, self.weights)
        linears = [linear for each in projections for linear in each.linears]
        norms = {f"{self.norm}.{leaf}": (("index_head_dim",),) for leaf in ("weight", "bias")}
        return {f"{linear.name}.weight": linear.shape for linear in linears} | norms


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockIndexer:
    """Indexer of sparse attention: selects the blocks of keys that a query attends to (MiniMax-M3).

    Each KV head has one head of the indexer. The indexer is never quantized here.
    """

    queries: Projection
    keys: Projection
    query_norm: str
    key_norm: str
    layer_type: str  # value of layer_types in layers that have an indexer
    # keys of config.json: tokens of a block, blocks that a query sees, and how many of these are
    # its own block and those directly before it
    block_size_key: str = "index_block_size"
    count_key: str = "index_topk_blocks"
    local_key: str = "index_local_blocks"

    def is_in(self, layer: int | None, config: Mapping[str, Any]) -> bool:
        """Return True if a layer has an indexer; without one, its queries see all keys."""
        kinds = config.get("layer_types")
        if layer is None or not isinstance(kinds, list) or layer >= len(kinds):
            return False
        return kinds[layer] == self.layer_type

    def most_keys(self, config: Mapping[str, Any]) -> int:
        """Return the number of keys up to which queries see all keys."""
        return config[self.block_size_key] * config[self.count_key]

    @property
    def linears(self) -> tuple[str, ...]:
        """Names of the indexer's linears below a layer."""
        return tuple(each.name for each in (self.queries, self.keys))

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the indexer's linears and norms below a layer."""
        return (*self.linears, self.query_norm, self.key_norm)

    @property
    def tensors(self) -> dict[str, Shape]:
        """Return the indexer's tensors, by name below a layer."""
        linears = [linear for each in (self.queries, self.keys) for linear in each.linears]
        shapes = {f"{linear.name}.weight": linear.shape for linear in linears}
        norms = (self.query_norm, self.key_norm)
        return shapes | {f"{norm}.weight": (("index_head_dim",),) for norm in norms}


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """Position embeddings, which are added to token embeddings.

    They are learned, or sinusoids (numerics/sinusoids.py). The table has `offset` rows before
    position 0.
    """

    name: str = ""  # name of the table; empty: sinusoids, which no file holds
    offset: int = 0
    length_key: str = "max_position_embeddings"  # key of config.json: table rows minus the offset


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigRules:
    """Rules of transformers for keys that a config.json leaves out."""

    may_be_null: tuple[str, ...] = ()
    # default by key; otherwise KV heads equal heads, and head_dim is hidden_size / heads
    defaults: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftNames:
    """Names of the tensors of an MTP layer (next_token.py), below its prefix."""

    # Prefix of the decoder layer, ending in a dot. Empty: the decoder layer has no separate prefix,
    # and its number follows the model's layers.
    layer: str = ""
    count_key: str = ""  # with `layer`: key of config.json, number of MTP layers; missing: 1
    embedding_norm: str = "enorm.weight"
    state_norm: str = "hnorm.weight"
    projection: str = "eh_proj"  # reads the embedding, then the state
    last_norm: str = "shared_head.norm.weight"
    # Copies of the model's tensors; if they are missing, or "", the model's tensors are used.
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
