"""Apply a LoRA adapter to a layer's linears during calibration.

The linears then get the inputs that they will get when the model is served with the adapter, and
their codes are chosen for these inputs. Only the base weights are quantized and written; the
adapter's folder stays separate.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from calibrate.digest import combined, tensor_digest
from calibrate.recipe import Recipe
from formats.architecture.family import Family
from formats.errors import InputError
from formats.peft.lora import LoraAdapter, LoraPair, adapted_shapes, read_adapter


def read_checked(
    folder: str | Path,
    family: Family,
    config: Mapping[str, Any],
    recipe: Recipe,
    *,
    pads: bool,
) -> LoraAdapter:
    """Read a model's adapter. Raises InputError if it would not fit the quantized model."""
    if recipe.transforms:
        raise InputError(
            "`adapter`",
            f"the recipe {recipe.name} changes the inputs of linears, so the adapter would not fit"
            " the quantized model",
            "use `recipe` gptq, or merge the adapter first: qserve merge",
        )
    if pads:
        raise InputError(
            "`adapter`",
            "cannot be combined with `pad`, which widens the adapted linears",
            "leave out `pad`, or merge the adapter first: qserve merge",
        )
    return read_adapter(folder, adapted_shapes(family, config), family=family)


def check_counts(recipe: Recipe, needs_data: bool) -> None:
    """Raise InputError if the recipe reads no data, because an adapter would have no effect."""
    if not needs_data:
        raise InputError(
            "`adapter`",
            f"the recipe {recipe.name} reads no data, so an adapter has no effect",
            "use `recipe` gptq, or quantize without the adapter: the result is the same",
        )


def adapter_digest(adapter: LoraAdapter) -> str:
    """SHA-256 of all low-rank matrices and scales of an adapter."""
    return combined(
        f"{name} {pair.scale} {tensor_digest(pair.a_rK)} {tensor_digest(pair.b_Nr)}"
        for name, pair in sorted(adapter.pairs.items())
    )


def put_beside(
    module: nn.Module, prefix: str, adapter: LoraAdapter, dtype: torch.dtype, device: str
) -> None:
    """Add hooks to the linears of a layer's module that add the adapter's outputs.

    Call this before adding other hooks.
    """
    for name, linear in module.named_modules():
        pair = adapter.pairs.get(f"{prefix}.{name}")
        if pair is not None:
            _AdapterHooks(pair, dtype, device).hook(linear)


class _AdapterHooks:
    """Hooks of one linear. They keep the linear's input from before later hooks round it."""

    def __init__(self, pair: LoraPair, dtype: torch.dtype, device: str) -> None:
        self._a_rK, self._b_Nr = (each.to(device, dtype) for each in (pair.a_rK, pair.b_Nr))
        self._scale = pair.scale
        self._x: torch.Tensor | None = None

    def hook(self, linear: nn.Module) -> None:
        linear.register_forward_pre_hook(self._keep)
        linear.register_forward_hook(self._add)

    def _keep(self, linear: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self._x = args[0]

    def _add(self, linear: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        x, self._x = self._x, None
        return output + self._scale * (x @ self._a_rK.T) @ self._b_Nr.T
