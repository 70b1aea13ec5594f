"""Are the tensors of a GPTQ linear right? Reads the small ones: zeros, scales, group index.

Legend: N outputs, K inputs, G groups, b bits.
"""

from dataclasses import dataclass
from typing import Any

import torch

from formats.bits import unpack
from formats.checkpoint import TensorEntry
from formats.errors import InputError
from formats.findings import Findings
from formats.gptq import TENSOR_NAMES
from formats.inspect_files import Shards
from formats.scheme import CHANNEL, QuantSpec, Scheme


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSummary:
    """One linear of a decoder layer, as its tensors' shapes describe it."""

    name: str
    out_features: int
    in_features: int
    scheme: str  # a scheme's printed form, or the dtype of a float weight
    num_bytes: int  # without the bias


def gptq_names(shards: Shards, block: Any) -> list[str]:
    """Linears of which a qweight or qzeros is there; none in another tool's format."""
    if isinstance(block, dict) and block.get("quant_method") != "gptq":
        return []
    return sorted(
        {
            name.rpartition(".")[0]
            for name in shards.entries
            if name.endswith((".qweight", ".qzeros"))
        }
    )


def gptq_linear(
    name: str, shards: Shards, scheme: Scheme | None, layout: str, findings: Findings
) -> LinearSummary | None:
    """Check a linear's tensors against each other and the config; None: its shape is unclear."""
    full = {tensor: f"{name}.{tensor}" for tensor in TENSOR_NAMES}
    missing = [t for t in ("qweight", "qzeros", "scales") if full[t] not in shards]
    for tensor in missing:
        if full[tensor] not in shards.lost:
            findings.error(full[tensor], "is missing", "the checkpoint is incomplete")
    if missing:
        return None
    found = {t: shards.entries[n] for t, n in full.items() if n in shards}
    spec = _spec_of_shapes(name, found, scheme, findings)
    if spec is None:
        return None
    words, out_features = found["qweight"].shape
    in_features = words * 32 // spec.bits
    stated = scheme.weight if scheme else spec
    if spec.bits != stated.bits:
        findings.error(name, f"its tensors have {spec.bits} bits, config.json states {stated.bits}")
    elif spec.group_length(in_features) != stated.group_length(in_features):
        findings.error(
            name,
            f"its tensors have groups of {spec.group_length(in_features)}, config.json states"
            f" {stated.group_size}",
        )
    else:
        spec = stated  # one group for the whole input may be called -1 or by its length
    _check_zeros(full["qzeros"], spec, layout, shards, findings)
    _check_scales(full["scales"], shards, findings)
    if "g_idx" in found:
        _check_group_index(
            full["g_idx"], spec.group_length(in_features), in_features, shards, findings
        )
    return LinearSummary(
        name=name,
        out_features=out_features,
        in_features=in_features,
        scheme=str(Scheme(weight=spec)),
        num_bytes=sum(entry.num_bytes for entry in found.values()),
    )


def _spec_of_shapes(
    name: str, found: dict[str, TensorEntry], scheme: Scheme | None, findings: Findings
) -> QuantSpec | None:
    """Bits and group size as the shapes tell them: [K*b/32, N], [G, N*b/32], [G, N]."""
    for tensor, entry in found.items():
        expected = 1 if tensor == "g_idx" else 2
        if len(entry.shape) != expected:
            findings.error(entry.name, f"expected {expected} dimensions, found {list(entry.shape)}")
            return None
        if (tensor == "scales") != entry.dtype.is_floating_point or (
            tensor != "scales" and entry.dtype != torch.int32
        ):
            wanted = "floating point" if tensor == "scales" else "int32"
            findings.error(entry.name, f"expected {wanted}, found {entry.dtype}")
            return None
    qweight, qzeros, scales = (found[t].shape for t in ("qweight", "qzeros", "scales"))
    out_features = qweight[1]
    bits = 32 * qzeros[1] // out_features if out_features else 0
    in_features = qweight[0] * 32 // bits if bits else 0
    num_groups = scales[0]
    if (
        bits not in (4, 8)
        or scales != (qzeros[0], out_features)
        or 32 * qzeros[1] != bits * out_features
        or not num_groups
        or not in_features
        or in_features % num_groups
    ):
        findings.error(
            name,
            f"its shapes do not fit together: qweight {list(qweight)}, qzeros {list(qzeros)},"
            f" scales {list(scales)}",
        )
        return None
    symmetric = scheme.weight.symmetric if scheme else True
    group_size = in_features // num_groups if num_groups > 1 else CHANNEL
    try:
        spec = QuantSpec(bits=bits, symmetric=symmetric, group_size=group_size)
        spec.check_shape(name, out_features, in_features)
    except InputError as error:
        findings.error(name, f"{error.subject}: {error.problem}", error.remedy)
        return None
    return spec


def _check_zeros(
    name: str, spec: QuantSpec, layout: str, shards: Shards, findings: Findings
) -> None:
    qzeros = shards.load(name, findings)
    if qzeros is None:
        return
    stored = unpack(qzeros, spec.bits)
    middle = spec.symmetric_zero
    expected, other = (middle, middle - 1) if layout == "gptq_v2" else (middle - 1, middle)
    if not spec.symmetric:
        if layout != "gptq_v2" and (stored == spec.max_code).any():
            findings.warning(name, "holds a zero point of 0, which v1 readers disagree about")
    elif (stored == other).all():
        held, stated = ("v1", "gptq_v2") if layout == "gptq_v2" else ("v2", "gptq (v1)")
        findings.error(
            name,
            f"holds {held} zeros ({other}), config.json says {stated}:"
            " every weight is off by one step",
            "mend checkpoint_format, or requantize",
        )
    elif (stored != expected).any():
        values = stored.unique().tolist()
        findings.error(
            name,
            f"a symmetric scheme stores {expected} throughout, found {values[:8]}",
            "requantize",
        )


def _check_scales(name: str, shards: Shards, findings: Findings) -> None:
    scales = shards.load(name, findings)
    if scales is None:
        return
    if not torch.isfinite(scales.float()).all():
        findings.error(name, "contains NaN or infinity", "requantize")
    if (scales.float() == 0).any():
        findings.error(name, "contains zero", "requantize")


def _check_group_index(
    name: str, group: int, in_features: int, shards: Shards, findings: Findings
) -> None:
    g_idx = shards.load(name, findings)
    if g_idx is None:
        return
    trivial = torch.arange(in_features, dtype=torch.int32) // group
    if not torch.equal(g_idx, trivial):
        findings.error(
            name,
            "inputs are not grouped in order: vLLM drops this tensor and computes garbage",
            "requantize with desc_act off",
        )
