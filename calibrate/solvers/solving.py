"""Interfaces of solvers and transforms.

A *solver* computes codes from a weight and input statistics. If it fails, it raises SolverError;
the pipeline then rounds that linear to nearest and says so in the report. A *transform* rewrites
float weights so that rounding changes the model less; the float model's function stays the same.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from calibrate.calibration.statistics import InputStatistics
from calibrate.layer_map import LayerMap, ScalePair
from formats.errors import InputError
from formats.files.channel_factors import ChannelFactors
from formats.in_memory.weights import Weight
from formats.scheme import ActivationSpec, QuantSpec, Scheme

# (weight [N, K], input statistics or None without data, spec, the linear's name) -> codes
Solver = Callable[[torch.Tensor, InputStatistics | None, QuantSpec, str], Weight]
LayerState = dict[str, torch.Tensor]  # a layer's tensors by local name


MORE_DATA = "give more or other calibration data"  # remedy of a SolverError


class SolverError(InputError):
    """A linear cannot be solved from its statistics; it can still be rounded to nearest."""


def check_solved(
    weight_NK: torch.Tensor, solved: object, spec: QuantSpec, name: str, act_order: bool = False
) -> None:
    """Raise InputError, naming the linear, if a solver's result is not what was requested.

    Checked are type, spec, shape and the grouping of inputs. `act_order`: groups may have
    non-adjacent inputs.
    """
    if not isinstance(solved, Weight):
        raise InputError(
            name,
            f"its solver returned {type(solved).__name__}, expected codes and scales",
            "return PackedWeight.from_codes(...)",
        )
    wanted, found = Scheme(weight=spec), Scheme(weight=solved.spec)
    shape = [solved.out_features, solved.in_features]
    if (wanted, list(weight_NK.shape)) != (found, shape):
        raise InputError(
            name,
            f"its solver returned {found} {shape}, expected {wanted} {list(weight_NK.shape)}",
            "use the spec that the solver receives",
        )
    if solved.input_order is not None and not act_order:
        raise InputError(
            name,
            "its solver returned codes whose inputs are not grouped in order (act-order), "
            "which servers reject",
            "give each group adjacent inputs; the order of solving is free",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext:
    """Information about a layer for transforms, besides its tensors."""

    layer_map: LayerMap
    config: dict[str, Any]  # config.json
    spec: QuantSpec
    activation_bits: int | None = None  # None: activations are not rounded
    activation: ActivationSpec | None = None  # how activations are rounded
    seed: int = 0
    layer: int = 0
    prefix: str = ""  # prefix of the layer's tensor names
    quantized: Collection[str] | None = None  # full names of quantized linears; None: all
    notes: list[str] = field(default_factory=list)  # warnings, for the report
    # factors that transforms fold into the layer, by local name; not of experts
    factors: ChannelFactors = field(default_factory=ChannelFactors)

    @property
    def scale_pairs(self) -> tuple[ScalePair, ...]:
        """Scale pairs of the layer."""
        return self.layer_map.scale_pairs(self.config, self.layer)

    @property
    def rounded_pairs(self) -> Iterator[tuple[ScalePair, tuple[str, ...]]]:
        """Scale pairs of the layer with their quantized linears, of which there is at least one."""
        for pair in self.scale_pairs:
            names = tuple(name for name in pair.linears if self.is_quantized(name))
            if names:
                yield pair, names

    def is_quantized(self, linear: str) -> bool:
        """Return whether a linear of the layer, by its name in the layer, is quantized."""
        return self.quantized is None or f"{self.prefix}.{linear}" in self.quantized

    @property
    def is_static(self) -> bool:
        """True if inputs are rounded to int8 with scales from the checkpoint."""
        own = self.activation
        return own is not None and own.type == "int" and not own.dynamic

    @property
    def value_heads(self) -> tuple[int, int]:
        """(number of key/value heads, query heads per key/value head)."""
        heads, shared = self.layer_map.family.heads_of_layer(self.layer, self.config)
        return shared, heads // shared


@dataclass(frozen=True, slots=True, kw_only=True)
class Transform:
    """Up to three hooks that rewrite float weights. Each returns the tensors that it changed."""

    name: str
    # Gets embedding, last norm and head by full name; a tied head is passed as a separate tensor.
    on_model: Callable[[LayerState, LayerContext], LayerState] | None = None
    # Gets a layer's tensors, before data is seen.
    on_load: Callable[[LayerState, LayerContext], LayerState] | None = None
    # Gets a layer's tensors and its input statistics, and must update the statistics to match.
    on_statistics: (
        Callable[[LayerState, dict[str, InputStatistics], LayerContext], LayerState] | None
    ) = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Settings for tuning a whole layer after its linears are solved (solvers/tuning.py).

    All rates decay to 0.
    """

    steps: int = 200
    tokens: int = 2048  # per step
    rate: float = 0.01  # rate of codes, in units of codes
    scale_rate: float = 0.003  # rate of scales, relative to each scale
    norm_rate: float = 0.0005  # rate of norm weights, relative to each weight


def move_scale(
    state: LayerState,
    statistics: dict[str, InputStatistics],
    pair: ScalePair,
    scale_K: torch.Tensor,
    context: LayerContext,
) -> LayerState:
    """Divide the outputs of `pair.previous` by scale_K, and multiply the linears' weights by it.

    Returns the changed tensors, with weights of quantized linears in float32, and updates the
    statistics and the context's channel factors. A norm keeps its dtype; the linears absorb its
    rounding error, so that the product stays exact.
    """
    changed: LayerState = {}
    scale_K = scale_K.float()
    weight = state[f"{pair.previous}.weight"]
    if pair.kind == "norm":
        offset = context.layer_map.norm_offset
        gain_K = weight.float() + offset
        moved = (gain_K / scale_K - offset).to(weight.dtype)
        scale_K = torch.where(gain_K == 0, 1.0, gain_K / (moved.float() + offset))
        changed[f"{pair.previous}.weight"] = torch.where(gain_K == 0, weight, moved)
        bias = state.get(f"{pair.previous}.bias")
        if bias is not None:
            changed[f"{pair.previous}.bias"] = (bias.float() / scale_K).to(bias.dtype)
    else:
        scale_N = scale_K
        if pair.kind == "values":
            heads, repeats = context.value_heads
            scale_N = scale_K.view(heads, repeats, -1)[:, 0].flatten()
        rows = slice(weight.shape[0] - scale_N.shape[0], None)
        moved = weight.float().clone()
        moved[rows] /= scale_N[:, None]
        changed[f"{pair.previous}.weight"] = moved
        bias = state.get(f"{pair.previous}.bias")
        if bias is not None:
            moved = bias.float().clone()
            moved[rows] /= scale_N
            changed[f"{pair.previous}.bias"] = moved.to(bias.dtype)
        if context.layer_map.expert_kind(pair.previous) is None:
            factors_N = torch.ones_like(weight[:, 0], dtype=torch.float32)
            factors_N[rows] = scale_N
            context.factors.multiply_outputs_(pair.previous, factors_N)
    for name in pair.linears:
        changed[f"{name}.weight"] = state[f"{name}.weight"].float() * scale_K
        if context.layer_map.expert_kind(name) is None:
            context.factors.multiply_inputs_(name, scale_K)
    for name in pair.in_float:
        in_float = state[f"{name}.weight"]
        changed[f"{name}.weight"] = (in_float.float() * scale_K).to(in_float.dtype)
    statistics[pair.linears[0]].scale_(scale_K)
    return changed


def shared_by_heads(values_K: torch.Tensor, pair: ScalePair, context: LayerContext) -> torch.Tensor:
    """Replace values by their mean over the query heads that read the same value head."""
    if pair.kind != "values":
        return values_K
    heads, repeats = context.value_heads
    mean = values_K.view(heads, repeats, -1).mean(1, keepdim=True)
    return mean.expand(heads, repeats, mean.shape[-1]).reshape(-1)
