"""Pairs of experts' linears from the tensors of stacked parameters. Layout: routed_experts.py."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from formats.errors import CheckpointError
from formats.peft.lora_config import SAVE_AGAIN, LoraConfig
from formats.peft.routed_experts import BASE_LAYER, Stack, StackedExperts

Entries = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
PARTS = ("A", "B")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """A stack and its tensors in the file."""

    stack: Stack
    name: str  # in the adapter
    tensors: Mapping[str, str]  # "A", "B" -> name of the tensor
    rank: int
    swapped: bool


@dataclass(slots=True, kw_only=True)
class StackedPairs:
    """The stacks that an adapter file has tensors for."""

    path: Path
    stacked: StackedExperts
    # module in the adapter -> number of wrappers around the tensor's own -> "A", "B" -> tensor
    _found: dict[str, dict[int, dict[str, str]]] = field(default_factory=dict)

    def take(self, module: str, part: str, tensor: str) -> bool:
        """Note a tensor of a module. Returns False if the module has no stacks of experts."""
        own = module
        while own.endswith(BASE_LAYER):
            own = own.removesuffix(BASE_LAYER)
        if not self.stacked.find(own):
            return False
        depth = (len(module) - len(own)) // len(BASE_LAYER)
        self._found.setdefault(own, {}).setdefault(depth, {})[part] = tensor
        return True

    def __len__(self) -> int:
        return len(self._found)

    def checked(self, config: LoraConfig, entries: Entries, max_rank: int | None) -> list[_Stored]:
        """Return the stacks after a check of shapes and ranks. Raises CheckpointError."""
        stored = [
            each
            for module, depths in self._found.items()
            for each in self._checked_module(module, depths, config, entries, max_rank)
        ]
        missing = next(
            (
                f"{module}.{stack.name}"
                for module in self.stacked.modules
                for stack in self.stacked.find(module)
                if config.adapts_parameter(f"{module}.{stack.name}")
                and not any(stack is each.stack for each in stored)
            ),
            None,
        )
        if config.parameters and missing is not None:
            raise CheckpointError(
                str(self.path.parent),
                f"{config.source} lists {missing}, but the file has no tensors for it",
                "use an adapter that was trained on this model",
            )
        return stored

    def _checked_module(
        self,
        module: str,
        depths: Mapping[int, Mapping[str, str]],
        config: LoraConfig,
        entries: Entries,
        max_rank: int | None,
    ) -> list[_Stored]:
        subject = f"{self.path}: {module}"
        stacks = [
            each
            for each in self.stacked.find(module)
            if config.adapts_parameter(f"{module}.{each.name}")
        ]
        if sorted(depths) != list(range(len(stacks))):
            named = ", ".join(each.name for each in stacks) or "none of its parameters"
            raise CheckpointError(
                subject,
                f"has tensors of {len(depths)} parameters, and {config.source} names {named}",
                SAVE_AGAIN,
            )
        # the first parameter has the most wrappers around it
        tensors = [depths[len(stacks) - 1 - place] for place in range(len(stacks))]
        ranks = []
        for stack, own in zip(stacks, tensors, strict=True):
            if len(own) != 2:
                raise CheckpointError(subject, f"has lora_{'/'.join(own)} alone", "download again")
            ranks.append(config.rank_of(f"{module}.{stack.name}"))
            for part in PARTS:
                shape, dtype = entries[own[part]]
                if not dtype.is_floating_point or len(shape) != 2:
                    raise CheckpointError(
                        f"{subject} lora_{part}",
                        f"expected floats in two dims, found {dtype} {list(shape)}",
                        SAVE_AGAIN,
                    )
        found = [tuple(entries[own[part]][0] for part in PARTS) for own in tensors]
        for swapped in (False, True):
            wanted = [s.shapes(r, swapped=swapped) for s, r in zip(stacks, ranks, strict=True)]
            if found == wanted:
                break
        else:
            wanted = [s.shapes(r, swapped=False) for s, r in zip(stacks, ranks, strict=True)]
            raise CheckpointError(
                subject,
                f"expected A and B of {_shown(wanted)}, found {_shown(found)}",
                "use an adapter that was trained on this model, with these ranks",
            )
        if max_rank is not None and max(ranks) > max_rank:
            raise CheckpointError(
                subject,
                f"expected a rank of at most {max_rank}, found {max(ranks)}",
                "raise --max-lora-rank",
            )
        return [
            _Stored(
                stack=stack,
                name=f"{module}.{stack.name}",
                tensors=own,
                rank=rank,
                swapped=swapped,
            )
            for stack, own, rank in zip(stacks, tensors, ranks, strict=True)
        ]


def expert_pairs(
    stored: _Stored, get: Callable[[str], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield (linear in the checkpoint, A [r, K], B [N, r]) of a stack. `get`: reads a tensor."""
    a, b = (get(stored.tensors[part]) for part in PARTS)
    return stored.stack.split(a, b, swapped=stored.swapped)


def _shown(shapes: list) -> str:
    return ", ".join(f"{list(a)} and {list(b)}" for a, b in shapes)
