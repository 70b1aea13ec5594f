"""One decoder layer: float tensors in, codes and a report out. Knows no file, no other layer."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from calibrate import rtn
from calibrate.activations import fake_quantize_tokens
from calibrate.devices import ONE, Devices
from calibrate.input_range import round_static, static_scale
from calibrate.recipe import Recipe
from calibrate.report import LinearReport
from calibrate.scale_range import range_notes
from calibrate.solving import LayerContext, LayerState, SolverError, check_solved
from calibrate.statistics import InputStatistics
from formats.scheme import Scheme
from formats.weights import Weight, with_activation

_Solved = tuple[Weight, LinearReport]


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
    devices: Devices = ONE,
) -> FinishedLayer:
    """Transform, then solve every linear of `schemes`; others stay in float.

    `state` is `original` after load_transforms; `statistics` is empty where the recipe needs no
    data; `schemes` and `input_scales` have full names. Of several `devices` each solves some of the
    linears, those of one input together; tensors are expected on the first, and end there. Raises
    what a solver raises, but for SolverError: that linear is rounded to nearest, and its report
    says so.
    """
    for transform in recipe.transforms:
        if transform.on_statistics is not None:
            state = {**state, **transform.on_statistics(state, statistics, context)}
    groups = [
        group
        for group in context.layer_map.inputs(context.config, context.layer)
        if any(f"{context.prefix}.{local}" in schemes for local in group)
    ]
    several = len(devices.names) > 1

    def solve(device: str, own: Sequence[tuple[str, ...]]) -> dict[str, _Solved]:
        found: dict[str, _Solved] = {}
        for group in own:
            stats = statistics.get(group[0])
            weights = {local: state[f"{local}.weight"] for local in group}
            if several:
                stats = None if stats is None else stats.to(device)
                weights = {local: weight.to(device) for local, weight in weights.items()}
            for local in group:
                name = f"{context.prefix}.{local}"
                if name in schemes:
                    devices.check()
                    before_linear(local)
                    packed, report = _solve_linear(
                        name, weights, local, stats, schemes[name], recipe, input_scales.get(name)
                    )
                    found[local] = (packed.to(devices.first) if several else packed, report)
        return found

    shares = _shared_out(groups, state, len(devices.names))
    jobs = [
        partial(solve, device, own)
        for device, own in zip(devices.names, shares, strict=True)
        if own
    ]
    solved = {local: each for found in devices.together(jobs) for local, each in found.items()}
    names = [local for group in groups for local in group if local in solved]
    weights = {f"{local}.weight" for local in names}
    changed = {
        name: tensor
        for name, tensor in state.items()
        if name not in weights and tensor is not original[name]
    }
    return FinishedLayer(
        packed={local: solved[local][0] for local in names},
        changed=changed,
        reports=tuple(solved[local][1] for local in names),
        notes=tuple(context.notes),
    )


def _solve_linear(
    name: str,
    weights: Mapping[str, torch.Tensor],
    local: str,
    stats: InputStatistics | None,
    scheme: Scheme,
    recipe: Recipe,
    scale: torch.Tensor | float | None,
) -> _Solved:
    """`weights`: [N, K] of the linears that read the input, by local name. `scale`: of static
    activations, where the caller has one."""
    weight_NK = weights[local]
    notes = []
    started = time.perf_counter()
    try:
        # A copy: a solver may write into it, and is judged by the float weight.
        packed = recipe.solver(weight_NK.clone(), stats, scheme.weight, name)
    except SolverError as error:
        packed = rtn.solve(weight_NK, None, scheme.weight, name)
        notes.append(f"rounded to nearest: {error.problem}")
    check_solved(weight_NK, packed, scheme.weight, name, recipe.act_order)
    notes += range_notes(weight_NK, packed, name)
    if scale is None and scheme.activation is not None and not scheme.activation.dynamic:
        key = f"scale of a static {scheme.activation.type}"
        if key not in stats.cache:  # one for all linears that read the input
            stats.cache[key] = static_scale(stats, scheme.activation, list(weights.values()))
        scale = stats.cache[key]
    packed = with_activation(packed, scheme, scale, name)
    seconds = time.perf_counter() - started
    notes += stats.notes if stats is not None else []
    report = LinearReport.measure(
        weight_NK,
        packed,
        scheme,
        name=name,
        seconds=seconds,
        stats=stats,
        notes=tuple(notes),
    )
    return packed, report


def _shared_out(
    groups: Sequence[tuple[str, ...]], state: LayerState, num_devices: int
) -> list[list[tuple[str, ...]]]:
    """The groups of each device: the dearest first, each to the device with least to do."""

    def cost(group: tuple[str, ...]) -> int:
        """About how many products: of K x K factored, and each output's K x K errors."""
        shapes = [state[f"{local}.weight"].shape for local in group]
        width = shapes[0][1]
        return width * width * (width + sum(outputs for outputs, _ in shapes))

    shares: list[list[tuple[str, ...]]] = [[] for _ in range(num_devices)]
    sums = [0] * num_devices
    order = groups if num_devices == 1 else sorted(groups, key=cost, reverse=True)
    for group in order:
        device = sums.index(min(sums))
        shares[device].append(group)
        sums[device] += cost(group)
    return shares
