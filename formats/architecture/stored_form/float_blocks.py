"""Published weights of DeepSeek-V4: float8 in blocks, and experts in MXFP4.

A scale is called `scale`, a power of two stored as its exponent (E8M0) or as float32. The weights
are presented in the form of compressed-tensors, with the names `weight_scale` and `weight_packed`
(float_blocks_config.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from formats.architecture.stored_form.float_blocks_config import KEY, METHOD
from formats.files.tensor_entry import ComputedEntry, TensorEntry, header_of

EXPONENT = torch.float8_e8m0fnu


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerOfTwo(ComputedEntry):
    """Exponents of a file (E8M0), presented as float32 numbers."""

    def read(self) -> torch.Tensor:
        """Read the whole tensor."""
        stored = self.read_bytes(0, self.num_bytes).view(EXPONENT)
        return stored.float().reshape(self.shape)


def in_groups(config: Mapping[str, Any], entries: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the tensors with the names that `as_groups` describes."""
    block = config.get(KEY)
    if not isinstance(block, Mapping) or block.get("quant_method") != METHOD:
        return entries
    found = dict(entries)
    for name, scale in entries.items():
        module, _, leaf = name.rpartition(".")
        weight = entries.get(f"{module}.weight")
        if weight is None or leaf not in ("scale", "weight_scale_inv"):
            continue
        del found[name]
        if weight.dtype in (torch.int8, torch.uint8):  # two codes of 4 bits in each byte
            found[f"{module}.weight_packed"] = replace(weight, dtype=torch.uint8)
            del found[f"{module}.weight"]
            scale = replace(scale, dtype=torch.uint8)
        elif scale.dtype == EXPONENT:
            scale = PowerOfTwo(**{**header_of(scale), "dtype": torch.float32})
        found[f"{module}.weight_scale"] = scale
    return found
