"""What flows from layer to layer during a run: calibration windows, and text to compare models on.

Knows which hidden states go through which weights, not where the weights come from. Several devices
have some of the windows each, whole batches in turn: every batch is computed as one device would,
and what batches add up to is added in the data's order. The result is that of one device, bit for
bit, as far as devices of a kind compute alike.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from calibrate.capture import (
    HiddenStates,
    LayerRunner,
    Rounding,
    add_statistics,
    batch_windows,
    empty_statistics,
)
from calibrate.devices import Devices, Turns
from calibrate.evaluate import Perplexity, perplexity
from calibrate.kv_range import KvRange, KvScales, RoundedKv
from calibrate.layer import FinishedLayer
from calibrate.solving import LayerState, Tuning
from calibrate.statistics import InputStatistics
from calibrate.tuning import tune_layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """The windows that one device has, as hidden states; None where it has none."""

    runner: LayerRunner
    calibration: HiddenStates | None
    reference: HiddenStates | None  # the same windows in the float model
    after: HiddenStates | None  # evaluation, in the quantized model
    before: HiddenStates | None  # the same windows in the float model


class Stream:
    """Hidden states of calibration and evaluation, each through the quantized layers so far and, to
    compare, through the float ones. Any may be absent."""

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
        spill: Path | None = None,
    ) -> None:
        """A runner for each device. `rewritten_VD` is the quantized model's embedding; `spill` a
        folder to spare memory.

        `with_reference`: statistics tell how far the inputs are from the float model's. `kv_cache`:
        the quantized model's evaluation reads keys and values from such a cache, `kv_per_head`
        with scales of their own for each KV head.
        """
        self.devices, self.evaluation_WS = devices, evaluation_WS
        self.kv_cache, self.kv_per_head = kv_cache, kv_per_head
        self._calibration_rows = windows_of_lanes(calibration_WS, len(runners))
        self._evaluation_rows = windows_of_lanes(evaluation_WS, len(runners))
        reference_WS = calibration_WS if with_reference else None

        def embed(
            lane: int,
            ids_WS: torch.Tensor | None,
            rows_of_lanes: list[torch.Tensor],
            table_VD: torch.Tensor,
        ) -> HiddenStates | None:
            rows = rows_of_lanes[lane]
            if ids_WS is None or not len(rows):
                return None
            return HiddenStates(ids_WS[rows], table_VD, runners[lane], spill, devices.check)

        self._lanes = [
            Lane(
                runner=runner,
                calibration=embed(lane, calibration_WS, self._calibration_rows, rewritten_VD),
                reference=embed(lane, reference_WS, self._calibration_rows, rewritten_VD),
                after=embed(lane, evaluation_WS, self._evaluation_rows, rewritten_VD),
                before=embed(lane, evaluation_WS, self._evaluation_rows, embedding_VD),
            )
            for lane, runner in enumerate(runners)
        ]

    def statistics(self, layer: int, state: LayerState) -> dict[str, InputStatistics]:
        """What the calibration data is at the layer's inputs, on the first device; empty without
        data."""

        if self._lanes[0].calibration is None:
            return {}
        statistics = empty_statistics(self._lanes[0].runner, layer, state)
        turns = Turns(self.devices.check) if len(self._lanes) > 1 else None

        def collect(lane: Lane) -> None:
            runner, module = lane.runner, lane.runner.build(layer, state)
            numbers = itertools.count(self._lanes.index(lane), len(self._lanes))
            add_statistics(
                statistics,
                runner,
                module,
                layer,
                lane.calibration,
                lane.reference,
                numbers,
                turns,
            )

        self._together(lambda lane: lane.calibration, collect)
        for stats in dict.fromkeys(statistics.values()):
            stats.check()
        return statistics

    def advance_reference(self, layer: int, loaded: LayerState) -> None:
        """Put the float model's own data through the layer as it was loaded."""
        self._advance(lambda lane: lane.reference, layer, loaded)

    def tune(
        self, layer: int, loaded: LayerState, finished: FinishedLayer, tuning: Tuning, seed: int
    ) -> FinishedLayer:
        """The layer tuned towards the float model's outputs, which the reference has by now.

        On the first device: a step has too little data to share out.
        """
        return tune_layer(
            self._lanes[0].runner,
            layer,
            loaded,
            finished,
            self._all_windows(lambda lane: lane.calibration),
            self._all_windows(lambda lane: lane.reference),
            tuning,
            seed,
        )

    def advance(self, layer: int, original: LayerState, finished: FinishedLayer) -> KvScales | None:
        """Put everything else through the layer: as it was, as it became.

        Returns the scales of the layer's KV cache, where one is wanted.
        """
        cache, scales = None, None
        runner = self._lanes[0].runner
        rounds_kv = self.kv_cache is not None and not runner.has_state(layer)
        seen = [KvRange(self.kv_per_head) if rounds_kv else None for _ in self._lanes]
        state, roundings = finished.apply(original), finished.roundings()
        self._advance(lambda lane: lane.calibration, layer, state, roundings, seen)
        if rounds_kv:
            first, *others = seen
            for other in others:
                first.merge(other)
            scales = first.scales(self.kv_cache)
            cache = RoundedKv(scales, self.kv_cache)
        caches = [cache] * len(self._lanes)
        self._advance(lambda lane: lane.after, layer, state, roundings, caches)
        self._advance(lambda lane: lane.before, layer, original)
        return scales

    def _advance(
        self,
        which: Callable[[Lane], HiddenStates | None],
        layer: int,
        state: LayerState,
        activation: Mapping[str, Rounding] | None = None,
        caches: Sequence[Any] | None = None,
    ) -> None:
        caches_of = dict(zip(self._lanes, caches or [None] * len(self._lanes), strict=True))

        def run(lane: Lane) -> None:
            module = lane.runner.build(layer, state, activation)
            which(lane).advance(lane.runner, module, layer, caches_of[lane])

        self._together(which, run)

    def _together(
        self, which: Callable[[Lane], HiddenStates | None], work: Callable[[Lane], Any]
    ) -> list[Any]:
        """What `work` returns of the lanes that have such windows: the first ones, or none."""
        lanes = [lane for lane in self._lanes if which(lane) is not None]
        jobs = [lambda lane=lane: work(lane) for lane in lanes]
        return self.devices.together(jobs)

    def _all_windows(self, which: Callable[[Lane], HiddenStates]) -> torch.Tensor:
        """[W, S, D] in the data's order: of several devices, in the host's memory."""
        parts = [which(lane).states_WSD for lane in self._lanes if which(lane) is not None]
        if len(parts) == 1:
            return parts[0]
        order_W = torch.cat(self._calibration_rows).argsort()
        return torch.cat([part.cpu() for part in parts])[order_W]

    def perplexities(
        self,
        before: tuple[torch.Tensor, torch.Tensor],
        after: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[Perplexity, Perplexity] | None:
        """Of the float and of the quantized model, each given as (last norm, head)."""
        if self.evaluation_WS is None:
            return None

        def logits(
            which: Callable[[Lane], HiddenStates], norm_D: torch.Tensor, head_VD: torch.Tensor
        ) -> Iterator[torch.Tensor]:
            heads = [head_VD.to(lane.runner.device, lane.runner.dtype) for lane in self._lanes]
            places = sorted(
                (int(window), number, row)
                for number, rows in enumerate(self._evaluation_rows)
                for row, window in enumerate(rows)
            )
            for _, number, row in places:
                lane = self._lanes[number]
                hidden_SD = which(lane).states_WSD[row].to(lane.runner.device)
                yield lane.runner.final_logits(hidden_SD, norm_D, heads[number])

        def measure(
            which: Callable[[Lane], HiddenStates], norm_D: torch.Tensor, head_VD: torch.Tensor
        ) -> Perplexity:
            found = logits(which, norm_D, head_VD)
            return perplexity(self.evaluation_WS, lambda _: next(found), progress=False)

        return (
            measure(lambda lane: lane.before, *before),
            measure(lambda lane: lane.after, *after),
        )


def windows_of_lanes(ids_WS: torch.Tensor | None, lanes: int) -> list[torch.Tensor]:
    """The numbers of the windows that each lane has: batches in turn."""
    if ids_WS is None:
        return [torch.empty(0, dtype=torch.long)] * lanes
    number_W = torch.arange(ids_WS.shape[0])
    lane_W = number_W // batch_windows(ids_WS.shape[1]) % lanes
    return [number_W[lane_W == lane] for lane in range(lanes)]
