"""Recipes: which transforms prepare a model's weights and which solver turns them into codes.

Knows names, not the maths. A recipe of one's own is a Recipe with one's own solver, given to
quantize_checkpoint in place of a name.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from calibrate import gptq, rtn, source_code
from calibrate.awq import AWQ
from calibrate.column_order import ORDERS
from calibrate.rotation import ROTATE
from calibrate.smoothquant import SMOOTHQUANT
from calibrate.solving import Solver, Transform, Tuning
from formats.errors import InputError
from formats.scheme import Scheme


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Transforms in their order, then a solver."""

    name: str
    solver: Solver
    transforms: tuple[Transform, ...] = ()
    needs_data: bool = True
    corrects: bool = False  # the solver wants the float model's inputs too (statistics' drift)
    floats: bool = False  # it can make float8 weights too, not only integer codes
    tuning: Tuning | None = None  # of each layer as a whole, after its linears are solved
    act_order: bool = False  # the solver groups inputs as it likes, by an index in the file

    def __post_init__(self) -> None:
        if self.tuning is None:
            return
        if not self.corrects:
            raise InputError(
                f"recipe {self.name!r}", "tuning needs the float model's outputs", "set corrects"
            )
        for transform in self.transforms:
            if transform.on_statistics is not None:
                raise InputError(
                    f"recipe {self.name!r}",
                    f"tuning does not follow {transform.name}, which rewrites weights by the data",
                    "leave out one of them",
                )


def _row(name: str, solver: Solver, *transforms: Transform, **options: Any) -> Recipe:
    return Recipe(name=name, solver=solver, transforms=transforms, **options)


ORDERED = (gptq.solve, gptq.solve_corrected)  # solvers that take the inputs in any order
RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        _row("rtn", rtn.solve, needs_data=False, floats=True),
        _row("imatrix", rtn.solve_weighted),
        _row("gptq", gptq.solve),
        _row("gptaq", gptq.solve_corrected, corrects=True),
        _row("awq", rtn.solve_weighted, AWQ),
        _row("smoothquant", rtn.solve, SMOOTHQUANT),
        _row("rotate", rtn.solve_weighted, ROTATE),
        _row("awq+gptq", gptq.solve, AWQ),
        _row("awq+gptaq", gptq.solve_corrected, AWQ, corrects=True),
        _row("smoothquant+gptq", gptq.solve, SMOOTHQUANT),
        _row("rotate+gptq", gptq.solve, ROTATE),
        _row("rotate+awq+gptq", gptq.solve, ROTATE, AWQ),
        _row("autoround", gptq.solve_corrected, corrects=True, tuning=Tuning()),
    )
}


def with_act_order(recipe: Recipe) -> Recipe:
    """The same with groups of inputs of like size. Raises InputError where it solves nothing."""
    if recipe.solver not in ORDERED:
        able = ", ".join(row.name for row in RECIPES.values() if row.solver in ORDERED)
        raise InputError(
            f"recipe {recipe.name!r}", "rounds inputs in the order that they have", f"use {able}"
        )
    solver = partial(recipe.solver, order=ORDERS["act-order"])
    return replace(recipe, name=f"{recipe.name}, act-order", solver=solver, act_order=True)


def find_recipe(recipe: str | Recipe) -> Recipe:
    """The recipe of that name; one's own is returned as it is. Raises InputError."""
    if isinstance(recipe, Recipe):
        return recipe
    if recipe not in RECIPES:
        raise InputError(f"recipe {recipe!r}", "unknown", f"known recipes: {', '.join(RECIPES)}")
    return RECIPES[recipe]


def identity_of(recipe: Recipe) -> str:
    """What tells a recipe from others of its name: one's own by the files that its code stands in,
    the values that are bound to it, and its settings.

    Layers of an unfinished run must not be taken over by a solver that has been mended since.
    """
    if RECIPES.get(recipe.name) is recipe:
        return recipe.name
    steps = [step for t in recipe.transforms for step in (t.on_model, t.on_load, t.on_statistics)]
    source = source_code.digest([recipe.solver, *steps])[:8]
    tuning = f", {recipe.tuning}" if recipe.tuning is not None else ""
    return f"{recipe.name}, source {source}{', corrects' * recipe.corrects}{tuning}"


def check_makes(recipe: Recipe, schemes: Iterable[Scheme]) -> None:
    """Raise InputError where a row of RECIPES cannot make one of the schemes' weights."""
    for scheme in schemes:
        if scheme.weight.type != "int" and not recipe.floats and recipe.name in RECIPES:
            able = ", ".join(row.name for row in RECIPES.values() if row.floats)
            raise InputError(
                f"recipe {recipe.name!r}", f"makes integer codes, not {scheme}", f"use {able}"
            )


def default_recipe(scheme: Scheme) -> str:
    """What an expert would take: 8-bit weights alone are fine rounded to nearest."""
    if scheme.weight.type == "int" and scheme.weight.bits <= 4:
        return "gptq"
    return "smoothquant+gptq" if integer_activations(scheme) else "rtn"


def integer_activations(scheme: Scheme) -> int | None:
    """The bits of a scheme whose activations are integers, else None."""
    return 8 if scheme.activation is not None and scheme.activation.type == "int" else None
