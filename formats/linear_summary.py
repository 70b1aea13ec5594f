"""What the doctor says of one linear, and the check of scales that all formats share."""

from dataclasses import dataclass

import torch

from formats.findings import Findings
from formats.inspect_files import Shards
from formats.packed import SCALE_DTYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSummary:
    """One linear of a decoder layer, as its tensors' shapes describe it."""

    name: str
    out_features: int
    in_features: int
    scheme: str  # a scheme's printed form, or the dtype of a float weight
    num_bytes: int  # without the bias
    # "float", "act-order", "mislabelled", "zeros not certain", "symmetric data", "no zeros",
    # "weight zeros": what decides who loads it
    traits: frozenset[str] = frozenset()


def check_scales(name: str, shards: Shards, findings: Findings) -> None:
    """Report NaN, infinite, zero and subnormal scales."""
    scales = shards.load(name, findings)
    if scales is None:
        return
    if scales.dtype not in SCALE_DTYPES:
        findings.error(name, f"expected floating point, found {scales.dtype}")
        return
    values = scales.float()
    if not torch.isfinite(values).all():
        findings.error(name, "contains NaN or infinity", "requantize")
    if (values == 0).any():
        findings.error(name, "contains zero", "requantize")
    tiny = torch.finfo(scales.dtype).tiny
    count = int(((values != 0) & (values.abs() < tiny)).sum())
    if count:
        findings.warning(
            name, f"{count} scales are subnormal in {scales.dtype}", "some kernels read them as 0"
        )
