"""Choose the bits of each linear within a budget of mean bits, to minimize the loss.

One matrix at a time is rounded to each number of bits, and its layer runs on some of the data.
Linears that servers fuse count as one matrix, and so do all experts of a layer. The cost of a
number of bits is the change of the model's predictions, estimated with the gradient of the loss.
Costs of different matrices are assumed to add up; under this assumption the choice is optimal (a
knapsack problem).

Legend: W windows, S tokens, D hidden size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy

from calibrate.calibration.layer_runner import LayerRunner
from calibrate.calibration.vision import Media, open_media
from calibrate.float_model import FloatModel
from calibrate.loss_gradient import LayerGradient, layer_gradients
from calibrate.texts.data import CalibrationData
from formats.errors import SchemeError
from formats.numerics import affine
from formats.rules import fused_name
from formats.scheme import QuantSpec, Scheme

CANDIDATE_BITS = (2, 3, 4, 6, 8)
SCALE_BITS = 16
TOKENS = 4096  # number of calibration tokens on which costs are measured
MAX_UNITS = 200_000  # resolution of the budget; beyond it, sizes are rounded up to larger units


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One matrix, or all experts of a layer, with the cost of each number of bits."""

    names: tuple[str, ...]
    weights: int  # number of weights
    costs: Mapping[int, float]  # bits -> change of the predictions in nats per token


def mixed_overrides(
    model: FloatModel,
    schemes: Mapping[str, Scheme],
    data: CalibrationData,
    scheme: Scheme,
    bits: float,
    device: str,
) -> list[tuple[str, Scheme]]:
    """Return overrides with a scheme per linear, for a mean of `bits` per weight with scales.

    `schemes`: the linears that may change. Raises SchemeError if the budget cannot be met.
    """
    if scheme.weight.type != "int" or scheme.activation is not None:
        raise SchemeError(
            f"scheme {scheme}", "has a fixed number of bits", "use w4a16-sym, or leave out `bits`"
        )
    choices = measure(model, schemes, data, scheme.weight, device)
    chosen = choose(choices, scheme.weight, bits)
    return [
        (name, replace(scheme, weight=replace(scheme.weight, bits=own)))
        for choice, own in zip(choices, chosen, strict=True)
        for name in choice.names
    ]


def size_per_weight(spec: QuantSpec, bits: int) -> float:
    """Return the bits per weight on disk, including scale and zero point divided by the group."""
    if spec.group_size < 1:
        return float(bits)
    return bits + (SCALE_BITS + (0 if spec.symmetric else bits)) / spec.group_size


def choose(choices: Sequence[Choice], spec: QuantSpec, bits: float) -> list[int]:
    """Return the bits of each matrix that minimize the total cost within the budget.

    `bits`: the budget as mean bits per weight, scales included. Raises SchemeError if even the
    fewest bits exceed it.
    """
    total = sum(choice.weights for choice in choices)
    per_weight = {b: size_per_weight(spec, b) for b in CANDIDATE_BITS}
    unit = numpy.gcd.reduce([choice.weights for choice in choices])
    steps = 16 * 128  # bits per weight are multiples of 1/128 for every usual group
    budget = int(numpy.floor(bits * steps + 1e-9)) * (total // unit)
    sizes = [
        {b: int(round(per_weight[b] * steps)) * (choice.weights // unit) for b in per_weight}
        for choice in choices
    ]
    shrink = numpy.gcd.reduce([size for each in sizes for size in each.values()])
    shrink = max(int(shrink), -(-budget // MAX_UNITS))
    sizes = [{b: -(-size // shrink) for b, size in each.items()} for each in sizes]
    budget //= shrink
    least = sum(min(each.values()) for each in sizes)
    if least > budget:
        raise SchemeError(
            f"{bits} bits per weight",
            f"is too few: even {min(CANDIDATE_BITS)} bits take {min(per_weight.values()):.3f}",
            "use more bits, or larger groups",
        )
    best = numpy.zeros(budget + 1)  # least cost of the matrices so far, by units spent
    taken = []
    for choice, each in zip(choices, sizes, strict=True):
        found = numpy.full(budget + 1, numpy.inf)
        own = numpy.zeros(budget + 1, dtype=numpy.int8)
        for b, size in each.items():
            if size > budget:
                continue
            cost = numpy.full(budget + 1, numpy.inf)
            cost[size:] = best[: budget + 1 - size] + choice.costs[b]
            own = numpy.where(cost < found, b, own)
            found = numpy.minimum(found, cost)
        best = found
        taken.append(own)
    chosen, left = [], budget
    for own, each in zip(reversed(taken), reversed(sizes), strict=True):
        b = int(own[left])
        chosen.append(b)
        left -= each[b]
    return chosen[::-1]


def measure(
    model: FloatModel,
    schemes: Mapping[str, Scheme],
    data: CalibrationData,
    spec: QuantSpec,
    device: str,
) -> list[Choice]:
    """Measure the cost of every number of bits for every matrix, layer by layer."""
    layer_map = model.layer_map
    data = data.first(max(1, TOKENS // data.ids_WS.shape[1]))
    dtype = LayerRunner(model, layer_map, device).dtype
    media, rotary = open_media(model, data, device, dtype)
    runner = LayerRunner(model, layer_map, device, rotary)
    choices = []
    for found in layer_gradients(model, runner, data.ids_WS, data.seed, media):
        prefix = layer_map.prefix(found.layer)
        matrices: dict[str, list[str]] = {}
        for group in layer_map.inputs(model.config, found.layer):
            for local in group:
                if f"{prefix}.{local}" in schemes:
                    matrices.setdefault(_matrix(local), []).append(local)
        for locals_ in matrices.values():
            costs = {
                b: _cost(runner, found, locals_, replace(spec, bits=b), media)
                for b in CANDIDATE_BITS
            }
            weights = sum(found.state[f"{local}.weight"].numel() for local in locals_)
            names = tuple(f"{prefix}.{local}" for local in locals_)
            choices.append(Choice(names=names, weights=weights, costs=costs))
    return choices


def _matrix(local: str) -> str:
    """Return the name of what servers load in one scheme: a fused matrix, or a layer's experts."""
    module, is_expert, _ = f".{local}".partition(".experts.")
    return f"{module}.experts" if is_expert else fused_name(local)


def _cost(
    runner: LayerRunner,
    found: LayerGradient,
    locals_: Sequence[str],
    spec: QuantSpec,
    media: Media,
) -> float:
    rounded = dict(found.state)
    for local in locals_:
        weight_NK = found.state[f"{local}.weight"]
        scales_NG, zeros_NG = affine.choose_scales(weight_NK, spec, local)
        codes_NK = affine.quantize(weight_NK, scales_NG, zeros_NG, spec)
        rounded[f"{local}.weight"] = affine.dequantize(codes_NK, scales_NG, zeros_NG)
    module = runner.build(found.layer, rounded)
    inputs_WSD = found.inputs_WSD.to(runner.device)
    return found.divergence(runner.run(module, found.layer, inputs_WSD, media=media))
