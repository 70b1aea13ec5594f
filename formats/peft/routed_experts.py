"""Adapters of routed experts: of each expert's linears, or of parameters that stack all experts.

PEFT wraps the module of the stacks (`target_parameters`) once per parameter. The first parameter is
the innermost, so the file has:

    ...experts.base_layer.lora_A.weight    of gate_up_proj, if down_proj is adapted, too
    ...experts.lora_A.weight               of the last parameter

A is [E r, inputs], one expert after the other. B is [outputs, r E]: the expert is the last index.
Where PEFT takes a stack's inputs for its outputs, A has the outputs and B the inputs.

Legend: E experts, N outputs, K inputs, r rank.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from formats.architecture.family import MAX_LAYERS, Family
from formats.architecture.projection import Linear, Projection
from formats.architecture.sizes import MAX_EXPERTS, is_size, num_experts, size
from formats.architecture.text_part import text_name
from formats.files.tensor_entry import TensorEntry

BASE_LAYER = ".base_layer"
EXPERTS = "mlp.experts"  # transformers' usual name of the module with the stacks
DOWN = "down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerExperts:
    """The experts of a layer."""

    layer: int
    prefix: str  # of the layer's names
    experts: tuple[tuple[Projection, Projection], ...]  # gate_up and down of each


def layers_with_experts(family: Family, config: Mapping[str, Any]) -> Iterator[LayerExperts]:
    """Yield the layers whose experts can be adapted.

    There are none in families with experts for images, or if config.json lacks a size.
    """
    layers, sizes = config.get(family.num_layers_key), family.sizes(config)
    if family.experts is None or family.experts.media_inner or not is_size(layers):
        return
    count = min(num_experts(config) or 0, MAX_EXPERTS)
    experts = tuple(family.experts.of_number(number, count) for number in range(count))
    for projection in (family.experts.gate_up, family.experts.down):
        for linear in projection.linears:
            if size((*linear.outputs, linear.inputs), sizes) is None:
                return
    for layer in range(min(layers, MAX_LAYERS)):
        row = family.of_layer(layer, config)
        if row.blocks(config, layer).experts:
            prefix = family.layer.format(i=layer)
            yield LayerExperts(layer=layer, prefix=prefix, experts=experts)


def expert_shapes(family: Family, config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return [N, K] of every linear of a routed expert, by its name in the checkpoint."""
    sizes = family.sizes(config)
    return {
        f"{each.prefix}.{linear.name}": _shape(linear, sizes)
        for each in layers_with_experts(family, config)
        for projections in each.experts
        for projection in projections
        for linear in projection.linears
    }


def names_an_expert(name: str) -> bool:
    """Return True if a module of an adapter belongs to routed experts."""
    return ".experts." in f"{name}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A parameter that stacks one or two linears of each expert."""

    name: str  # in the adapter, below the module
    modules: tuple[tuple[str, ...], ...]  # for each expert, its linears in the checkpoint
    outputs: int  # of all linears of an expert
    inputs: int
    alternates: bool  # outputs of gate and up alternate; False: gate is followed by up

    @property
    def linear_shape(self) -> tuple[int, int]:
        """[N, K] of each linear."""
        return self.outputs // len(self.modules[0]), self.inputs

    def shapes(self, rank: int, *, swapped: bool) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the shapes of A and B."""
        E = len(self.modules)
        first, last = (self.outputs, self.inputs) if swapped else (self.inputs, self.outputs)
        return (E * rank, first), (last, rank * E)

    def split(
        self, a: torch.Tensor, b: torch.Tensor, *, swapped: bool
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield (linear in the checkpoint, A [r, K], B [N, r])."""
        E = len(self.modules)
        a_Er, b_rE = a.unflatten(0, (E, -1)), b.unflatten(1, (-1, E))
        for expert, linears in enumerate(self.modules):
            a_rK, b_Nr = a_Er[expert], b_rE[..., expert]
            if swapped:
                a_rK, b_Nr = b_Nr.T, a_rK.T
            for place, module in enumerate(linears):
                size = self.outputs // len(linears)
                rows = slice(place * size, (place + 1) * size)
                if self.alternates:
                    rows = slice(place, None, len(linears))
                yield module, a_rK, b_Nr[rows]


class StackedExperts:
    """The stacks of a model's experts, by the name of their module in an adapter."""

    def __init__(self, family: Family, config: Mapping[str, Any]) -> None:
        self._stacks: dict[str, tuple[Stack, ...]] = {}
        self._in_file: dict[str, Stack] = {}
        sizes = family.sizes(config)
        layer_names = {family.layer, family.layer_in_transformers or family.layer}
        for each in layers_with_experts(family, config):
            stacks = tuple(_stacks(family, each, sizes))
            if family.experts.fused:
                stem = f"{each.prefix}.{family.experts.stem}"
                self._in_file |= {f"{stem}.{stack.name}": stack for stack in stacks}
            for layer_name in layer_names:
                for stem in (family.experts.stem, EXPERTS):
                    self._stacks[f"{layer_name.format(i=each.layer)}.{stem}"] = stacks

    @property
    def modules(self) -> Sequence[str]:
        """Names that an adapter may use."""
        return tuple(self._stacks)

    def in_file(self, entries: Mapping[str, TensorEntry]) -> dict[str, Stack]:
        """Return stacks that a checkpoint holds as float tensors [E, K, N], by tensor.

        They are gpt-oss's. In other families the reader presents the linears of each expert.
        """
        return {
            name: stack
            for name, stack in self._in_file.items()
            if name in entries and entries[name].dtype.is_floating_point
        }

    def find(self, module: str) -> tuple[Stack, ...]:
        """Return the stacks of a module in the order of PEFT's wrappers; (): there are none."""
        for name in (module, f"model.{module}", text_name(module) or ""):
            if name in self._stacks:
                return self._stacks[name]
        return ()


def _stacks(
    family: Family, layer: LayerExperts, sizes: Mapping[str, int | None]
) -> Iterator[Stack]:
    for place, name in enumerate(("gate_up_proj" if family.experts.gated else "up_proj", DOWN)):
        linears = [projections[place].linears for projections in layer.experts]
        shapes = [_shape(linear, sizes) for linear in linears[0]]
        yield Stack(
            name=name,
            modules=tuple(tuple(f"{layer.prefix}.{n.name}" for n in own) for own in linears),
            outputs=sum(N for N, _ in shapes),
            inputs=shapes[0][1],
            alternates=family.experts.fused and len(shapes) > 1,
        )


def _shape(linear: Linear, sizes: Mapping[str, int | None]) -> tuple[int, int]:
    return sum(sizes[name] for name in linear.outputs), sizes[linear.inputs]
