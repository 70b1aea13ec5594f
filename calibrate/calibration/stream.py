"""Stream: hidden states of calibration and evaluation windows, moved from layer to layer.

With several devices, each has some of the windows, in whole batches. Every batch is computed as on
one device, and sums over batches are added in the data's order. So the result equals that of one
device bit for bit, provided that devices of the same type compute the same bits.
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from calibrate.calibration.capture import (
    HiddenStates,
    add_statistics,
    batch_windows,
    empty_statistics,
    held_out_windows,
)
from calibrate.calibration.kv_range import KvRange, KvScales, RoundedKv
from calibrate.calibration.layer_runner import LayerRunner, Rounding
from calibrate.calibration.statistics import HeldOut, InputStatistics
from calibrate.calibration.vision import WindowMedia, open_media
from calibrate.devices import Devices, OrderedSections
from calibrate.float_model import FloatModel
from calibrate.layer import FinishedLayer
from calibrate.quality.agreement import Agreement, compare_logits
from calibrate.recipe import Recipe
from calibrate.solvers.solving import LayerState, Tuning
from calibrate.solvers.tuning import tune_layer
from calibrate.texts.data import CalibrationData
from formats.plan import Plan

HELD_EVERY = 8  # one calibration window in this many is held out


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStates:
    """Hidden states of the windows on one device; None where the device has no such windows."""

    runner: LayerRunner
    calibration: HiddenStates | None
    reference: HiddenStates | None  # the same windows in the float model
    after: HiddenStates | None  # evaluation windows in the quantized model
    before: HiddenStates | None  # the same windows in the float model


class Stream:
    """Hidden states of calibration and evaluation windows, after the layers so far.

    Both go through the quantized layers and, for comparison, through the float layers. Each may be
    absent.
    """

    def __init__(
        self,
        devices: Devices,
        runners: Sequence[LayerRunner],
        embedding_VD: torch.Tensor,
        rewritten_VD: torch.Tensor,
        *,
        calibration_WS: torch.Tensor | None,
        evaluation_WS: torch.Tensor | None,
        with_reference: bool = False,
        kv_cache: str | None = None,
        kv_per_head: bool = False,
        all_experts: bool = False,
        hold_out: bool = False,
        spill: Path | None = None,
        media: Sequence[WindowMedia | None] = (),
        reference_VD: torch.Tensor | None = None,
    ) -> None:
        """Embed the windows. `runners`: one per device.

        `embedding_VD`: the float model's embedding. `rewritten_VD`: the quantized model's, after
        transforms and rounding. `reference_VD`: the same before rounding; None: it is not
        quantized. `spill`: folder for hidden states, to save memory.

        `with_reference`: statistics include the drift of inputs from the float model's inputs.
        `kv_cache`: evaluate the quantized model with this KV cache dtype; `kv_per_head`: with a
        scale per KV head. `all_experts`: statistics cover every token at every expert. `hold_out`:
        hold some windows out of the statistics, to compare solutions on. `media`: images of the
        calibration windows, or (): no images.
        """
        self.devices, self.evaluation_WS, self._media = devices, evaluation_WS, media
        self.kv_cache, self.kv_per_head, self.all_experts = kv_cache, kv_per_head, all_experts
        windows = 0 if calibration_WS is None else len(calibration_WS)
        self._held_every = min(HELD_EVERY, windows) if hold_out and windows > 1 else 0
        self._calibration_rows = windows_of_devices(calibration_WS, len(runners))
        self._evaluation_rows = windows_of_devices(evaluation_WS, len(runners))
        reference_WS = calibration_WS if with_reference else None
        reference_VD = rewritten_VD if reference_VD is None else reference_VD

        def embed(
            index: int,
            ids_WS: torch.Tensor | None,
            rows_of_devices: list[torch.Tensor],
            table_VD: torch.Tensor,
            media: Sequence[WindowMedia | None] = (),
        ) -> HiddenStates | None:
            rows = rows_of_devices[index]
            if ids_WS is None or not len(rows):
                return None
            own = [media[row] for row in rows.tolist()] if media else ()
            return HiddenStates(ids_WS[rows], table_VD, runners[index], spill, devices.check, own)

        self._device_states = [
            DeviceStates(
                runner=runner,
                calibration=embed(
                    index, calibration_WS, self._calibration_rows, rewritten_VD, media
                ),
                reference=embed(index, reference_WS, self._calibration_rows, reference_VD, media),
                after=embed(index, evaluation_WS, self._evaluation_rows, rewritten_VD),
                before=embed(index, evaluation_WS, self._evaluation_rows, embedding_VD),
            )
            for index, runner in enumerate(runners)
        ]

    def statistics(self, layer: int, state: LayerState) -> dict[str, InputStatistics]:
        """Collect statistics of the layer's inputs, on the first device. Empty without data."""
        if self._device_states[0].calibration is None:
            return {}
        statistics = empty_statistics(self._device_states[0].runner, layer, state, self.all_experts)
        turns = OrderedSections(self.devices.check) if len(self._device_states) > 1 else None

        def collect(states: DeviceStates) -> None:
            runner = states.runner
            module = runner.build(layer, state, all_experts=self.all_experts)
            numbers = itertools.count(self._device_states.index(states), len(self._device_states))
            add_statistics(
                statistics,
                runner,
                module,
                layer,
                states.calibration,
                states.reference,
                numbers,
                turns,
                self._held_every,
            )

        self._together(lambda states: states.calibration, collect)
        for stats in dict.fromkeys(statistics.values()):
            stats.check()
        return statistics

    def advance_reference(self, layer: int, loaded: LayerState) -> None:
        """Run the float model's states through the layer before it was quantized."""
        self._advance(lambda states: states.reference, layer, loaded)

    def tune(
        self, layer: int, loaded: LayerState, finished: FinishedLayer, tuning: Tuning, seed: int
    ) -> FinishedLayer:
        """Tune the layer towards the float model's outputs. Call after advance_reference.

        Tuning runs on the first device, because a step has too little data to divide.
        """
        return tune_layer(
            self._device_states[0].runner,
            layer,
            loaded,
            finished,
            self._all_windows(lambda states: states.calibration),
            self._all_windows(lambda states: states.reference),
            tuning,
            seed,
            self._media,
        )

    def advance(self, layer: int, original: LayerState, finished: FinishedLayer) -> KvScales | None:
        """Run all states except the reference through the original and the finished layer.

        Returns the scales of the layer's KV cache, if requested.
        """
        cache, scales = None, None
        runner = self._device_states[0].runner
        rounds_kv = self.kv_cache is not None and runner.keeps_keys(layer)
        seen = [KvRange(self.kv_per_head) if rounds_kv else None for _ in self._device_states]
        state, roundings = finished.apply(original), finished.roundings()
        self._advance(lambda states: states.calibration, layer, state, roundings, seen)
        if rounds_kv:
            first, *others = seen
            for other in others:
                first.merge(other)
            scales = first.scales(self.kv_cache)
            cache = RoundedKv(scales, self.kv_cache)
        caches = [cache] * len(self._device_states)
        self._advance(lambda states: states.after, layer, state, roundings, caches)
        self._advance(lambda states: states.before, layer, original)
        return scales

    def _advance(
        self,
        which: Callable[[DeviceStates], HiddenStates | None],
        layer: int,
        state: LayerState,
        activation: Mapping[str, Rounding] | None = None,
        caches: Sequence[Any] | None = None,
    ) -> None:
        caches_of = dict(
            zip(self._device_states, caches or [None] * len(self._device_states), strict=True)
        )

        def run(states: DeviceStates) -> None:
            module = states.runner.build(layer, state, activation)
            which(states).advance(states.runner, module, layer, caches_of[states])

        self._together(which, run)

    def _together(
        self,
        which: Callable[[DeviceStates], HiddenStates | None],
        work: Callable[[DeviceStates], Any],
    ) -> list[Any]:
        """Run `work` for every device for which `which` returns states, and return the results."""
        chosen = [states for states in self._device_states if which(states) is not None]
        jobs = [lambda states=states: work(states) for states in chosen]
        return self.devices.together(jobs)

    def _all_windows(self, which: Callable[[DeviceStates], HiddenStates]) -> torch.Tensor:
        """Return the states [W, S, D] in the data's order; with several devices, on the host."""
        parts = [
            which(states).states_WSD for states in self._device_states if which(states) is not None
        ]
        if len(parts) == 1:
            return parts[0]
        order_W = torch.cat(self._calibration_rows).argsort()
        return torch.cat([part.cpu() for part in parts])[order_W]

    def agreement(
        self,
        before: tuple[torch.Tensor, torch.Tensor],
        after: tuple[torch.Tensor, torch.Tensor],
        given: Iterable[int] = (),
    ) -> Agreement:
        """Compare the quantized model with the float model on the evaluation windows.

        `before`, `after`: (last norm, head) of the float and of the quantized model. `given`: token
        ids that are not counted.
        """
        reference = self._logits(lambda states: states.before, *before)
        other = self._logits(lambda states: states.after, *after)
        return compare_logits(
            self.evaluation_WS, lambda _: next(reference), lambda _: next(other), given, False
        )

    def head_statistics(self, norm_D: torch.Tensor) -> InputStatistics | None:
        """Collect statistics of the head's inputs after all layers, on the first device.

        Returns None without data. `norm_D`: weight of the last norm.
        """
        first = self._device_states[0]
        if first.calibration is None:
            return None
        stats = InputStatistics(len(norm_D), first.runner.device, "lm_head")

        def inputs(states: DeviceStates, batch_BSD: torch.Tensor) -> torch.Tensor:
            return states.runner.head_inputs(batch_BSD.to(states.runner.device), norm_D)

        def batches(states: DeviceStates) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
            if states.calibration is None:
                return
            reference = None if states.reference is None else states.reference.batches()
            for batch_BSD, _ in states.calibration.batches():
                target_BSD = None if reference is None else inputs(states, next(reference)[0])
                yield inputs(states, batch_BSD), target_BSD

        # Batches were assigned to devices in turn, so this restores the data's order.
        in_turn = itertools.zip_longest(*map(batches, self._device_states))
        every, row = self._held_every, 0
        for found in itertools.chain.from_iterable(in_turn):
            if found is None:
                continue
            x_BSD, target_BSD = found
            held_B = held_out_windows(len(x_BSD), row, every).to(x_BSD.device)
            row += len(x_BSD)

            def chosen(is_chosen_B: torch.Tensor, x_BSD=x_BSD, target_BSD=target_BSD) -> tuple:
                return x_BSD[is_chosen_B], None if target_BSD is None else target_BSD[is_chosen_B]

            stats.update(*chosen(~held_B))
            if held_B.any():
                stats.hold_out(HeldOut.of(*chosen(held_B)))
        stats.check()
        return stats

    def first_logits(self, norm_D: torch.Tensor, head_VD: torch.Tensor, count: int) -> torch.Tensor:
        """Return the quantized model's logits [count, V] at the start of the first window."""
        return next(self._logits(lambda states: states.after, norm_D, head_VD, count))

    def _logits(
        self,
        which: Callable[[DeviceStates], HiddenStates],
        norm_D: torch.Tensor,
        head_VD: torch.Tensor,
        count: int | None = None,
    ) -> Iterator[torch.Tensor]:
        """Yield the logits of each evaluation window, or of its first `count` tokens."""
        heads = [
            head_VD.to(states.runner.device, states.runner.dtype) for states in self._device_states
        ]
        places = sorted(
            (int(window), number, row)
            for number, rows in enumerate(self._evaluation_rows)
            for row, window in enumerate(rows)
        )
        for _, number, row in places:
            states = self._device_states[number]
            hidden_SD = which(states).states_WSD[row][:count].to(states.runner.device)
            yield states.runner.final_logits(hidden_SD, norm_D, heads[number])


def windows_of_devices(ids_WS: torch.Tensor | None, chosen: int) -> list[torch.Tensor]:
    """Return the window indices of each device. Batches are assigned in turn."""
    if ids_WS is None:
        return [torch.empty(0, dtype=torch.long)] * chosen
    number_W = torch.arange(ids_WS.shape[0])
    lane_W = number_W // batch_windows(ids_WS.shape[1]) % chosen
    return [number_W[lane_W == states] for states in range(chosen)]


def open_stream(
    model: FloatModel,
    recipe: Recipe,
    model_tensors: LayerState,
    data: CalibrationData | None,
    evaluation_WS: torch.Tensor | None,
    plan: Plan,
    *,
    all_experts: bool,
    spill: str | Path | None,
    devices: Devices,
    rows: Callable[[torch.Tensor], torch.Tensor],
) -> Stream:
    """Build the stream of a run.

    `model_tensors`: includes the embedding, if a transform changed it. `rows`: maps the embedding
    to the one that the quantized model reads.
    """
    embedding = model.get(model.layer_map.embedding)
    rewritten = model_tensors.get(model.layer_map.embedding, embedding)
    dtype = LayerRunner(model, model.layer_map, devices.first).dtype
    media, rotary = open_media(model, data, devices.first, dtype)
    return Stream(
        devices,
        [
            LayerRunner(model, model.layer_map, name, copy.deepcopy(rotary))
            for name in devices.names
        ],
        embedding,
        rows(rewritten),
        calibration_WS=data.ids_WS if data else None,
        evaluation_WS=evaluation_WS,
        with_reference=recipe.corrects,
        kv_cache=plan.kv_cache,
        kv_per_head=plan.kv_per_head,
        all_experts=all_experts,
        hold_out=recipe.guarded,
        spill=Path(spill) if spill else None,
        media=media,
        reference_VD=rewritten,
    )
