"""Facts about a model family: a row of families.py, and values derived from its fields.

Needs no torch. Sizes have the names of config.json; "q" and "kv" are head_dim times the number of
query or KV heads.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from formats.architecture.columns import (
    KEY_NORM,
    Blocks,
    HeadsKind,
    LayerKind,
    lone_block,
)
from formats.architecture.flags import is_set
from formats.architecture.projection import Linear, Projection, Shape
from formats.architecture.rows.fields import FamilyFields
from formats.architecture.sizes import MAX_EXPERTS, is_size, named_sizes, num_experts
from formats.errors import CheckpointError

# Key that text_part.py adds for files whose float expert stacks may have either order of dims.
EITHER_ORDER = "expert_stacks_of_either_order"
STREAMS = 4  # streams of hidden states, in families with several
MAX_LAYERS = 10_000  # far more than any model has
# Suffixes of tensors that older tools store although every reader computes them.
DERIVED = ("rotary_emb.inv_freq",)


def architecture_of(config: Mapping[str, Any]) -> str | None:
    """Return the single architecture that config.json names; None: none or several."""
    names = config.get("architectures")
    is_one = isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)
    return names[0] if is_one else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family(FamilyFields):
    """One row of the table of families: an architecture."""

    def variant(self, config: Mapping[str, Any]) -> "Family":
        """Return the row with the fields that config.json selects."""
        for flag, different in self.variants:
            if is_set(flag, config):
                return replace(self, **different)
        return self

    def of_layer(self, layer: int | None, config: Mapping[str, Any]) -> "Family":
        """Return the row with the fields of one layer; None: a layer without special fields."""
        row, kind = self, self.kind_of_layer(layer, config)
        if kind.full:
            row = replace(row, **self.full_layers)
            if is_set(self.keys_are_values, config):
                row = replace(row, qkv=row.qkv.first_members(2))
        if not kind.shared:
            return row
        row = replace(
            row,
            qkv=row.qkv.first_members(1),
            norms=tuple(norm for norm in row.norms if norm.name != KEY_NORM),
        )
        if not is_set(self.wide_shared, config):
            return row
        usual, wide = "intermediate_size", "wide_intermediate_size"
        return replace(
            row, gate_up=row.gate_up.with_size(usual, wide), down=row.down.with_size(usual, wide)
        )

    def kind_of_layer(self, layer: int | None, config: Mapping[str, Any]) -> LayerKind:
        """Return the kind of one layer; None: a layer without special fields."""
        kinds = config.get("layer_types")
        if not self.full_layers or layer is None or not isinstance(kinds, list):
            return LayerKind(full=False, shared=False)
        return LayerKind(
            full=layer < len(kinds) and kinds[layer] == self.full_type,
            shared=layer >= self._first_shared(config),
        )

    def heads_kind(self, layer: int, config: Mapping[str, Any]) -> HeadsKind:
        """Return the prefix of the names of sizes that count the layer's heads."""
        return "global" if self.kind_of_layer(layer, config).full else "local"

    def heads_of_layer(self, layer: int, config: Mapping[str, Any]) -> tuple[int, int]:
        """Return the numbers of heads and of KV heads of a layer."""
        kind = self.heads_kind(layer, config)
        usual = config["num_attention_heads"]
        heads = config.get(f"num_{kind}_attention_heads") or usual
        kv_heads = config.get(f"num_{kind}_key_value_heads")
        return heads, kv_heads or config.get("num_key_value_heads") or usual

    def _first_shared(self, config: Mapping[str, Any]) -> int:
        """Return the first layer that reads keys and values of an earlier layer."""
        count, shared = config.get(self.num_layers_key), config.get(self.shared_layers_key)
        count = min(count, MAX_LAYERS) if is_size(count) else MAX_LAYERS
        return count - shared if is_size(shared) else count

    def kv_source(self, layer: int, config: Mapping[str, Any]) -> int | None:
        """Return the layer whose keys and values a layer reads; None: the layer's own.

        Raises CheckpointError if there is no such layer.
        """
        if not self.kind_of_layer(layer, config).shared:
            return None
        kinds, first = config["layer_types"], self._first_shared(config)
        found = [i for i in range(max(first, 0)) if kinds[i] == kinds[layer]]
        if not found:
            raise CheckpointError(
                f"config.json {self.shared_layers_key}",
                f"layer {layer} reads the keys and values of an earlier {kinds[layer]} layer, but"
                f" the first {max(first, 0)} layers have none",
                "copy it from the float model",
            )
        return found[-1]

    @property
    def served(self) -> bool:
        """Return True if qserve serves the family."""
        return bool(self.builder)

    def draft_layers(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the prefixes of draft layers, which the model itself does not use.

        All layers below draft_prefix have one prefix in common; the first of them drafts.
        """
        if self.draft_names.layer:
            count = config.get(self.draft_names.count_key, 1)
            return (self.draft_prefix,) if is_size(count) else ()
        return self._layers_after(config, self.draft_layers_key)

    def _layers_after(self, config: Mapping[str, Any], key: str) -> tuple[str, ...]:
        """Return the prefixes of as many layers after the model's as a key states."""
        first, count = config.get(self.num_layers_key), config.get(key)
        if not (is_size(first) and is_size(count)):
            return ()
        numbers = range(first, first + min(count, MAX_LAYERS))
        return tuple(f"{self.layer.format(i=number)}." for number in numbers)

    def further_layers(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the prefixes of layers after the model's that are not read, also not to draft.

        They may have other shapes.
        """
        return self._layers_after(config, self.unread_layers_key)

    def unread(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the prefixes of tensors that the model itself does not use."""
        layers = self.draft_layers(config) + self.further_layers(config)
        if self.draft_prefix:
            layers = (*layers, self.draft_prefix)
        count = config.get(self.num_layers_key)
        if not is_size(count) or not is_size(config.get(self.shared_layers_key)):
            return layers
        # published files contain these tensors all the same
        unused = [name for name, _ in self.qkv.members[1:]] + [KEY_NORM]
        numbers = range(max(self._first_shared(config), 0), min(count, MAX_LAYERS))
        return (*layers, *(f"{self.layer.format(i=i)}.{name}." for i in numbers for name in unused))

    def has_state(self, layer: int, config: Mapping[str, Any]) -> bool:
        """Return True if a layer has a recurrent state, instead of or next to keys and values."""
        return self.state_mixer is not None and self.state_mixer.is_in(layer, config)

    def blocks(self, config: Mapping[str, Any], layer: int | None = None) -> Blocks:
        """Return the blocks of a layer.

        Without a number, the layer has attention, and experts, if the family does.
        """
        has_state = layer is not None and self.has_state(layer, config)
        if self.lone_blocks and layer is not None:
            return lone_block(config, layer)
        if self.state_mixer is not None and self.state_mixer.alone:
            return Blocks(attention=False, state=True)
        has_experts = self.experts is not None and (
            layer is None or self.experts.is_in(layer, config)
        )
        return Blocks(
            attention=not has_state or self.state_mixer.parallel_to_attention,
            state=has_state,
            dense=not has_experts or self.experts.with_dense,
            experts=has_experts,
            layer_input=self.layer_inputs is not None,
        )

    def is_tied(self, config: Mapping[str, Any]) -> bool:
        """Return True if the head is the embedding."""
        return bool(config.get("tie_word_embeddings", self.tied))

    def rotates(self, config: Mapping[str, Any]) -> bool:
        """Return True if any layer has rotary embeddings."""
        if self.rope == "position_embedding_type":
            return config.get(self.rope) == "rope"
        if self.rope == "rope_theta":
            rope = config.get("rope_parameters")
            is_stated = isinstance(rope, Mapping) and rope.get("rope_type", "default") is not None
            return is_stated and rope.get("rope_theta") is not None
        return self.rope != "none"

    def embedding_factor(self, config: Mapping[str, Any]) -> float:
        """Return the factor of the embeddings."""
        if is_set(self.embedding_times_root, config):
            return config["hidden_size"] ** 0.5
        return config.get(self.embedding_factor_key, 1.0)

    @property
    def dense(self) -> tuple[Projection, ...]:
        """Projections of an attention layer in the order they run, without those of experts."""
        return tuple(self.projections(Blocks(dense=self.experts is None)))

    def projections(
        self, blocks: Blocks | None = None, num_experts: int = 0
    ) -> Iterator[Projection]:
        """Return every projection of a layer with these blocks, in the order they run.

        None: a layer with attention, and experts if the family has them.
        """
        blocks = blocks or self.blocks({})
        if blocks.state:
            yield from self.state_mixer.projections
        if blocks.attention:
            yield self.qkv
            if self.head_gates is not None:
                yield self.head_gates
            if self.query_up is not None:
                yield self.query_up
            yield from (*self.latent, self.o)
        if blocks.dense:
            yield from (self.gate_up, self.down)
        if blocks.experts:
            yield from self.experts.latent[:1]
            for number in range(0 if self.experts.fused else num_experts):
                yield from self.experts.of_number(number, num_experts)
            yield from self.experts.latent[1:]
            if self.experts.shared:
                yield from (self.experts.shared.gate_up, self.experts.shared.down)
        if blocks.layer_input:
            yield from (self.layer_inputs.gate, self.layer_inputs.projection)

    def first_projections(
        self, config: Mapping[str, Any], layer: int | None = None
    ) -> tuple[Projection, ...]:
        """Return the projections that read a layer's first input.

        A layer with only experts has none: its router reads the input.
        """
        blocks, found = self.blocks(config, layer), ()
        if blocks.state:
            found = self.state_mixer.readers
        if blocks.attention:
            gates = () if self.head_gates is None else (self.head_gates,)
            found = (*found, self.qkv, *gates)
        is_parallel = blocks.dense and is_set(self.parallel, config)
        reads_mlp = is_parallel or not (found or blocks.experts)
        return (*found, self.gate_up) if reads_mlp else found

    @property
    def linears(self) -> tuple[Linear, ...]:
        """A layer's linears as stored, without those of experts."""
        return tuple(linear for projection in self.dense for linear in projection.linears)

    def linears_of(self, config: Mapping[str, Any], layer: int | None = None) -> list[Linear]:
        """Return a layer's linears, including those of experts, in the order they run.

        Without a number, the layer is the one that `blocks` describes.
        """
        row = self.of_layer(layer, config)
        count = min(num_experts(config) or 0, MAX_EXPERTS)
        projections = row.projections(row.blocks(config, layer), count)
        return [linear for projection in projections for linear in projection.linears]

    def layer_tensors(
        self, config: Mapping[str, Any], layer: int | None = None
    ) -> dict[str, Shape]:
        """Return a layer's tensors in a float checkpoint, by name below the layer.

        Without a number, the layer is the one that `blocks` describes.
        """
        blocks, linears = self.blocks(config, layer), self.linears_of(config, layer)
        shapes = {f"{linear.name}.weight": linear.shape for linear in linears}
        for linear in linears:
            if is_set(linear.bias, config):
                shapes[f"{linear.name}.bias"] = (linear.outputs,)
        shapes |= self.of_layer(layer, config).norm_tensors(config, blocks)
        if blocks.state:
            shapes |= self.of_layer(layer, config).state_mixer.tensors(config)
        if blocks.dense:
            shapes |= self.dense_tensors
        if self.indexer is not None and self.indexer.is_in(layer, config):
            shapes |= self.indexer.tensors
        if self.block_indexer is not None and self.block_indexer.is_in(layer, config):
            shapes |= self.block_indexer.tensors
        if self.layer_scalar:
            shapes[self.layer_scalar] = (("one",),)
        shapes |= dict(self.activation_tensors.values()) | self.tensors_of_kind(config, layer)
        if blocks.attention:
            shapes |= dict(self.head_norms.values())
        if (sinks := self.of_layer(layer, config).sinks) and blocks.attention:
            shapes[sinks] = (("num_attention_heads",),)
        if blocks.experts:
            shapes |= self.experts.tensors(config, layer)
        return shapes

    def tensors_of_kind(
        self, config: Mapping[str, Any], layer: int | None = None
    ) -> dict[str, Shape]:
        """Return the float tensors that only layers of this layer's type have."""
        kinds = config.get("layer_types")
        if not self.kind_tensors or layer is None or not isinstance(kinds, list):
            return {}
        kind = kinds[layer] if layer < len(kinds) else ""
        return dict(self.kind_tensors.get(kind, {}))

    def norm_tensors(self, config: Mapping[str, Any], blocks: Blocks) -> dict[str, Shape]:
        """Return the tensors of the norms of a layer with these blocks."""
        leaves = ("weight", "bias") if self.norm_bias else ("weight",)
        leaves = leaves if self.norm_weights else ()
        return {
            f"{norm.name}.{leaf}": ((norm.size,),)
            for norm in self.norms
            if is_set(norm.present, config) and norm.is_in(blocks)
            for leaf in leaves
        }

    @property
    def model_tensors(self) -> dict[str, Shape]:
        """Return the tensors outside of layers. A tied model has no head."""
        shapes: dict[str, Shape] = {
            self.embedding: (("vocab_size",), ("hidden_size",)),
            self.last_norm: (("hidden_size",),),
            self.head: (("vocab_size",), ("hidden_size",)),
        }
        if self.head_bias:
            shapes[self.head_bias_name] = (("vocab_size",),)
        if self.norm_bias:
            shapes[self.last_norm_bias] = (("hidden_size",),)
        if not self.norm_weights:
            del shapes[self.last_norm]
        elif self.embedding_norm:
            shapes[self.embedding_norm] = (("hidden_size",),)
            if self.norm_bias:
                shapes[self.embedding_norm_bias] = (("hidden_size",),)
        if self.positions is not None and self.positions.name:
            shapes[self.positions.name] = (("positions",), ("hidden_size",))
        if self.layer_inputs is not None:
            shapes |= self.layer_inputs.tensors
        shapes |= dict(self.merge_tensors.values())
        square = (("hidden_size",), ("hidden_size",))
        return shapes | {f"{name}.weight": square for name in self.stream_linears}

    @property
    def stream_linears(self) -> tuple[str, ...]:
        """Names of the linears that compute the other streams and map back."""
        return tuple(f"{name}.{number}" for name in self.streams for number in range(STREAMS - 1))

    @property
    def head_bias_name(self) -> str:
        """Name of the head's bias, in families whose head has one."""
        return _bias_of(self.head)

    @property
    def last_norm_bias(self) -> str:
        """Name of the last norm's bias, in families whose norms have one."""
        return _bias_of(self.last_norm)

    @property
    def embedding_norm_bias(self) -> str:
        """Name of the bias of the norm of embeddings, in families whose norms have one."""
        return _bias_of(self.embedding_norm)

    def norm_eps(self, config: Mapping[str, Any]) -> float:
        """Return the epsilon of norms. `config` has its defaults filled in."""
        return config[self.norm_eps_key] if self.norm_eps_key else 1e-5

    def tensors(self, config: Mapping[str, Any]) -> dict[str, Shape]:
        """Return every tensor of a float checkpoint by its full name."""
        shapes = self.model_tensors
        if self.is_tied(config):
            del shapes[self.head]
        for number in range(config[self.num_layers_key]):
            prefix = self.layer.format(i=number)
            of_layer = self.layer_tensors(config, number)
            shapes |= {f"{prefix}.{name}": shape for name, shape in of_layer.items()}
        return shapes

    def sizes(self, config: Mapping[str, Any]) -> dict[str, int | None]:
        """Return the values of the sizes that shapes name; None if config.json lacks a value."""
        found = named_sizes(config, self.rules.defaults if self.rules else {}, self.inner_key)
        if self.positions is not None:
            length = config.get(self.positions.length_key)
            found["positions"] = length + self.positions.offset if is_size(length) else None
        return found


def _bias_of(weight: str) -> str:
    return f"{weight.removesuffix('weight')}bias"
