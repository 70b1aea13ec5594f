"""One decoder layer: float tensors in, codes and a report out. Knows no file, no other layer."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from calibrate import rtn
from calibrate.activations import fake_quantize_tokens
from calibrate.input_range import round_static, static_scale
from calibrate.recipe import Recipe
from calibrate.report import LinearReport
from calibrate.scale_range import range_notes
from calibrate.solving import LayerContext, LayerState, SolverError, check_solved
from calibrate.statistics import InputStatistics
from formats.scheme import Scheme
from formats.weights import Weight, with_activation


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedLayer:
    """What a layer became. Names are local to the layer."""

    packed: dict[str, Weight]
    changed: LayerState  # tensors besides the linears' weights that a transform rewrote
    reports: tuple[LinearReport, ...]
    notes: tuple[str, ...] = ()

    def apply(self, state: LayerState) -> LayerState:
        """The layer's tensors with this result in place: what a server computes with."""
        weights = {f"{name}.weight": packed.dequantize() for name, packed in self.packed.items()}
        return {**state, **self.changed, **weights}

    def roundings(self) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
        """What the linears with integer activations do to their inputs, by name."""
        found = {}
        for name, packed in self.packed.items():
            if packed.activation is None or packed.activation.type != "int":
                continue
            if packed.activation.dynamic:
                found[name] = fake_quantize_tokens
            else:
                found[name] = partial(round_static, scale=packed.input_scale)
        return found

    def measured_again(
        self, state: LayerState, statistics: Mapping[str, InputStatistics]
    ) -> "FinishedLayer":
        """The same with reports of the weights as they are now. `state`: the layer in float."""
        state = {**state, **self.changed}
        reports = []
        for local, report in zip(self.packed, self.reports, strict=True):
            found = report.measured_again(
                state[f"{local}.weight"], self.packed[local], statistics.get(local)
            )
            reports.append(found)
        return replace(self, reports=tuple(reports))


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
    schemes: Mapping[str, Scheme],
    recipe: Recipe,
    context: LayerContext,
    input_scales: Mapping[str, torch.Tensor | float],
    before_linear: Callable[[str], None] = lambda name: None,
) -> FinishedLayer:
    """Transform, then solve every linear of `schemes`; others stay in float.

    `state` is `original` after load_transforms; `statistics` is empty where the recipe needs no
    data; `schemes` and `input_scales` have full names. Raises what a solver raises, but for
    SolverError: that linear is rounded to nearest, and its report says so.
    """
    for transform in recipe.transforms:
        if transform.on_statistics is not None:
            state = {**state, **transform.on_statistics(state, statistics, context)}
    packed: dict[str, Weight] = {}
    reports = []
    for group in context.layer_map.inputs(context.config, context.layer):
        for local in group:
            name, stats = f"{context.prefix}.{local}", statistics.get(local)
            if name not in schemes:
                continue
            before_linear(local)
            scheme = schemes[name]
            weight_NK = state[f"{local}.weight"]
            notes = []
            started = time.perf_counter()
            try:
                # A copy: a solver may write into it, and is judged by the float weight.
                packed[local] = recipe.solver(weight_NK.clone(), stats, scheme.weight, name)
            except SolverError as error:
                packed[local] = rtn.solve(weight_NK, None, scheme.weight, name)
                notes.append(f"rounded to nearest: {error.problem}")
            check_solved(weight_NK, packed[local], scheme.weight, name, recipe.act_order)
            notes += range_notes(weight_NK, packed[local], name)
            scale = input_scales.get(name)
            if scale is None and scheme.activation is not None and not scheme.activation.dynamic:
                key = f"scale of a static {scheme.activation.type}"
                if key not in stats.cache:  # one for all linears that read the input
                    weights = [state[f"{other}.weight"] for other in group]
                    stats.cache[key] = static_scale(stats, scheme.activation, weights)
                scale = stats.cache[key]
            packed[local] = with_activation(packed[local], scheme, scale, name)
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
