"""Channel factors of a checkpoint, which make adapters of the float model fit it.

AWQ and SmoothQuant multiply the weights of a linear's input channels and divide what precedes them,
a norm or another linear, by the same factors. The model's function stays the same, but the inputs
and outputs of single linears change, and so an adapter trained on the float model does not fit. A
weight W [N, K] of the float model is diag(1 / o) W diag(i) in the checkpoint. This file holds i [K]
as NAME.inputs and o [N] as NAME.outputs, in float32. Factors of 1 are left out.

The file has the layout of safetensors files. Its name does not end in .safetensors, because vLLM
and SGLang load every file with that ending as weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from formats.errors import CheckpointError, one_line
from formats.files.side_files import CHANNEL_FACTORS

INPUTS, OUTPUTS = "inputs", "outputs"
_KEY, _VERSION = "channel_factors", "1"  # in the metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelFactors:
    """Factors by linear: `inputs` [K] and `outputs` [N], float32. A missing linear has 1."""

    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.inputs or self.outputs)

    def multiply_inputs_(self, linear: str, factors_K: torch.Tensor) -> None:
        """Multiply the factors of a linear's inputs, which begin as 1."""
        _multiply(self.inputs, linear, factors_K)

    def multiply_outputs_(self, linear: str, factors_N: torch.Tensor) -> None:
        """Multiply the factors of a linear's outputs, which begin as 1."""
        _multiply(self.outputs, linear, factors_N)

    def multiply_(self, other: "ChannelFactors", prefix: str = "") -> None:
        """Multiply by the factors of `other`, whose names lack `prefix`."""
        for linear, factors_K in other.inputs.items():
            self.multiply_inputs_(prefix + linear, factors_K)
        for linear, factors_N in other.outputs.items():
            self.multiply_outputs_(prefix + linear, factors_N)

    def scaled(self, linear: str, weight_NK: torch.Tensor) -> torch.Tensor:
        """Return the checkpoint's weight of a linear for its weight in the float model."""
        inputs_K, outputs_N = self.inputs.get(linear), self.outputs.get(linear)
        if inputs_K is not None:
            weight_NK = weight_NK.float() * inputs_K.to(weight_NK.device)
        if outputs_N is not None:
            weight_NK = weight_NK.float() / outputs_N.to(weight_NK.device)[:, None]
        return weight_NK

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the factors by their names in a file."""
        named = {f"{name}.{INPUTS}": each for name, each in self.inputs.items()}
        return named | {f"{name}.{OUTPUTS}": each for name, each in self.outputs.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> "ChannelFactors":
        """Return the factors of named tensors. Raises ValueError for an unknown name or value."""
        found = cls()
        for name, tensor in tensors.items():
            linear, _, end = name.rpartition(".")
            if end not in (INPUTS, OUTPUTS) or not linear:
                raise ValueError(f"{name} is not the name of a factor")
            is_factor = tensor.dtype == torch.float32 and tensor.ndim == 1
            if not is_factor or not bool((tensor.isfinite() & (tensor > 0)).all()):
                raise ValueError(f"{name} must be positive float32 numbers in one dimension")
            (found.inputs if end == INPUTS else found.outputs)[linear] = tensor
        return found

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        tensors = {name: each.cpu().contiguous() for name, each in sorted(self.tensors().items())}
        return save(tensors, metadata={_KEY: _VERSION})


def read_channel_factors(folder: str | Path) -> ChannelFactors | None:
    """Read a folder's factors; None if it has none. Raises CheckpointError."""
    path = Path(folder) / CHANNEL_FACTORS
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            version = (file.metadata() or {}).get(_KEY)
            if version != _VERSION:
                raise ValueError(f"expected version {_VERSION}, found {version}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        return ChannelFactors.from_tensors(tensors)
    except (SafetensorError, ValueError, OSError) as error:
        raise CheckpointError(
            str(path), f"cannot be read: {one_line(error)}", "download it again"
        ) from None


def _multiply(known: dict[str, torch.Tensor], linear: str, factors: torch.Tensor) -> None:
    before = known.get(linear)
    # a new tensor for each linear, because safetensors files hold no shared ones
    factors = factors.detach().float()
    known[linear] = factors.clone() if before is None else before.to(factors.device) * factors
