"""Quantize one decoder layer: turn its float tensors into codes and a report."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch

from calibrate.calibration.activations import fake_quantize_groups, fake_quantize_tokens
from calibrate.calibration.input_range import is_starved, round_static, static_scale
from calibrate.calibration.statistics import InputStatistics
from calibrate.devices import ONE, Devices
from calibrate.recipe import Recipe
from calibrate.results.report import LinearReport
from calibrate.solvers import rtn
from calibrate.solvers.scale_range import range_notes
from calibrate.solvers.solving import LayerContext, LayerState, SolverError, check_solved
from formats.files.channel_factors import ChannelFactors
from formats.in_memory.slices import take_outputs
from formats.in_memory.weights import Weight, with_activation
from formats.scheme import Scheme, microscaled_inputs

_Solved = tuple[Weight, LinearReport]


class _Codes(NamedTuple):
    """Result of a solver for one linear."""

    weight: Weight
    notes: list[str]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedLayer:
    """Result of quantizing a layer. Names are local to the layer."""

    packed: dict[str, Weight]
    changed: LayerState  # tensors that a transform rewrote, except weights of linears
    reports: tuple[LinearReport, ...]
    notes: tuple[str, ...] = ()
    factors: ChannelFactors = field(default_factory=ChannelFactors)  # folded by transforms

    def apply(self, state: LayerState) -> LayerState:
        """Return the layer's tensors with dequantized weights, as a server computes with them."""
        weights = {f"{name}.weight": packed.dequantize() for name, packed in self.packed.items()}
        return {**state, **self.changed, **weights}

    def roundings(self) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
        """Return the rounding functions for the inputs of linears, by name.

        Included are integer activations and MICROSCALED schemes; float8 is not rounded.
        """
        found = {}
        for name, packed in self.packed.items():
            micro = microscaled_inputs(packed.scheme)
            if micro is not None:
                found[name] = partial(fake_quantize_groups, spec=micro, scale=packed.input_scale)
                continue
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
        """Return a copy with new reports for the current weights. `state`: the float layer."""
        state = {**state, **self.changed}
        reports = []
        for local, report in zip(self.packed, self.reports, strict=True):
            found = report.measured_again(
                state[f"{local}.weight"], self.packed[local], statistics.get(local)
            )
            reports.append(found)
        return replace(self, reports=tuple(reports))


def load_transforms(state: LayerState, recipe: Recipe, context: LayerContext) -> LayerState:
    """Return the tensors after those transforms of the recipe that need no data."""
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
    """Apply the recipe's transforms, then solve every linear in `schemes`; others stay in float.

    `state` is `original` after load_transforms. `statistics` is empty if the recipe needs no data.
    Keys of `schemes` and `input_scales` are full names. With several `devices` each device solves
    some of the linears; linears that share an input stay on one device. Tensors are expected on the
    first device, and results are returned there. If a solver raises SolverError, the linear is
    rounded to nearest, and its report says so. Other exceptions of the solver are raised.
    """
    for transform in recipe.transforms:
        if transform.on_statistics is not None:
            state = {**state, **transform.on_statistics(state, statistics, context)}
    groups = [
        group
        for group in context.layer_map.inputs(context.config, context.layer)
        if any(f"{context.prefix}.{local}" in schemes for local in group)
    ]
    borrowed = _borrowed_scales(groups, state, statistics, schemes, context, input_scales)
    several = len(devices.names) > 1

    def solve(device: str, own: Sequence[tuple[str, ...]]) -> dict[str, _Solved]:
        found: dict[str, _Solved] = {}
        for group in own:
            stats = statistics.get(group[0])
            weights = {local: state[f"{local}.weight"] for local in group}
            if several:
                stats = None if stats is None else stats.to(device)
                weights = {local: weight.to(device) for local, weight in weights.items()}
            wanted = {local: f"{context.prefix}.{local}" for local in group}
            wanted = {local: name for local, name in wanted.items() if name in schemes}
            stacked = _solve_stacked(wanted, weights, stats, schemes, recipe)
            for local, name in wanted.items():
                devices.check()
                before_linear(local)
                scale = input_scales.get(name, borrowed.get(name))
                packed, report = solve_linear(
                    name, weights, local, stats, schemes[name], recipe, scale, stacked.get(local)
                )
                found[local] = (packed.to(devices.first) if several else packed, report)
        return found

    shares = _assign_groups(groups, state, len(devices.names))
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
        factors=context.factors,
    )


def _borrowed_scales(
    groups: Sequence[tuple[str, ...]],
    state: LayerState,
    statistics: Mapping[str, InputStatistics],
    schemes: Mapping[str, Scheme],
    context: LayerContext,
    input_scales: Mapping[str, torch.Tensor | float],
) -> dict[str, float]:
    """Return static input scales, by full name, for experts that the data did not reach.

    Each is the largest scale of the same linear among the layer's other experts, which have
    similar inputs. If the data reached no expert, the result is empty.
    """
    known: dict[str, list[float]] = {}
    lacking: dict[str, list[str]] = {}
    of_experts = [group for group in groups if context.layer_map.expert_kind(group[0]) is not None]
    if not any(local in statistics and is_starved(statistics[local]) for local, *_ in of_experts):
        return {}
    for group in of_experts:
        weights = [state[f"{local}.weight"] for local in group]
        for local in group:
            name, kind = f"{context.prefix}.{local}", context.layer_map.expert_kind(local)
            activation = schemes[name].activation if name in schemes else None
            if activation is None or activation.dynamic:
                continue
            if name in input_scales:
                known.setdefault(kind, []).append(float(input_scales[name]))
            elif is_starved(statistics[local]):
                lacking.setdefault(kind, []).append(name)
            else:
                known.setdefault(kind, []).append(
                    static_scale(statistics[local], activation, weights)
                )
    found = {}
    for kind, names in lacking.items():
        if kind in known:
            found |= dict.fromkeys(names, max(known[kind]))
    return found


def _solve_stacked(
    wanted: Mapping[str, str],
    weights: Mapping[str, torch.Tensor],
    stats: InputStatistics | None,
    schemes: Mapping[str, Scheme],
    recipe: Recipe,
) -> dict[str, _Codes]:
    """Solve the NVFP4 linears that share an input as one matrix; return the codes of each.

    They then have the same global scale. Servers load q, k and v as one matrix and use the largest
    of three scales. `wanted`: full names by local name. Other linears are not in the result.
    """
    members = [local for local, name in wanted.items() if schemes[name].weight.type == "nvfp4"]
    if len(members) < 2:
        return {}
    started = time.perf_counter()
    name = wanted[members[0]]
    weight_NK = torch.cat([weights[local] for local in members])
    packed, notes = _solve(weight_NK, stats, schemes[name], recipe, name)
    seconds = (time.perf_counter() - started) / len(members)
    found, start = {}, 0
    for local in members:
        stop = start + weights[local].shape[0]
        own = take_outputs(packed, ((start, stop),))
        own = replace(own, global_scale=own.global_scale.clone())  # safetensors: no shared memory
        found[local] = _Codes(own, notes, seconds)
        start = stop
    return found


def _solve(
    weight_NK: torch.Tensor,
    stats: InputStatistics | None,
    scheme: Scheme,
    recipe: Recipe,
    name: str,
) -> tuple[Weight, list[str]]:
    """Return the codes of a weight and notes for its report.

    The recipe's solver chooses the codes. If it fails, or is worse on held-out windows, the weight
    is rounded to nearest, and a note says so.
    """
    notes = []
    try:
        # A copy: a solver may write to it, and the result is compared with the float weight.
        packed = recipe.solver(weight_NK.clone(), stats, scheme.weight, name)
    except SolverError as error:
        packed = rtn.solve(weight_NK, None, scheme.weight, name)
        notes.append(f"rounded to nearest: {error.problem}")
    if recipe.guarded and stats is not None:
        packed, note = _guard(weight_NK, packed, stats, scheme, recipe.name, name)
        notes += note
    check_solved(weight_NK, packed, scheme.weight, name, recipe.act_order)
    return packed, notes


def solve_linear(
    name: str,
    weights: Mapping[str, torch.Tensor],
    local: str,
    stats: InputStatistics | None,
    scheme: Scheme,
    recipe: Recipe,
    scale: torch.Tensor | float | None,
    codes: _Codes | None = None,
) -> _Solved:
    """Solve the linear `local`, choose its static input scale, and measure the result.

    `weights`: [N, K] of all linears that read the same input, by local name. `scale`: the given
    scale of static activations, or None to choose one from `stats`. `codes`: the linear's codes, if
    it was already solved together with others.
    """
    weight_NK = weights[local]
    started = time.perf_counter()
    if codes is None:
        packed, notes = _solve(weight_NK, stats, scheme, recipe, name)
        codes = _Codes(packed, notes, 0.0)
    packed = codes.weight
    notes = [*codes.notes, *range_notes(weight_NK, packed, name)]
    if scale is None and scheme.activation is not None and not scheme.activation.dynamic:
        key = f"scale of a static {scheme.activation.type} at {next(iter(weights))}"
        if key not in stats.cache:  # all linears that read the input share one scale
            stats.cache[key] = static_scale(stats, scheme.activation, list(weights.values()))
        scale = stats.cache[key]
    packed = with_activation(packed, scheme, scale, name)
    seconds = codes.seconds + time.perf_counter() - started
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


def _guard(
    weight_NK: torch.Tensor,
    packed: Weight,
    stats: InputStatistics,
    scheme: Scheme,
    recipe: str,
    name: str,
) -> tuple[Weight, list[str]]:
    """Return the solver's result, or round-to-nearest if that is better on held-out windows.

    The second value has a note if the weight was rounded to nearest.
    """
    solved = stats.held_out_error(weight_NK, packed.dequantize())
    if solved is None:
        return packed, []
    nearest = rtn.solve(weight_NK, None, scheme.weight, name)
    rounded = stats.held_out_error(weight_NK, nearest.dequantize())
    if solved <= rounded:
        return packed, []
    return nearest, [
        f"rounded to nearest: output error {100 * rounded:.2f} % on held-out windows, with"
        f" {recipe} {100 * solved:.2f} %"
    ]


def _assign_groups(
    groups: Sequence[tuple[str, ...]], state: LayerState, num_devices: int
) -> list[list[tuple[str, ...]]]:
    """Assign groups of linears to devices: largest cost first, each to the least loaded device."""

    def cost(group: tuple[str, ...]) -> int:
        """Approximate multiplications: K^3 for the Cholesky factor, K^2 per output."""
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
