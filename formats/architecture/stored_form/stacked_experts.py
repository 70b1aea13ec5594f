"""Float experts in the tensors that the family's files have, the inverse of expert_stacks.py.

transformers reads the experts of most families one by one. Of families whose row says
`Experts.stacks_only`, and of Qwen3-VL-MoE, it reads only tensors that hold the experts of a layer
together.

Legend: E experts, N outputs, K inputs.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from formats.architecture.expert_names import separate_experts
from formats.architecture.expert_stacks import named_stacks
from formats.architecture.experts import Experts
from formats.architecture.family import EITHER_ORDER
from formats.architecture.projection import Projection
from formats.architecture.sizes import is_size
from formats.errors import tensor_error
from formats.families import family_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One tensor [E, N, K], or [E, K, N] if `transposed`."""

    # For each expert the names of its linears, whose rows follow each other.
    experts: tuple[tuple[str, ...], ...]
    transposed: bool


def with_stacked_experts(
    config: Mapping[str, Any], names: Collection[str], tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors with the linears of experts stacked if the family's files have stacks.

    `names` are those of all tensors. A layer in which a linear has no float weight is unchanged.
    """
    stacks = expert_stacks(config, names)
    places = {
        name: (stack, expert, place)
        for stack, found in stacks.items()
        for expert, linears in enumerate(found.experts)
        for place, name in enumerate(linears)
    }
    waiting: dict[str, _Filled] = {}
    for name, tensor in tensors:
        if name not in places:
            yield name, tensor
            continue
        stack, expert, place = places[name]
        filled = waiting.setdefault(stack, _Filled(stacks[stack]))
        filled.put(expert, place, tensor)
        if filled.is_full:
            yield stack, waiting.pop(stack).tensor()


def expert_stacks(config: Mapping[str, Any], names: Collection[str]) -> dict[str, Stack]:
    """Return the stacks by name that the family's files have instead of linears of these names."""
    experts = separate_experts(config)
    either = bool(config.get(EITHER_ORDER))
    if experts is None or not (experts.stacks_only or either):
        return {}
    layer = re.escape(family_of(config).layer).replace(re.escape("{i}"), r"\d{1,9}")
    found: dict[str, dict[tuple[int, int], str]] = {}
    projections = named_stacks(experts)
    for stack, projection in projections.items():
        for place, (linear, _) in enumerate(projection.members):
            own = re.escape(linear).replace(re.escape("{e}"), r"(?P<expert>\d{1,9})")
            pattern = re.compile(rf"(?P<layer>{layer})\.{own}\.weight")
            for match in filter(None, map(pattern.fullmatch, names)):
                number = int(match["expert"])
                name, key = _place(config, experts, stack, linear, number, place)
                found.setdefault(f"{match['layer']}.{name}", {})[key] = match[0]
    return {
        name: Stack(experts=rows, transposed=_is_transposed(config, experts, projections, name))
        for name, linears in found.items()
        if (rows := _rows(linears))
    }


def _place(
    config: Mapping[str, Any], experts: Experts, stack: str, linear: str, number: int, place: int
) -> tuple[str, tuple[int, int]]:
    """Return a linear's stack below the layer, and its (expert, place) there.

    Each linear of the experts that every token uses has a stack of its own.
    """
    first = config.get("n_routed_experts")
    if experts.always is None or not is_size(first) or number < first:
        return stack, (number, place)
    return f"{experts.always.module}.{linear.rpartition('.')[2]}", (number - first, 0)


def _rows(linears: Mapping[tuple[int, int], str]) -> tuple[tuple[str, ...], ...]:
    """Return the linears of each expert in order; (): some have no float weight."""
    count, width = (1 + max(numbers) for numbers in zip(*linears, strict=True))
    if len(linears) != count * width:
        return ()
    return tuple(tuple(linears[e, place] for place in range(width)) for e in range(count))


def _is_transposed(
    config: Mapping[str, Any], experts: Experts, projections: Mapping[str, Projection], name: str
) -> bool:
    """Return True if the file has a stack as [E, K, N].

    Published files of Qwen3-VL-MoE do. transformers distinguishes the two orders by the shapes, so
    a stack of square matrices is [E, N, K].
    """
    if not config.get(EITHER_ORDER):
        return experts.stacks_transposed
    projection = next(each for own, each in projections.items() if name.endswith(f".{own}"))
    sizes = family_of(config).sizes(config)
    outputs = sum(sizes.get(size) or 0 for _, size in projection.members)
    return outputs != sizes.get(projection.inputs)


class _Filled:
    """A stack that is filled linear by linear."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._missing = sum(map(len, stack.experts))
        self._tensor = torch.empty(0)  # [E, N, K], made when the first linear states N and K

    @property
    def is_full(self) -> bool:
        return not self._missing

    def put(self, expert: int, place: int, weight_NK: torch.Tensor) -> None:
        """Copy the weight of one linear. Raises CheckpointError if the linears' shapes differ."""
        N, K = weight_NK.shape
        if not self._tensor.numel():
            shape = (len(self._stack.experts), len(self._stack.experts[0]) * N, K)
            self._tensor = weight_NK.new_empty(shape)
            if self._stack.transposed:
                self._tensor = self._tensor.mT.contiguous().mT
        rows_NK = self._tensor[expert, place * N : (place + 1) * N]
        if rows_NK.shape != weight_NK.shape:
            raise tensor_error(
                self._stack.experts[expert][place],
                f"expected [{rows_NK.shape[0]}, {rows_NK.shape[1]}] as in other experts, found"
                f" {list(weight_NK.shape)}",
            )
        if weight_NK.dtype != self._tensor.dtype:
            both = torch.promote_types(weight_NK.dtype, self._tensor.dtype)
            self._tensor = self._tensor.to(both)
            rows_NK = self._tensor[expert, place * N : (place + 1) * N]
        rows_NK.copy_(weight_NK)
        self._missing -= 1

    def tensor(self) -> torch.Tensor:
        """Return the stack in the file's order of dims."""
        return self._tensor.mT if self._stack.transposed else self._tensor
