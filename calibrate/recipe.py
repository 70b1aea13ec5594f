"""Recipes: which solver turns a linear's weight into codes. Knows names, not the solvers' maths."""

from collections.abc import Callable

import torch

from calibrate import rtn
from formats.errors import InputError
from formats.scheme import QuantSpec
from formats.weights import Weight

Solver = Callable[[torch.Tensor, QuantSpec, str], Weight]  # (weight [N, K], spec, its name)

RECIPES: dict[str, Solver] = {
    "rtn": rtn.solve,
}


def find_solver(recipe: str) -> Solver:
    """The solver of a recipe. Raises InputError where it is unknown."""
    if recipe not in RECIPES:
        raise InputError(f"recipe {recipe!r}", "unknown", f"known recipes: {', '.join(RECIPES)}")
    return RECIPES[recipe]
