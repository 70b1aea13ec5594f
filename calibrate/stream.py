"""What flows from layer to layer during a run: calibration windows, and text to compare models on.

Knows which hidden states go through which weights, not where the weights come from.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from calibrate.capture import HiddenStates, LayerRunner, Rounding, collect_statistics
from calibrate.evaluate import Perplexity, perplexity
from calibrate.kv_range import KvRange, KvScales, RoundedKv
from calibrate.layer import FinishedLayer
from calibrate.solving import LayerState, Tuning
from calibrate.statistics import InputStatistics
from calibrate.tuning import tune_layer


class Stream:
    """Hidden states of calibration and evaluation, each through the quantized layers so far and, to
    compare, through the float ones. Any may be absent."""

    def __init__(
        self,
        runner: LayerRunner,
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
        """`rewritten_VD` is the quantized model's embedding; `spill` a folder to spare memory.

        `with_reference`: statistics tell how far the inputs are from the float model's. `kv_cache`:
        the quantized model's evaluation reads keys and values from such a cache, `kv_per_head`
        with scales of their own for each KV head.
        """

        def embed(ids_WS: torch.Tensor | None, table_VD: torch.Tensor):
            return None if ids_WS is None else HiddenStates(ids_WS, table_VD, runner, spill)

        self.runner, self.evaluation_WS = runner, evaluation_WS
        self.kv_cache, self.kv_per_head = kv_cache, kv_per_head
        self._calibration = embed(calibration_WS, rewritten_VD)
        self._reference = embed(calibration_WS, rewritten_VD) if with_reference else None
        self._after = embed(evaluation_WS, rewritten_VD)
        self._before = embed(evaluation_WS, embedding_VD)

    def statistics(self, layer: int, state: LayerState) -> dict[str, InputStatistics]:
        """What the calibration data is at the layer's inputs; empty without data."""
        if self._calibration is None:
            return {}
        module = self.runner.build(layer, state)
        return collect_statistics(self.runner, module, layer, self._calibration, self._reference)

    def advance_reference(self, layer: int, loaded: LayerState) -> None:
        """Put the float model's own data through the layer as it was loaded."""
        self._advance([self._reference], layer, loaded)

    def tune(
        self, layer: int, loaded: LayerState, finished: FinishedLayer, tuning: Tuning, seed: int
    ) -> FinishedLayer:
        """The layer tuned towards the float model's outputs, which the reference has by now."""
        return tune_layer(
            self.runner,
            layer,
            loaded,
            finished,
            self._calibration.states_WSD,
            self._reference.states_WSD,
            tuning,
            seed,
        )

    def advance(self, layer: int, original: LayerState, finished: LayerState) -> KvScales | None:
        """Put everything else through the layer: as it was, as it became.

        Returns the scales of the layer's KV cache, where one is wanted.
        """
        seen, cache, scales = None, None, None
        if self.kv_cache is not None and not self.runner.has_state(layer):
            seen = KvRange(self.kv_per_head)
        state, roundings = finished.apply(original), finished.roundings()
        self._advance([self._calibration], layer, state, roundings, seen)
        if seen is not None:
            scales = seen.scales(self.kv_cache)
            cache = RoundedKv(scales, self.kv_cache)
        self._advance([self._after], layer, state, roundings, cache)
        self._advance([self._before], layer, original)
        return scales

    def _advance(
        self,
        states: list[HiddenStates | None],
        layer: int,
        state: LayerState,
        activation: Mapping[str, Rounding] | None = None,
        cache: Any = None,
    ) -> None:
        present = [hidden for hidden in states if hidden is not None]
        if present:
            module: nn.Module = self.runner.build(layer, state, activation)
            for hidden in present:
                hidden.advance(self.runner, module, layer, cache)

    def perplexities(
        self,
        before: tuple[torch.Tensor, torch.Tensor],
        after: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[Perplexity, Perplexity] | None:
        """Of the float and of the quantized model, each given as (last norm, head)."""
        if self.evaluation_WS is None:
            return None

        def measure(hidden: HiddenStates, norm_D: torch.Tensor, head_VD: torch.Tensor):
            states = iter(hidden.states_WSD)
            head_VD = head_VD.to(self.runner.device, self.runner.dtype)
            return perplexity(
                self.evaluation_WS,
                lambda _: self.runner.final_logits(
                    next(states).to(self.runner.device), norm_D, head_VD
                ),
                progress=False,
            )

        return measure(self._before, *before), measure(self._after, *after)
