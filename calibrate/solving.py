"""What solvers and transforms are, and what they are told. Knows none of them.

A *solver* turns weight and statistics into codes. One that cannot do its work raises SolverError;
the pipeline then rounds that linear to nearest and says so in the report. A *transform* rewrites
float weights so that they are easier to round, and leaves the model's function as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from calibrate.layer_map import LayerMap, ScalePair
from calibrate.statistics import InputStatistics
from formats.errors import InputError
from formats.scheme import ActivationSpec, QuantSpec, Scheme
from formats.weights import Weight

# (weight [N, K], statistics of its input or None without data, spec, the linear's name) -> codes
Solver = Callable[[torch.Tensor, InputStatistics | None, QuantSpec, str], Weight]
LayerState = dict[str, torch.Tensor]  # a layer's tensors by their local names


class SolverError(InputError):
    """This linear cannot be solved from its statistics; it can still be rounded to nearest."""


def check_solved(
    weight_NK: torch.Tensor, solved: object, spec: QuantSpec, name: str, act_order: bool = False
) -> None:
    """Raise InputError, with the linear's `name`, unless a solver did what it was asked for.

    `act_order`: it may group inputs that do not stand together.
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
            "use the spec that it is given",
        )
    if solved.input_order is not None and not act_order:
        raise InputError(
            name,
            "its solver returned codes whose inputs are not grouped in order (act-order), which"
            " servers refuse",
            "give each group the inputs that stand together; the order of solving is free",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext:
    """What a transform may know beside the tensors."""

    layer_map: LayerMap
    config: dict[str, Any]  # config.json
    spec: QuantSpec
    activation_bits: int | None = None  # None: activations stay as they are
    activation: ActivationSpec | None = None  # how they are rounded
    seed: int = 0
    layer: int = 0
    prefix: str = ""  # of the layer
    notes: list[str] = field(default_factory=list)  # for the report

    @property
    def scale_pairs(self) -> tuple[ScalePair, ...]:
        """Where factors of the layer can move."""
        return self.layer_map.scale_pairs(self.config, self.layer)

    @property
    def is_static(self) -> bool:
        """Are inputs rounded to int8 with scales that stand in the checkpoint?"""
        own = self.activation
        return own is not None and own.type == "int" and not own.dynamic

    @property
    def value_heads(self) -> tuple[int, int]:
        """(number of key/value heads, query heads that share one)."""
        heads = self.config["num_attention_heads"]
        shared = self.config.get("num_key_value_heads") or heads
        return shared, heads // shared


@dataclass(frozen=True, slots=True, kw_only=True)
class Transform:
    """Up to three places to rewrite float weights. Each returns the tensors that it changed."""

    name: str
    # embeddings, last norm, head by full name; a tied head is given as a tensor of its own
    on_model: Callable[[LayerState, LayerContext], LayerState] | None = None
    # a layer's tensors, before data is seen
    on_load: Callable[[LayerState, LayerContext], LayerState] | None = None
    # a layer's tensors and its inputs' statistics, which it must keep in step
    on_statistics: (
        Callable[[LayerState, dict[str, InputStatistics], LayerContext], LayerState] | None
    ) = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Of a layer as a whole, after its linears are solved (calibrate/tuning.py): how far."""

    steps: int = 200
    tokens: int = 2048  # of a step
    rate: float = 0.01  # of codes, in codes; falls to 0
    scale_rate: float = 0.003  # of scales, as a share of them
    norm_rate: float = 0.0005  # of norms' weights, as a share of what they multiply by


def move_scale(
    state: LayerState,
    statistics: dict[str, InputStatistics],
    pair: ScalePair,
    scale_K: torch.Tensor,
    context: LayerContext,
) -> LayerState:
    """Divide what `pair.linears` read by scale_K in `pair.previous`, and multiply their weights.

    Returns the changed tensors, weights in float32; brings the statistics in step. A norm keeps its
    dtype: the linears take up what rounding it changes, so that the product stays exact.
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
    for name in pair.linears:
        changed[f"{name}.weight"] = state[f"{name}.weight"].float() * scale_K
    statistics[pair.linears[0]].scale_(scale_K)
    return changed


def shared_by_heads(values_K: torch.Tensor, pair: ScalePair, context: LayerContext) -> torch.Tensor:
    """Make values equal for the query heads that read one value head: their mean."""
    if pair.kind != "values":
        return values_K
    heads, repeats = context.value_heads
    mean = values_K.view(heads, repeats, -1).mean(1, keepdim=True)
    return mean.expand(heads, repeats, mean.shape[-1]).reshape(-1)
