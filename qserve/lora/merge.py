"""Merge a LoRA adapter into a float model's weights and write a new checkpoint.

Only one tensor is in memory at a time, besides the adapter and the shard that is being filled.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from formats.architecture.stored_form.stacked_experts import with_stacked_experts
from formats.checkpoint import DEFAULT_MAX_SHARD_BYTES, CheckpointReader
from formats.errors import CheckpointError
from formats.families import family_of
from formats.files.model_writer import open_writer
from formats.peft.lora import LoraPair, read_adapter
from formats.peft.routed_experts import Stack, StackedExperts
from formats.quant_config import find_block

WEIGHT = ".weight"
Update = Callable[[], torch.Tensor]  # returns what is added to a tensor, in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """Result of a merge."""

    source: str
    adapter: str
    target: str
    num_linears: int
    update: float  # norm of the updates divided by norm of the adapted weights
    lost: float  # norm of the rounding errors divided by norm of the updates

    def to_text(self) -> str:
        return (
            f"{self.num_linears} linears: the adapter changes them by {100 * self.update:.3g} %,"
            f" of which rounding takes {100 * self.lost:.3g} %\nWrote {self.target}"
        )


def merge_adapter(
    source: str | Path,
    adapter: str | Path,
    target: str | Path,
    *,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
) -> Merge:
    """Write a checkpoint with W + scale * B A for every adapted linear.

    The sum is computed in float32 and rounded to W's dtype. All other tensors are copied bit for
    bit. `target` appears only after it is complete and the merged weights are verified. Raises
    InputError; then no files remain.
    """
    reader = CheckpointReader(source, in_blocks=False)
    if find_block(reader.folder, reader.config) is not None:
        raise CheckpointError(
            str(source),
            "is quantized: quantizing the merged weights again would lose most of the adapter",
            "merge into the float model and quantize the result, or serve the adapter with this"
            " model: --enable-lora",
        )
    shapes = {
        name.removesuffix(WEIGHT): entry.shape
        for name, entry in reader.entries.items()
        if name.endswith(WEIGHT) and len(entry.shape) == 2 and entry.dtype.is_floating_point
    }
    family = family_of(reader.config)
    stacked = family and StackedExperts(family.variant(reader.config), reader.config)
    stacks = {} if stacked is None else stacked.in_file(reader.entries)
    for stack in stacks.values():
        shapes |= dict.fromkeys(sum(stack.modules, ()), stack.linear_shape)
    found = read_adapter(adapter, shapes, family=family, stacked=stacked)
    updates = _updates(found.pairs, stacks)
    sums = torch.zeros(3, dtype=torch.float64)  # sums of squares: weights, updates, rounding errors
    with open_writer(
        target, reader, min_bytes=reader.num_bytes, max_shard_bytes=max_shard_bytes
    ) as writer:
        tensors = _with_updates(reader, updates, sums)
        for name, tensor in with_stacked_experts(reader.config, reader.entries, tensors):
            writer.add(name, tensor)
        staged = CheckpointReader(writer.seal(reader.config, side_files_from=reader.folder))
        for name, update in updates.items():
            if not torch.equal(staged.get(name), _merged(name, reader.get(name), update)[0]):
                raise CheckpointError(
                    name, "differs from the merged tensor after writing", "try again"
                )
        writer.publish()
    norms = sums.sqrt().tolist()
    return Merge(
        source=str(source),
        adapter=str(adapter),
        target=str(target),
        num_linears=len(found.pairs),
        update=norms[1] / max(norms[0], 1e-30),
        lost=norms[2] / max(norms[1], 1e-30),
    )


def _with_updates(
    reader: CheckpointReader, updates: Mapping[str, Update], sums: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor, adapted ones with their update, and add their squares to `sums`."""
    for name in reader.entries:
        weight = reader.get(name)
        if name in updates:
            weight, squares = _merged(name, weight, updates[name])
            sums += squares
        yield name, weight


def _updates(pairs: Mapping[str, LoraPair], stacks: Mapping[str, Stack]) -> dict[str, Update]:
    """Return the update of each tensor that changes.

    `stacks`: stacks of experts in the file, by their tensors.
    """
    updates: dict[str, Update] = {}
    in_stacks = set()
    for tensor, stack in stacks.items():
        modules = set(sum(stack.modules, ()))
        in_stacks |= modules
        if not modules.isdisjoint(pairs):
            updates[tensor] = partial(_stack_delta, stack, pairs)
    for module, pair in pairs.items():
        if module not in in_stacks:
            updates[f"{module}{WEIGHT}"] = pair.delta
    return updates


def _stack_delta(stack: Stack, pairs: Mapping[str, LoraPair]) -> torch.Tensor:
    """Return what is added to a stack [experts, inputs, outputs]."""
    delta_EKN = torch.zeros(len(stack.modules), stack.inputs, stack.outputs)
    for expert, linears in enumerate(stack.modules):
        for place, module in enumerate(linears):
            if module in pairs:
                delta_EKN[expert, :, place :: len(linears)] = pairs[module].delta().T
    return delta_EKN


def _merged(name: str, weight: torch.Tensor, update: Update) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the merged tensor, and the sums of squares of weight, update and rounding error."""
    delta = update()
    total = weight.float() + delta
    rounded = total.to(weight.dtype)
    if not rounded.isfinite().all():
        raise CheckpointError(
            name,
            f"exceeds the range of {weight.dtype} when the adapter is added",
            "check the adapter's weights and its lora_alpha",
        )
    lost = rounded.float() - total
    squares = [each.double().square().sum() for each in (weight, delta, lost)]
    return rounded, torch.stack(squares)
