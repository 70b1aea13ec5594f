"""Float weights of linears in the basis of a checkpoint: rotated as its recipe rotated them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from calibrate.float_model import FloatModel
from calibrate.layer import load_transforms
from calibrate.recipe import ACT_ORDER, RECIPES, Recipe
from calibrate.solvers.solving import LayerContext, LayerState
from formats.scheme import Scheme

ANY_SPEC = Scheme.parse("w4a16-sym").weight  # rotations do not depend on the scheme


class FloatWeights:
    """A float model's linears, after those transforms of a recipe that need no data."""

    def __init__(self, model: FloatModel, quality: Mapping[str, Any] | None) -> None:
        """`quality`: values of the checkpoint's quality.json, which name its recipe and seed.

        Without them the weights are those of the float model.
        """
        self._model = model
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
        return self._state[f"{linear}.weight"]


def _recipe_of(quality: Mapping[str, Any]) -> tuple[Recipe | None, int]:
    """Return the recipe and the seed that a record names; None if it names none of ours.

    Older records have the seed only with the calibration data.
    """
    data = quality.get("calibration") or {}
    name = str(quality.get("recipe")).removesuffix(ACT_ORDER)
    return RECIPES.get(name), quality.get("seed", data.get("seed", 0))
