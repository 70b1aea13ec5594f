"""Quantize the linears of a model that transformers runs, by rounding or GPTQ."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from formats.architecture.family import architecture_of
from formats.checkpoint import CONFIG, CheckpointReader, read_json
from formats.errors import InputError
from formats.families import FAMILIES
from formats.in_memory.weights import Weight, round_to_nearest, with_activation
from formats.plan import fits
from formats.save import Saved, save_quantized
from formats.scheme import Scheme
from qserve.model.fallback.loading import load_float
from qserve.model.fallback.support import (
    AUTO,
    config_of,
    is_chosen,
    model_class,
)

RECIPES = ("rtn", "gptq")
# (model with float weights, names of linears) -> name -> quantized weight
Solve = Callable[[Any, Sequence[str]], dict[str, Weight]]
# Last components of the names of routers, which stay in float
ROUTERS = ("gate", "router", "shared_expert_gate", "classifier", "gate_proj_router")


def has_no_row(folder: str | Path) -> bool:
    """Return True if only transformers can run the model in a folder. Raises InputError."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        return False
    raw = read_json(path)
    return architecture_of(raw) not in FAMILIES and is_chosen(raw, AUTO)


def check_settings(folder: str, recipe: str, settings: Sequence[str]) -> None:
    """Raise InputError for a recipe or settings that need a row in the table of families."""
    if recipe in RECIPES and not settings:
        return
    flags = [f"--{name.replace('_', '-')}" for name in settings]
    raise InputError(
        flags[0] if flags else "--recipe",
        f"{folder} has no row in `qserve families`, so its linears can only be rounded or quantized"
        " by gptq",
        f"give --recipe {' or '.join(RECIPES)}, and only --scheme, --group-size N, --format,"
        " --ignore and, for gptq, --device and the flags of calibration data",
    )


def linear_names(folder: str | Path) -> list[str]:
    """Return the names of the linears in the decoder layers. Raises InputError."""
    raw = read_json(Path(folder) / CONFIG)
    cls = model_class(raw)
    with torch.device("meta"):
        model = cls(config_of(cls, raw))
    layers = [
        f"{name}."
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList)
    ]
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and name.startswith(tuple(layers))
        and name.rpartition(".")[2] not in ROUTERS
    ]


def quantize_fallback(
    folder: str | Path,
    output: str | Path,
    scheme: Scheme,
    *,
    output_format: str | None = None,
    ignore: Sequence[str] = (),
    quantizer: str = "qserve-kit",
    solve: Solve | None = None,
) -> Saved:
    """Write a copy of a model with quantized linears. Raises InputError.

    `solve`: quantizes the linears; None: they are rounded to nearest.
    """
    reader = CheckpointReader(folder, in_blocks=False)
    wanted = [
        name
        for name in linear_names(folder)
        if f"{name}.weight" in reader and not any(fits(pattern, name) for pattern in ignore)
    ]
    if not wanted:
        raise InputError(
            str(folder),
            f"has no linear of {architecture_of(reader.config)} by the names of transformers",
            "its tensors may be stored in another form; use a family with a row",
        )
    if solve is None:
        weights = {
            name: round_to_nearest(reader.get(f"{name}.weight").float(), scheme.weight, name)
            for name in wanted
        }
    else:
        cls = model_class(reader.config)
        model = load_float(cls, reader.config, Path(folder), torch.float32)
        weights = solve(model.train(False).requires_grad_(False), wanted)
    weights = {name: with_activation(each, scheme, None, name) for name, each in weights.items()}
    return save_quantized(
        output,
        folder,
        weights,
        format=output_format,
        scheme=scheme,
        readers=(),
        quantizer=quantizer,
    )
