"""UpdateSource: new weights for a running model, from a model folder or from tensors in memory.

Float tensors are rounded to the schemes of the running model's linears, whether the running model
was rounded while it loaded or is a quantized checkpoint. Quantized tensors must have the running
model's schemes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from formats.architecture.float_linears import linear_shapes
from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from formats.files.memory_tensors import MemoryTensors
from formats.layouts import quantized_modules
from formats.scheme import Scheme
from qserve.model.loading.online_quantization import RoundingPlan
from qserve.model.loading.rounding_source import open_source
from qserve.model.loading.weights import Source
from qserve.model.model_config import ModelConfig

# Fields of ModelConfig that may differ between the running model and its new weights.
MAY_DIFFER = frozenset(
    {"values", "quant", "rounding", "head_scheme", "dtype", "eos_token_ids", "context"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSource:
    """New weights that are not read yet, and the config with which they are read."""

    config: ModelConfig
    source: Source

    @classmethod
    def of_folder(
        cls, model: ModelConfig, folder: str | Path, device: torch.device
    ) -> "UpdateSource":
        """Open a model folder. Raises InputError if it holds another model."""
        found = ModelConfig.from_folder(folder)
        _check_same(model, found, str(folder))
        reader = CheckpointReader(folder)
        return cls._of(model, reader, found, str(folder), device)

    @classmethod
    def of_tensors(
        cls,
        model: ModelConfig,
        tensors: Iterable[tuple[str, torch.Tensor]],
        config: dict[str, Any],
        device: torch.device,
    ) -> "UpdateSource":
        """Use named tensors. `config`: the running model's config.json. Raises InputError."""
        reader = MemoryTensors(tensors, config)
        stated = None if model.rounding is not None else model
        return cls._of(model, reader, stated, "the update", device)

    @classmethod
    def _of(
        cls,
        model: ModelConfig,
        reader: Any,
        stated: ModelConfig | None,
        name: str,
        device: torch.device,
    ) -> "UpdateSource":
        """Create the source. `stated`: config for quantized tensors among the new ones, or None."""
        if coded := quantized_modules(reader.entries):
            if model.quant is None or stated is None or stated.quant is None:
                raise InputError(
                    f"{name}: {coded[0]}",
                    "has quantized tensors, and the running model takes float ones",
                    "send the float weights, which are rounded here",
                )
            config = replace(model, quant=stated.quant, rounding=None)
        else:
            config = replace(model, rounding=_rounding(model))
        return cls(config=config, source=open_source(reader, config, device))


def rounded_schemes(config: ModelConfig) -> dict[str, str]:
    """Return the schemes to which new float weights are rounded: name of a linear -> scheme."""
    try:
        plan = _rounding(config)
    except InputError:  # the schemes need calibration
        return {}
    return {} if plan is None else {name: str(scheme) for name, scheme in plan.schemes.items()}


def _rounding(model: ModelConfig) -> RoundingPlan | None:
    """Return the schemes of the running model's linears; None: all are float. Raises InputError."""
    if model.rounding is not None or model.quant is None:
        return model.rounding
    shapes = linear_shapes(model.family, model.values, model.sizes)
    schemes: Mapping[str, Scheme] = {
        name: scheme for name in shapes if (scheme := model.quant.scheme_for(name)) is not None
    }
    for name, scheme in schemes.items():
        if scheme.activation is not None and not scheme.activation.dynamic:
            raise InputError(
                f"weights {name}",
                f"{scheme} needs activation scales, which come from calibration",
                "quantize the new weights with `qserve quantize` and give that folder",
            )
    return RoundingPlan(config=model.quant, schemes=schemes, reasons={})


def _check_same(running: ModelConfig, found: ModelConfig, folder: str) -> None:
    """Raise InputError if the configs of the two models differ."""
    for field in fields(ModelConfig):
        if field.name in MAY_DIFFER:
            continue
        ours, theirs = getattr(running, field.name), getattr(found, field.name)
        if field.name == "family":
            ours, theirs = ours.architecture, theirs.architecture
        if ours != theirs:
            raise InputError(
                f"{folder}/config.json {field.name}",
                f"expected {str(ours):.100}, found {str(theirs):.100}",
                "start another server for another model",
            )
    if running.sizes != found.sizes:
        raise InputError(
            f"{folder}/config.json",
            "its shapes are not the running model's",
            "start another server for another model",
        )
