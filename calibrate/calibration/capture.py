"""Hidden states of all windows between two layers, and statistics of each layer's inputs.

Legend: W windows, S tokens of a window, D hidden size, V vocabulary.
"""

import itertools
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from calibrate.calibration.layer_runner import LayerRunner
from calibrate.calibration.statistics import BatchSums, HeldOut, InputStatistics
from calibrate.calibration.vision import (
    Media,
    WindowMedia,
)
from calibrate.devices import OrderedSections
from formats.errors import DiskError, InputError
from formats.table import size_text

# Tokens per batch of windows: enough to fill a GPU, with little memory.
BATCH_TOKENS = 8192


def batch_windows(length: int) -> int:
    """Number of windows of this length in one batch."""
    return max(1, BATCH_TOKENS // length)


class HiddenStates:
    """Hidden states of all windows between two layers, [W, S, D], in memory or in a file.

    D includes carried channels (carried.py).
    """

    def __init__(
        self,
        ids_WS: torch.Tensor,
        embedding_VD: torch.Tensor,
        runner: LayerRunner,
        spill: Path | None = None,
        before_batch: Callable[[], None] = lambda: None,
        media: Sequence[WindowMedia | None] = (),
    ) -> None:
        """Embed the windows. Raises InputError for a token or a position that the model lacks.

        `spill`: folder for a file that holds the states, to save memory. `media`: images of each
        window, or (): there are no images.
        """
        self.media = media
        if int(ids_WS.max()) >= embedding_VD.shape[0]:
            raise InputError(
                "calibration data",
                f"has the token {int(ids_WS.max())}, but the model's vocabulary is"
                f" {embedding_VD.shape[0]}",
                "use the model's own tokenizer",
            )
        positions_SD, length = runner.positions_SD, ids_WS.shape[1]
        if positions_SD is not None:
            if length > positions_SD.shape[0]:
                raise InputError(
                    "calibration data",
                    f"has windows of {length} tokens, but the model has {positions_SD.shape[0]}"
                    " positions",
                    "use a smaller `sequence_length`",
                )
            positions_SD = positions_SD[:length]
        shape = (*ids_WS.shape, embedding_VD.shape[1] + runner.num_carried)
        if spill is None:
            self.states_WSD = torch.empty(shape, dtype=runner.dtype, device=runner.device)
        else:
            self.states_WSD = _in_file(spill, shape, runner.dtype)
        values = {**runner.raw_config, **runner.config.to_dict()}  # canonical keys and defaults
        scale = runner.layer_map.family.embedding_factor(values)
        for number, ids_S in enumerate(ids_WS):
            rows_SD = embedding_VD[ids_S.to(embedding_VD.device)].to(runner.dtype)
            rows_SD = rows_SD * torch.tensor(scale, dtype=runner.dtype)
            if positions_SD is not None:
                rows_SD = rows_SD + positions_SD.to(rows_SD.device)
            found = media[number] if media else None
            if found is not None:
                rows_SD[found.is_image_S] = found.rows_RD.to(rows_SD)
            is_image_S = None if found is None else found.is_image_S
            self.states_WSD[number] = runner.first_states(ids_S, rows_SD, is_image_S)
        self.batch, self.before_batch = batch_windows(ids_WS.shape[1]), before_batch

    def batches(self) -> Iterator[tuple[torch.Tensor, Media]]:
        """Yield batches of whole windows: views of the states, [B, S, D], and their images."""
        for number, batch_BSD in enumerate(self.states_WSD.split(self.batch)):
            self.before_batch()
            first = number * self.batch
            yield batch_BSD, self.media[first : first + self.batch]

    def advance(
        self, runner: LayerRunner, module: nn.Module, layer: int, cache: Any = None
    ) -> None:
        """Replace the states by the layer's outputs. Raises InputError if one is not finite."""
        for batch_BSD, media in self.batches():
            output_BSD = runner.run(module, layer, batch_BSD.to(runner.device), cache, media=media)
            if not torch.isfinite(output_BSD).all():
                raise InputError(
                    runner.layer_map.prefix(layer),
                    "the layer's outputs contain NaN or infinity",
                    "check that the float model works, or use `device` cpu, which computes "
                    "in float32",
                )
            batch_BSD.copy_(output_BSD)


def _in_file(folder: Path, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in an unlinked file, which disappears with the process. Raises DiskError."""
    size = math.prod(shape)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            # Allocate all blocks now: a later write to the mapping on a full disk would kill the
            # process.
            os.posix_fallocate(file.fileno(), 0, size * dtype.itemsize)
            return torch.from_file(file.name, shared=True, size=size, dtype=dtype).view(shape)
    except OSError as error:
        raise DiskError(
            f"`spill` {folder}",
            f"cannot hold {size_text(size * dtype.itemsize)} of hidden states: {error.strerror}",
            "choose a folder on a disk with more space",
        ) from None


def empty_statistics(
    runner: LayerRunner, layer: int, state: Mapping[str, torch.Tensor], all_experts: bool = False
) -> dict[str, InputStatistics]:
    """Return empty statistics of each linear's input, by local name, on the runner's device.

    Linears that share an input share one object. With `all_experts`, all experts that read the
    layer's input share one object, too, and those for tokens of media another one.
    """
    statistics: dict[str, InputStatistics] = {}
    of_experts: dict[bool, InputStatistics] = {}  # for tokens of media -> inputs of all experts
    for group in runner.layer_map.inputs(runner.raw_config, layer):
        name = f"{runner.layer_map.prefix(layer)}.{group[0]}"
        width = state[f"{group[0]}.weight"].shape[1]
        of_media = runner.layer_map.is_for_media(runner.raw_config, group[0])
        if all_experts and runner.layer_map.reads_experts_input(group[0]):
            if of_media not in of_experts:
                made = InputStatistics(width, runner.device, name, is_routed=of_media)
                of_experts[of_media] = made
            stats = of_experts[of_media]
        else:
            is_routed = runner.layer_map.expert_kind(group[0]) is not None
            is_routed &= of_media or not all_experts
            stats = InputStatistics(width, runner.device, name, is_routed=is_routed)
        statistics.update(dict.fromkeys(group, stats))
    return statistics


def add_statistics(
    statistics: Mapping[str, InputStatistics],
    runner: LayerRunner,
    module: nn.Module,
    layer: int,
    hidden: HiddenStates,
    reference: HiddenStates | None = None,
    numbers: Iterable[int] | None = None,
    turns: OrderedSections | None = None,
    held_every: int = 0,
) -> None:
    """Run the layer over the windows of `hidden` and add its linears' inputs to `statistics`.

    `reference`: the float model's states of the same windows. `numbers`: indices of these batches
    in the whole data, if other devices add to the statistics at the same time; `turns` then makes
    each device wait for the preceding batch, so that sums equal those of one device. Of every
    `held_every` windows the last is held out; 0: none.
    """
    inputs: dict[InputStatistics, torch.Tensor] = {}
    hooks, shared = [], []
    for name, stats in statistics.items():
        if stats not in shared:  # count a shared input once
            shared.append(stats)
            hooks.append(
                module.get_submodule(name).register_forward_pre_hook(
                    lambda _, args, stats=stats: inputs.__setitem__(stats, args[0])
                )
            )

    def run(
        batch_BSD: torch.Tensor, media: Media, chosen_B: torch.Tensor
    ) -> dict[InputStatistics, torch.Tensor]:
        """Return the input that each statistics object gets; experts without a token are absent."""
        inputs.clear()
        if chosen_B.any():
            kept = batch_BSD if chosen_B.all() else batch_BSD[chosen_B]
            images = [each for each, is_kept in zip(media, chosen_B, strict=False) if is_kept]
            runner.run(module, layer, kept.to(runner.device), media=images)
        return dict(inputs)

    def run_reference(
        batch_BSD: torch.Tensor | None, media: Media, chosen_B: torch.Tensor
    ) -> dict[InputStatistics, torch.Tensor]:
        """Return the float model's inputs, except of experts, which may get other tokens in it."""
        found = {} if batch_BSD is None else run(batch_BSD, media, chosen_B)
        return {stats: x for stats, x in found.items() if not stats.is_routed}

    references = iter(reference.batches()) if reference is not None else None
    numbers = itertools.count() if numbers is None else numbers
    for (batch_BSD, media), number in zip(hidden.batches(), numbers, strict=False):
        held_B = held_out_windows(len(batch_BSD), number * hidden.batch, held_every)
        reference_BSD = None if references is None else next(references)[0]
        expected = run_reference(reference_BSD, media, ~held_B)
        found = run(batch_BSD, media, ~held_B)
        sums = {s: BatchSums.of(x, expected.get(s)) for s, x in found.items() if x.numel()}
        held: dict[InputStatistics, HeldOut] = {}
        if held_B.any():
            expected = run_reference(reference_BSD, media, held_B)
            apart = run(batch_BSD, media, held_B)
            held = {s: HeldOut.of(x, expected.get(s)) for s, x in apart.items()}
        for stats in shared:
            # An expert without tokens must also take its turn; otherwise the next batch would wait.
            with nullcontext() if turns is None else turns.of(stats, number):
                if stats in sums:
                    stats.add(sums[stats])
                if stats in held:
                    stats.hold_out(held[stats])
    inputs.clear()
    for hook in hooks:
        hook.remove()


def held_out_windows(count: int, first: int, every: int) -> torch.Tensor:
    """Mask [B] of held-out windows; `first` is the index of the first window in the data."""
    if not every:
        return torch.zeros(count, dtype=torch.bool)
    return (torch.arange(count) + first) % every == every - 1
