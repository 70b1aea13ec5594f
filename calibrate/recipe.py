"""Recipes: transforms that prepare a model's weights, and a solver that quantizes them.

To use your own method, pass quantize_checkpoint a Recipe with your solver instead of a name.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from calibrate.solvers import gptq, refine, rtn
from calibrate.solvers.column_order import ORDERS
from calibrate.solvers.solving import Solver, Transform, Tuning
from calibrate.transforms.awq import AWQ
from calibrate.transforms.rotation import ROTATE
from calibrate.transforms.smoothquant import SMOOTHQUANT
from formats.errors import InputError
from formats.scheme import FP4_TYPES, K_TYPES, Scheme


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A quantization method: transforms, applied in order, then a solver."""

    name: str
    solver: Solver
    transforms: tuple[Transform, ...] = ()
    needs_data: bool = True
    corrects: bool = False  # statistics include the drift from the float model's inputs
    floats: bool = False  # the solver supports float8 weights, not only integer codes
    tuning: Tuning | None = None  # tunes each layer as a whole, after its linears are solved
    act_order: bool = False  # the solver groups inputs freely; the file stores a group index
    # Hold some windows out of the statistics. A linear whose solution is worse on these windows
    # than rounding to nearest is rounded to nearest, and transform factors that are worse are
    # dropped.
    guarded: bool = False
    # Version of your own solver and its settings. Change it when they change. Without a version an
    # interrupted run does not resume.
    version: str = ""

    def __post_init__(self) -> None:
        if self.tuning is None:
            return
        if not self.corrects:
            raise InputError(
                f"recipe {self.name!r}",
                "tuning requires the float model's outputs (corrects=True)",
                "set corrects=True",
            )
        for transform in self.transforms:
            if transform.on_statistics is not None:
                raise InputError(
                    f"recipe {self.name!r}",
                    f"tuning cannot be combined with {transform.name}, which changes weights"
                    " according to the data",
                    "remove one of them",
                )


def _row(
    name: str, solver: Solver, *transforms: Transform, needs_data: bool = True, **options: Any
) -> Recipe:
    return Recipe(
        name=name,
        solver=solver,
        transforms=transforms,
        needs_data=needs_data,
        guarded=needs_data,
        **options,
    )


ACT_ORDER = ", act-order"
ORDERED = (gptq.solve, gptq.solve_corrected)  # solvers that accept any order of inputs
RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        _row("rtn", rtn.solve, needs_data=False, floats=True),
        _row("imatrix", rtn.solve_weighted),
        _row("gptq", gptq.solve),
        _row("gptaq", gptq.solve_corrected, corrects=True),
        _row("gptaq+refine", partial(gptq.solve_corrected, rounds=refine.ROUNDS), corrects=True),
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
    """Return the variant of a recipe that groups inputs of similar magnitude.

    Raises InputError if the recipe's solver does not support this.
    """
    if not _takes_order(recipe.solver):
        able = ", ".join(row.name for row in RECIPES.values() if _takes_order(row.solver))
        raise InputError(f"recipe {recipe.name!r}", "does not support act-order", f"use {able}")
    solver = partial(recipe.solver, order=ORDERS["act-order"])
    return replace(recipe, name=f"{recipe.name}{ACT_ORDER}", solver=solver, act_order=True)


def _takes_order(solver: Solver) -> bool:
    """Return True if the solver has an `order` parameter that is not bound yet."""
    function, _, keywords = _call_of(solver)
    return function in ORDERED and "order" not in keywords


def _call_of(solver: Solver) -> tuple[Solver, tuple[Any, ...], dict[str, Any]]:
    """Return a solver's function and bound arguments, because partial objects compare by identity.

    They are used to compare solvers.
    """
    if isinstance(solver, partial):
        return solver.func, solver.args, solver.keywords
    return solver, (), {}


def find_recipe(recipe: str | Recipe) -> Recipe:
    """Return the recipe of a name, or a Recipe object unchanged. Raises InputError."""
    if isinstance(recipe, Recipe):
        return recipe
    if recipe not in RECIPES:
        raise InputError(f"recipe {recipe!r}", "unknown", f"known recipes: {', '.join(RECIPES)}")
    return RECIPES[recipe]


def identity_of(recipe: Recipe) -> str | None:
    """Return a text that identifies a recipe when a run resumes.

    It is the name of a built-in recipe; name, version and settings of a user's; or None for a
    user's recipe without a version, because a changed solver must not continue an unfinished run.
    """
    ours = RECIPES.get(recipe.name.removesuffix(ACT_ORDER))
    if ours is not None and recipe.act_order and _takes_order(ours.solver):
        ours = with_act_order(ours)
    is_same_solver = ours is not None and _call_of(recipe.solver) == _call_of(ours.solver)
    if is_same_solver and replace(recipe, solver=ours.solver) == ours:
        return recipe.name
    if not recipe.version:
        return None
    tuning = f", {recipe.tuning}" if recipe.tuning is not None else ""
    return f"{recipe.name}, version {recipe.version}{', corrects' * recipe.corrects}{tuning}"


def check_keeps_embeddings(recipe: Recipe) -> None:
    """Raise InputError if the recipe changes token embeddings: image embeddings would not match."""
    if any(transform.on_model is not None for transform in recipe.transforms):
        raise InputError(
            f"recipe {recipe.name}",
            "changes the embeddings of tokens; those of images come from the vision tower, which"
            " stays as it is",
            "use another recipe",
        )


def check_makes(recipe: Recipe, schemes: Iterable[Scheme]) -> None:
    """Raise InputError if a built-in recipe does not support one of the schemes."""
    for scheme in schemes:
        if recipe.name not in RECIPES or scheme.weight.type in ("int", *K_TYPES):
            continue
        makes = _makes_fp4 if scheme.weight.type in FP4_TYPES else _makes_float8
        if not makes(recipe):
            able = ", ".join(row.name for row in RECIPES.values() if makes(row))
            raise InputError(
                f"recipe {recipe.name!r}", f"produces integer codes, not {scheme}", f"use {able}"
            )


def _makes_float8(recipe: Recipe) -> bool:
    return recipe.floats


def _makes_fp4(recipe: Recipe) -> bool:
    """Return True if the recipe supports 4-bit floats.

    Tuning and transforms that search factors support integers only.
    """
    is_able = recipe.floats or recipe.solver in (*ORDERED, rtn.solve_weighted)
    searches = any(transform.on_statistics is not None for transform in recipe.transforms)
    return is_able and not searches and recipe.tuning is None


def default_recipe(scheme: Scheme, *, keeps_inputs: bool = False) -> str:
    """Return the name of a scheme's default recipe.

    `keeps_inputs`: choose one that does not scale the inputs of linears. Weight-only 8-bit schemes
    are accurate when rounded to nearest. With 2 and 3 bits awq+gptaq has not been measured.
    """
    if scheme.weight.type == "int" and scheme.weight.bits == 4 and not keeps_inputs:
        return "awq+gptaq"
    if scheme.weight.type in ("int", *K_TYPES, *FP4_TYPES) and scheme.weight.bits <= 4:
        return "gptaq"
    return "smoothquant+gptq" if integer_activations(scheme) else "rtn"


def integer_activations(scheme: Scheme) -> int | None:
    """Return the activation bits of a scheme with integer activations, else None."""
    return 8 if scheme.activation is not None and scheme.activation.type == "int" else None
