"""Mixers with a recurrent state of fixed size, instead of or next to attention.

They are gated delta nets, Kimi delta attention (qkernels/delta_net), short convolutions
(causal_conv), Mamba-1 (mamba1), Mamba-2 and lightning attention (mamba2). Needs no torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from formats.architecture.flags import Flag, is_set
from formats.architecture.projection import Projection, Shape
from formats.architecture.sizes import is_size, layer_numbers

Kind = Literal[
    "gated delta nets",
    "short convolutions",
    "Mamba-1",
    "Mamba-2",
    "Kimi delta attention",
    "lightning attention",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """A tensor of a mixer that is not the weight of a linear."""

    key: str  # argument name in the mixer's block
    name: str  # below the mixer's module
    shape: Shape
    float32: bool = False  # always read in float32
    present: Flag = True
    of_heads: bool = True  # its rows belong to heads or channels, which are sharded
    axis: int = 0  # dimension of these rows


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMixer:
    """Recurrent mixer, in the layers that `layer_types` states."""

    kind: Kind
    module: str  # below a layer; empty: the tensors are below other modules of the layer
    # In a delta net: queries, keys and values, and the gate of the output norm. With `grouped`,
    # the outputs of this projection and of `gates` are grouped by key head, or by group.
    inputs: Projection | None  # None: the mixer has no linears, and convolves what others compute
    gates: Projection | None = None  # reads the same input; stays in float
    # Projections that compute dt, B and C from the convolution's output, each reading the output
    # of the last; they stay in float.
    selection: tuple[Projection, ...] = ()
    # Further projections, which compute gates and are never quantized. `others` has their weights.
    gate_linears: tuple[Projection, ...] = ()
    out: Projection | None
    others: tuple[StateTensor, ...]
    grouped: bool = False
    layer_type: str = "linear_attention"  # value of layer_types for layers with this mixer
    # key of config.json that replaces layer_types: numbers of the layers with attention instead
    attention_key: str = ""
    parallel_to_attention: bool = (
        False  # every layer has mixer and attention, which read the same norm
    )
    alone: bool = False  # every layer has only the mixer

    def is_in(self, layer: int, config: Mapping[str, Any]) -> bool:
        """Return True if a layer has the mixer."""
        if self.parallel_to_attention or self.alone:
            return True
        if self.attention_key:
            return layer not in layer_numbers(config, self.attention_key)
        kinds = config.get("layer_types")
        if isinstance(kinds, list):
            return layer < len(kinds) and kinds[layer] == self.layer_type
        interval = config.get("full_attention_interval")
        return (layer + 1) % (interval if is_size(interval) else 4) != 0

    @property
    def readers(self) -> tuple[Projection, ...]:
        """Projections that read the mixer's input."""
        return tuple(each for each in (self.inputs, self.gates) if each is not None)

    @property
    def projections(self) -> tuple[Projection, ...]:
        """All projections, in the order they run."""
        return (*self.readers, *self.selection, *(() if self.out is None else (self.out,)))

    def present(self, config: Mapping[str, Any]) -> Iterator[tuple[str, StateTensor]]:
        """Yield the tensors other than weights of linears, with their names below the layer."""
        for each in self.others:
            if is_set(each.present, config):
                yield f"{self.module}.{each.name}" if self.module else each.name, each

    def tensors(self, config: Mapping[str, Any]) -> dict[str, Shape]:
        """Return the shapes of all tensors but the linears' weights, by name below the layer."""
        return {name: each.shape for name, each in self.present(config)}
