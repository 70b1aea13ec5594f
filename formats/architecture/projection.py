"""Linears of a layer, and projections: linears that run as one matrix. Part of a family's row."""

from dataclasses import dataclass, replace
from typing import Literal

from formats.architecture.flags import Flag

Split = Literal["outputs", "inputs"]
Shape = tuple[tuple[str, ...], ...]  # for each dim, the names of the sizes that add up to it


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A linear of a layer, as checkpoints store it."""

    name: str  # below the layer
    outputs: tuple[str, ...]
    inputs: str
    bias: Flag

    @property
    def shape(self) -> Shape:
        """Shape of the weight, [N, K]."""
        return (self.outputs, (self.inputs,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """Linears that share an input and run as one matrix. {e} in names is an expert's number."""

    name: str  # name of the fused matrix, below the layer
    members: tuple[tuple[str, str], ...]  # (name, size of the outputs) of each linear
    inputs: str
    split: Split = "outputs"  # dimension that tensor parallelism divides
    bias: Flag = False
    stored_fused: bool = False  # the checkpoint stores the fused matrix, not its members
    # stored order of the fused matrix: for each KV head its queries, its key, its value
    by_head: bool = False
    # stored order of the fused matrix: this many blocks, each with queries, values, keys of heads
    blocks: int = 0
    float_because: str = ""  # why the projection stays in float by default
    apart_elsewhere: bool = False  # other servers run its members as separate matrices

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The linears as they are stored."""
        members = [(name, (size,)) for name, size in self.members]
        if self.stored_fused:
            members = [(self.name, tuple(size for _, size in self.members))]
        return tuple(
            Linear(name=name, outputs=outputs, inputs=self.inputs, bias=self.bias)
            for name, outputs in members
        )

    def first_members(self, count: int) -> "Projection":
        """Return the projection with only the first `count` members."""
        return replace(self, members=self.members[:count])

    def only(self, place: int) -> "Projection":
        """Return the projection of one member."""
        return replace(self, members=self.members[place : place + 1])

    def with_size(self, size: str, other: str) -> "Projection":
        """Return the projection with `other` instead of `size`."""
        return replace(
            self,
            members=tuple((name, other if n == size else n) for name, n in self.members),
            inputs=other if self.inputs == size else self.inputs,
        )

    def expert(self, number: int) -> "Projection":
        """Return the projection of one expert."""
        return replace(
            self,
            name=self.name.format(e=number),
            members=tuple((name.format(e=number), size) for name, size in self.members),
        )
