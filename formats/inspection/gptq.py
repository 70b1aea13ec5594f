"""Checks of a GPTQ linear. Reads its small tensors: zeros, scales, group index.

Legend: N outputs, K inputs, G groups, b bits.
"""

from dataclasses import replace

import torch

from formats.checkpoint import TensorEntry
from formats.codecs.gptq import TENSOR_NAMES, stored_version
from formats.errors import InputError
from formats.inspection.files import Shards
from formats.inspection.findings import Findings
from formats.inspection.linear_summary import LinearSummary, check_scales
from formats.numerics.bits import unpack
from formats.scheme import CHANNEL, QuantSpec, Scheme

BITS = (2, 3, 4, 5, 6, 7, 8)


def gptq_linear(
    name: str, shards: Shards, scheme: Scheme | None, label: str, findings: Findings
) -> LinearSummary | None:
    """Check a linear's tensors against each other and the config; None if its shape is unknown.

    `label` is the version of zeros that config.json states, "v1" or "v2".
    """
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
    elif -(-in_features // stated.group_length(in_features)) != found["scales"].shape[0]:
        findings.error(
            name,
            f"its tensors have groups of {spec.group_length(in_features)}, config.json states"
            f" {stated.group_size}",
        )
    else:
        spec = stated  # the size of a single group for all inputs may be stated as -1 or as K
    traits = _check_zeros(full["qzeros"], spec, label, out_features, shards, findings)
    check_scales(full["scales"], shards, findings)
    if "g_idx" in found and not _is_grouped_in_order(
        full["g_idx"], spec.group_length(in_features), in_features, shards, findings
    ):
        traits |= {"act-order"}
    return LinearSummary(
        name=name,
        out_features=out_features,
        in_features=in_features,
        scheme=str(replace(scheme, weight=spec) if scheme else Scheme(weight=spec)),
        num_bytes=sum(entry.num_bytes for entry in found.values()),
        traits=frozenset(traits),
    )


def _spec_of_shapes(
    name: str, found: dict[str, TensorEntry], scheme: Scheme | None, findings: Findings
) -> QuantSpec | None:
    """Derive bits and group size from the shapes [K*b/32, N], [G, N*b/32], [G, N]."""
    for tensor, entry in found.items():
        expected = 1 if tensor == "g_idx" else 2
        if len(entry.shape) != expected:
            findings.error(entry.name, f"expected {expected} dimensions, found {list(entry.shape)}")
            return None
        is_float, is_words = entry.dtype.is_floating_point, entry.dtype == torch.int32
        fits = {"scales": is_float, "g_idx": not is_float}.get(tensor, is_words)
        if not fits:
            wanted = {"scales": "floating point", "g_idx": "integers"}.get(tensor, "int32")
            findings.error(entry.name, f"expected {wanted}, found {entry.dtype}")
            return None
    qweight, qzeros, scales = (found[t].shape for t in ("qweight", "qzeros", "scales"))
    out_features, num_groups = qweight[1], scales[0]
    bits = 32 * qzeros[1] // out_features if out_features else 0
    in_features = qweight[0] * 32 // bits if bits else 0
    if (
        bits not in BITS
        or scales != (qzeros[0], out_features)
        or 32 * qzeros[1] != bits * out_features
        or not num_groups
        or not in_features
    ):
        findings.error(
            name,
            f"its shapes do not fit together: qweight {list(qweight)}, qzeros {list(qzeros)},"
            f" scales {list(scales)}",
        )
        return None
    symmetric = scheme.weight.symmetric if scheme else True
    group_size = -(-in_features // num_groups) if num_groups > 1 else CHANNEL
    try:
        return QuantSpec(bits=bits, symmetric=symmetric, group_size=group_size)
    except InputError as error:
        findings.error(name, f"{error.subject}: {error.problem}", error.remedy)
        return None


def _check_zeros(
    name: str, spec: QuantSpec, label: str, out_features: int, shards: Shards, findings: Findings
) -> set[str]:
    """Check the stored zeros against the config's label. Returns the linear's traits."""
    qzeros = shards.load(name, findings)
    if qzeros is None:
        return set()
    stored = unpack(qzeros, spec.bits)[:, :out_features]
    try:
        version = stored_version(stored, spec, label, name.removesuffix(".qzeros"))
    except InputError as error:
        findings.caught(error)
        return {"zeros not certain"}
    if version != label:
        findings.error(
            name,
            f"holds {version} zeros ({int(stored[0, 0])}), config.json says"
            f" {'gptq_v2' if label == 'v2' else 'gptq (v1)'}: readers that follow it are off by"
            " one step in every weight",
            "fix checkpoint_format, or convert the checkpoint",
            read_here=True,
        )
        return {"mislabelled"}
    middle = spec.symmetric_zero - (version == "v1")
    if not spec.symmetric and (stored == middle).all():
        return {"symmetric data"}
    return set()


def _is_grouped_in_order(
    name: str, group: int, in_features: int, shards: Shards, findings: Findings
) -> bool:
    g_idx = shards.load(name, findings)
    if g_idx is None:
        return True
    if g_idx.shape != (in_features,):
        findings.error(name, f"expected [{in_features}], found {list(g_idx.shape)}")
        return True
    g_idx, groups = g_idx.long(), -(-in_features // group)
    if g_idx.min() < 0 or g_idx.max() >= groups:
        findings.error(
            name, f"expected groups 0..{groups - 1}, found {int(g_idx.min())}..{int(g_idx.max())}"
        )
    return torch.equal(g_idx, torch.arange(in_features) // group)
