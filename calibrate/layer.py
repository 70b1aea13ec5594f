"""One decoder layer: float tensors in, codes and a report out. Knows no file, no other layer."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from calibrate import rtn
from calibrate.recipe import Recipe
from calibrate.report import LinearReport
from calibrate.solving import LayerContext, LayerState, SolverError
from calibrate.statistics import InputStatistics
from formats.errors import CheckpointError
from formats.packed import PackedWeight
from formats.scheme import Scheme


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedLayer:
    """What a layer became. Names are local to the layer."""

    packed: dict[str, PackedWeight]
    changed: LayerState  # tensors besides the linears' weights that a transform rewrote
    reports: tuple[LinearReport, ...]
    notes: tuple[str, ...] = ()

    def apply(self, state: LayerState) -> LayerState:
        """The layer's tensors with this result in place: what a server computes with."""
        weights = {f"{name}.weight": packed.dequantize() for name, packed in self.packed.items()}
        return {**state, **self.changed, **weights}


def check_weights(state: LayerState, names: list[str], prefix: str) -> None:
    """Raise CheckpointError, naming the tensor, where one of `names` has a NaN or infinity."""
    for name in names:
        if name in state and not torch.isfinite(state[name]).all():
            raise CheckpointError(
                f"{prefix}.{name}", "its weights contain NaN or infinity", "mend the model"
            )


def load_transforms(state: LayerState, recipe: Recipe, context: LayerContext) -> LayerState:
    """The tensors after the transforms that need no data."""
    for transform in recipe.transforms:
        if transform.on_load is not None:
            state = {**state, **transform.on_load(state, context)}
    return state


def quantize_layer(
    original: LayerState,
    state: LayerState,
    statistics: dict[str, InputStatistics],
    *,
    scheme: Scheme,
    recipe: Recipe,
    context: LayerContext,
    before_linear: Callable[[str], None] = lambda name: None,
) -> FinishedLayer:
    """Transform, then solve every linear. `state` is `original` after load_transforms.

    `statistics` is empty where the recipe needs no data. Raises what a solver raises, but for
    SolverError: that linear is rounded to nearest, and its report says so.
    """
    for transform in recipe.transforms:
        if transform.on_statistics is not None:
            state = {**state, **transform.on_statistics(state, statistics, context)}
    packed: dict[str, PackedWeight] = {}
    reports = []
    for group in context.layer_map.inputs(context.config):
        for local in group:
            before_linear(local)
            name, stats = f"{context.prefix}.{local}", statistics.get(local)
            weight_NK = state[f"{local}.weight"]
            notes = []
            started = time.perf_counter()
            try:
                packed[local] = recipe.solver(weight_NK, stats, scheme.weight, name)
            except SolverError as error:
                packed[local] = rtn.solve(weight_NK, None, scheme.weight, name)
                notes.append(f"rounded to nearest: {error.problem}")
            seconds = time.perf_counter() - started
            notes += stats.notes if stats is not None else []
            reports.append(
                LinearReport.measure(
                    weight_NK,
                    packed[local],
                    scheme,
                    name=name,
                    seconds=seconds,
                    stats=stats,
                    notes=tuple(notes),
                )
            )
    weights = {f"{local}.weight" for local in packed}
    changed = {
        name: tensor
        for name, tensor in state.items()
        if name not in weights and tensor is not original[name]
    }
    return FinishedLayer(
        packed=packed, changed=changed, reports=tuple(reports), notes=tuple(context.notes)
    )
