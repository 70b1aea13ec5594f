"""Round the linears of a model that transformers runs. Solvers need a row of the family table."""

from collections.abc import Sequence
from pathlib import Path

import torch

from formats.checkpoint import CONFIG, CheckpointReader, read_json
from formats.errors import InputError
from formats.families import FAMILIES
from formats.in_memory.weights import round_to_nearest, with_activation
from formats.plan import fits
from formats.save import Saved, save_quantized
from formats.scheme import Scheme
from qserve.model.fallback.support import (
    AUTO,
    architecture_of,
    config_of,
    is_chosen,
    model_class,
)

RECIPE = "rtn"
# Last parts of names of linears that choose experts: they stay in float
ROUTERS = ("gate", "router", "shared_expert_gate", "classifier", "gate_proj_router")


def has_no_row(folder: str | Path) -> bool:
    """Return True for a model folder that only transformers can run. Raises InputError."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        return False
    raw = read_json(path)
    return architecture_of(raw) not in FAMILIES and is_chosen(raw, AUTO)


def check_rounding_alone(folder: str, is_rounded: bool, settings: Sequence[str]) -> None:
    """Raise InputError for a recipe or `settings` that need a row in the table of families."""
    if is_rounded and not settings:
        return
    flags = [f"--{name.replace('_', '-')}" for name in settings]
    raise InputError(
        flags[0] if flags else "--recipe",
        f"{folder} has no row in `qserve families`, so that its linears can only be rounded",
        f"give --recipe {RECIPE} with --scheme, --group-size N, --format and --ignore alone",
    )


def linear_names(folder: str | Path) -> list[str]:
    """Return the linears below the decoder layers, by name. Raises InputError."""
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
) -> Saved:
    """Write a copy of a model with its linears rounded to nearest. Raises InputError."""
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
    weights = {}
    for name in wanted:
        weight = round_to_nearest(reader.get(f"{name}.weight").float(), scheme.weight, name)
        weights[name] = with_activation(weight, scheme, None, name)
    return save_quantized(
        output,
        folder,
        weights,
        format=output_format,
        scheme=scheme,
        readers=(),
        quantizer=quantizer,
    )
