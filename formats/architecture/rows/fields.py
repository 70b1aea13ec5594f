"""Fields of a family's row: names, shapes, biases, norms, rotary embeddings and others.

Needs no torch. Sizes have the names of config.json; "q" and "kv" are head_dim times the number of
query or KV heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from formats.architecture.columns import (
    LAST_LAYER,
    BlockIndexer,
    ConfigRules,
    DraftNames,
    Indexer,
    LayerInputs,
    Norm,
    Positions,
)
from formats.architecture.experts import Experts
from formats.architecture.flags import Flag
from formats.architecture.projection import Projection, Shape
from formats.architecture.states.mixer import StateMixer

HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyFields:
    """The fields of one row of the table of families."""

    architecture: str
    title: str  # name that is shown to users
    model_type: str
    builder: str = ""  # module of qserve/model/families that builds it; empty: not served
    qkv: Projection
    o: Projection
    # Latent attention: projections between qkv, which computes latents, and o
    # (rows/latent_parts.py). Queries and values have different widths; the sizes "q" and "kv" are
    # those of values.
    latent: tuple[Projection, ...] = ()
    # Linear from query latents to queries, between qkv and o, if keys and values have no latents.
    query_up: Projection | None = None
    gate_up: Projection
    down: Projection
    experts: Experts | None = None  # None: a dense feed-forward of gate_up and down
    state_mixer: StateMixer | None = None  # None: all layers have attention
    # Each layer has one block, stated in layer_types: attention, a recurrent mixer or a
    # feed-forward.
    lone_blocks: bool = False
    # The output of attention has a gate. q_proj computes each head's queries, then its gate; or a
    # separate linear computes the gates, after q.
    gated_attention: bool = False
    # Linear with qkv's input that computes a gate for each head's output. It stays in float.
    head_gates: Projection | None = None
    gate_activation: Literal["softplus", "sigmoid"] = "softplus"  # activation of head_gates
    sinks: str = ""  # tensor of a layer: attention sinks, one score per head
    layer_scalar: str = ""  # tensor of a layer: factor of the layer's output
    # Tensors of a layer with learned numbers of the activation or of other blocks, by the name
    # that the block uses.
    activation_tensors: Mapping[str, tuple[str, Shape]] = field(default_factory=dict)
    # Tensors of the layers of one type (`layer_types`) that stay in float, by name below the layer.
    kind_tensors: Mapping[str, Mapping[str, Shape]] = field(default_factory=dict)
    # Tensors of the layers with a dense feed-forward that stay in float, by name below the layer.
    dense_tensors: Mapping[str, Shape] = field(default_factory=dict)
    # Tensors outside of layers that merge the streams of hidden states, by the name that the block
    # uses; empty: no hyper-connections.
    merge_tensors: Mapping[str, tuple[str, Shape]] = field(default_factory=dict)
    value_factor_key: str = ""  # key of config.json: factor of the values
    # Tensors of a layer, by the name that attention uses: weights of norms of queries and keys, if
    # each head has its own.
    head_norms: Mapping[str, tuple[str, Shape]] = field(default_factory=dict)
    value_norm: bool = False  # values are normalized per head, without weights
    # Fields that differ in layers with full attention (`layer_types`). The size of their heads is
    # "global_head_dim".
    full_layers: Mapping[str, Any] = field(default_factory=dict)
    full_type: str = "full_attention"  # entry of layer_types of such layers
    keys_are_values: Flag = False  # in full layers, keys are also values: qkv has no v
    # Key of config.json: number of last layers without keys and values, which read those of the
    # last earlier layer of their type.
    shared_layers_key: str = ""
    wide_shared: Flag = False  # the feed-forward of these layers is twice as wide
    layer_inputs: LayerInputs | None = None  # None: layers read only the residual stream
    indexer: Indexer | None = None  # indexer of latent attention; None: queries see all keys
    # indexer of attention with KV heads; None: queries see all keys
    block_indexer: BlockIndexer | None = None
    # This row's names of modules and tensors of a layer -> transformers' names, if they differ.
    # Experts are left out, because calibration has separate modules for them.
    names_in_transformers: Mapping[str, str] = field(default_factory=dict)
    # transformers' tensor of a layer -> this row's tensors that are its parts, in order
    joined_in_transformers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    class_in_transformers: str = ""  # a class next to those of layers; empty: the architecture's
    # If transformers has no class: model_type whose config class fills in defaults. Calibration
    # then builds the layers from this row.
    defaults_of: str = ""
    float_linears: tuple[str, ...] = ()  # other linears of a layer, which are never quantized
    # Names of the matrices [hidden_size, hidden_size], numbered from 0, that compute the other
    # streams of hidden states from embeddings, and of those that map back; empty: one stream.
    streams: tuple[str, ...] = ()
    gated: bool = True  # gate_up computes gate and up; down reads activation(gate) * up
    # Attention and feed-forward read the same norm, and both outputs are added to the norm's input.
    # The norm's `feeds` is the projection of attention.
    parallel: Flag = False
    norms: tuple[Norm, ...]
    norm_kind: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    norm_weights: bool = True  # False: norms have no weights
    norm_eps_key: str = "rms_norm_eps"  # key of config.json; empty: 1e-5, torch's default
    norm_offset: float = 0.0  # a norm multiplies by (offset + weight)
    float32_norms: bool = False  # norm weights are float32, and the result is rounded once
    activation_key: str = "hidden_act"  # key of config.json; empty: always the default
    activations: tuple[str, ...] = ("silu",)  # supported activations, the default first
    # Key of config.json with an activation limit (ActSpec) for each layer; 0 or null: no limit. It
    # covers shared experts; the limits of routed experts are under Experts.limits_key.
    limits_key: str = ""
    inner_key: str = "intermediate_size"  # key of config.json; shapes call it intermediate_size
    window: Literal["none", "all", "layer_types"] = "none"  # layers with a sliding window
    # Layers with rotary embeddings. "windows": layers with a sliding window, or all layers if none
    # has a window. "rope_theta": all layers if rope_parameters has a theta and a type, else none.
    rope: Literal[
        "all", "none", "no_rope_layers", "windows", "position_embedding_type", "rope_theta"
    ] = "all"
    # type of layer -> its key in rope_parameters, if the types differ
    rope_keys: Mapping[str, str] = field(default_factory=dict)
    theta_key: str = ""  # key of config.json: theta of each layer; 0: the layer does not rotate
    rotary_dim_key: str = ""  # key of config.json: rotated channels of a head, with theta 10,000
    interleaved_rope: Flag = False  # channels 2 i and 2 i + 1 form a pair, not i and i + half
    reversed_rope: bool = False  # pairs rotate in the opposite direction
    alibi: bool = False  # attention has ALiBi biases (numerics/alibi.py)
    scaled_alibi: bool = False  # ALiBi biases are multiplied by the scale of scores
    embedding_norm: str = ""  # norm of embeddings, of the family's kind
    plain_embedding_norm: bool = False  # embeddings have a norm without weights
    embedding_times_root: Flag = False  # embeddings are multiplied by sqrt(hidden_size)
    embedding_factor_key: str = ""  # key of config.json: factor of the embeddings
    positions: Positions | None = None  # position table added to embeddings; None: none
    logits_divisor_key: str = ""  # key of config.json: divisor of the logits
    logits_factor_key: str = ""  # key of config.json: factor of the logits
    # Keys of config.json -> the only supported value, which missing keys also have. A tuple holds
    # several values. A dot in a key leads into a part of config.json.
    fixed: Mapping[str, Any] = field(default_factory=dict)
    like_hidden_size: tuple[str, ...] = ()  # keys that must equal hidden_size if they are present
    logits_cap_key: str = ""  # key of config.json: cap of logits, cap * tanh(logits / cap)
    tied: bool = False  # default of tie_word_embeddings
    float16: bool = True  # activations stay within float16's range
    rules: ConfigRules | None = None  # None: `inspect` does not check its config and tensors
    # How files differ from the canonical form (stored_form/).
    config_keys: Mapping[str, str] = field(default_factory=dict)  # canonical key -> key in the file
    left_out_prefix: str = ""  # prefix of tensor names that some files leave out
    other_names: Mapping[str, str] = field(default_factory=dict)  # name in some files -> module
    other_tensors: Mapping[str, str] = field(default_factory=dict)  # the same, below a layer
    transposed: bool = False  # weights of a layer are stored as [inputs, outputs]
    masks: tuple[str, ...] = ()  # tensors of a layer with masks or tables, which are computed here
    layer: str = "model.layers.{i}"
    layer_in_transformers: str = ""  # where a layer is in transformers' model; empty: the same
    num_layers_key: str = "num_hidden_layers"
    draft_layers_key: str = ""  # number of MTP layers after the model's layers (next_token.py)
    unread_layers_key: str = ""  # number of further layers at the end, which are not read
    draft_prefix: str = ""  # prefix of MTP tensors outside of the layers
    draft_names: DraftNames = LAST_LAYER  # names in an MTP layer; with `layer`, below draft_prefix
    embedding: str = "model.embed_tokens.weight"
    last_norm: str = "model.norm.weight"
    head: str = HEAD
    head_bias: bool = False
    normalized_head: str = ""  # key of config.json: the head is divided by its norms before use
    head_norm_dim: int = 1  # dim of these norms
    skips: bool = False  # layers mix the hidden states of earlier layers in (skip_connections.py)
    # (flag of config.json, fields that differ if it is set)
    variants: tuple[tuple[Flag, Mapping[str, Any]], ...] = ()
