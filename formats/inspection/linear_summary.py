"""Summary of one linear for `inspect`, and checks that formats share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from formats.checkpoint import TensorEntry
from formats.errors import InputError
from formats.in_memory.packed import SCALE_DTYPES
from formats.in_memory.weights import Weight
from formats.inspection.files import Shards
from formats.inspection.findings import Findings
from formats.scheme import Scheme
from formats.table import size_text


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSummary:
    """Summary of one linear of a decoder layer, derived from its tensors' shapes."""

    name: str
    out_features: int
    in_features: int
    scheme: str  # a scheme as text, or the dtype of a float weight
    num_bytes: int  # without the bias
    # facts that the loading rules read: "float", "act-order", "mislabelled", "zeros not certain",
    # "symmetric data", "no zeros", "weight zeros", "unrounded inputs", "input factors", "codes in
    # bytes"
    traits: frozenset[str] = frozenset()


def float_linear(name: str, entry: TensorEntry) -> LinearSummary:
    """Summarize a float weight [N, K] by its header."""
    return LinearSummary(
        name=name,
        out_features=entry.shape[0],
        in_features=entry.shape[1],
        scheme=entry.stored_as,
        num_bytes=entry.num_bytes,
        traits=frozenset({"float"}),
    )


def describe_experts(num_bytes: int, weights: int) -> str:
    """Return the report's line on experts in MXFP4."""
    bits = 8 * num_bytes / weights
    return f"experts in MXFP4: {size_text(num_bytes)}, {bits:.2f} bits per weight"


def decoded_linear(
    name: str,
    names: Mapping[str, str],
    decode: Callable[[dict[str, torch.Tensor]], Weight],
    shards: Shards,
    findings: Findings,
    *,
    scheme: Scheme,
    traits: frozenset[str],
) -> LinearSummary | None:
    """Summarize a linear by decoding it; None, with a finding, if that fails.

    `names`: its tensors' full names, by their names in `decode`.
    """
    tensors = {field: shards.load(full, findings) for field, full in names.items()}
    if any(tensor is None for tensor in tensors.values()):
        return None
    try:
        weight = decode(tensors)
    except InputError as error:
        findings.caught(error)
        return None
    return LinearSummary(
        name=name,
        out_features=weight.out_features,
        in_features=weight.in_features,
        scheme=str(scheme),
        num_bytes=sum(shards.entries[full].num_bytes for full in names.values()),
        traits=traits,
    )


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
