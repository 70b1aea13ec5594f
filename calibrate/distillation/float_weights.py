"""Float weights of linears as a checkpoint's recipe transformed them: rotated, and scaled."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from calibrate.float_model import FloatModel
from calibrate.layer import load_transforms
from calibrate.recipe import ACT_ORDER, RECIPES, Recipe
from calibrate.solvers.solving import LayerContext, LayerState
from formats.files.channel_factors import ChannelFactors
from formats.scheme import Scheme

ANY_SPEC = Scheme.parse("w4a16-sym").weight  # rotations do not depend on the scheme


class FloatWeights:
    """A float model's linears, after the transforms of a recipe and with channel factors."""

    def __init__(
        self,
        model: FloatModel,
        quality: Mapping[str, Any] | None,
        factors: ChannelFactors | None = None,
    ) -> None:
        """`quality`: values of the checkpoint's quality.json, which name its recipe and seed.

        Without them the weights are not rotated. `factors`: the checkpoint's channel factors.
        """
        self._model, self._factors = model, factors or ChannelFactors()
        self._recipe, seed = _recipe_of(quality or {})
        self._context = LayerContext(
            layer_map=model.layer_map, config=model.config, spec=ANY_SPEC, seed=seed
        )
        self._layer = -1  # the last layer that was read
        self._state: LayerState = {}

    def __call__(self, layer: int, linear: str) -> torch.Tensor:
        """Return the weight [N, K] of a linear, by its name in the layer."""
        if layer != self._layer:
            state = self._model.layer(layer, "cpu")
            if self._recipe is not None:
                prefix = self._model.layer_map.prefix(layer)
                context = replace(self._context, layer=layer, prefix=prefix)
                state = load_transforms(state, self._recipe, context)
            self._layer, self._state = layer, state
        weight_NK = self._state[f"{linear}.weight"]
        return self._factors.scaled(f"{self._model.layer_map.prefix(layer)}.{linear}", weight_NK)


def _recipe_of(quality: Mapping[str, Any]) -> tuple[Recipe | None, int]:
    """Return the recipe and the seed that a record names; None if it names none of ours.

    Older records have the seed only with the calibration data.
    """
    data = quality.get("calibration") or {}
    name = str(quality.get("recipe")).removesuffix(ACT_ORDER)
    return RECIPES.get(name), quality.get("seed", data.get("seed", 0))
