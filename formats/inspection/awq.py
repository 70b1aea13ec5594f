"""Checks of an AWQ linear, in either layout. Reads zeros and scales.

Legend: N outputs, K inputs.
"""

import torch

from formats.codecs import awq_gemv
from formats.codecs.awq import LANES, is_symmetric
from formats.inspection.files import Shards
from formats.inspection.findings import Findings
from formats.inspection.linear_summary import LinearSummary, check_scales, decoded_linear
from formats.scheme import Scheme


def awq_linear(
    name: str, shards: Shards, scheme: Scheme, findings: Findings
) -> LinearSummary | None:
    """Check a linear's tensors against each other and the config; None if its shape is unknown."""
    full = {field: f"{name}.{field}" for field in ("qweight", "qzeros", "scales")}
    found = {field: shards.entries[n] for field, n in full.items() if n in shards}
    needed = ["qweight", "scales"] + ["qzeros"] * (not scheme.weight.symmetric)
    missing = [field for field in needed if field not in found]
    for field in missing:
        if full[field] not in shards.lost:
            findings.error(full[field], "is missing", "the checkpoint is incomplete")
    if missing:
        return None
    for field, entry in found.items():
        fits = entry.dtype.is_floating_point if field == "scales" else entry.dtype == torch.int32
        if len(entry.shape) != 2 or not fits:
            findings.error(entry.name, f"found {entry.dtype} {list(entry.shape)}")
            return None
    in_features, words = found["qweight"].shape
    length = scheme.weight.group_length(in_features)
    expected = {
        "scales": (in_features // length, words * LANES),
        "qzeros": (in_features // length, words),
    }
    for field, shape in expected.items():
        if field in found and (found[field].shape != shape or in_features % length):
            findings.error(
                full[field],
                f"expected {list(shape)} in groups of {length}, found {list(found[field].shape)}",
            )
            return None
    traits = set()
    if "qzeros" not in found:
        traits.add("no zeros")
    else:
        qzeros = shards.load(full["qzeros"], findings)
        symmetric = qzeros is not None and is_symmetric(qzeros)
        if symmetric:
            traits.add("symmetric data")
        elif scheme.weight.symmetric and qzeros is not None:
            findings.error(
                full["qzeros"],
                "zero_point is false, but some zeros are not 8",
                "set zero_point to true if these zeros are intended",
            )
    check_scales(full["scales"], shards, findings)
    return LinearSummary(
        name=name,
        out_features=words * LANES,
        in_features=in_features,
        scheme=str(scheme),
        num_bytes=sum(entry.num_bytes for entry in found.values()),
        traits=frozenset(traits),
    )


def gemv_linear(
    name: str, shards: Shards, scheme: Scheme, findings: Findings
) -> LinearSummary | None:
    """Check a linear in AutoAWQ's GEMV layout by decoding it."""
    names = {field: f"{name}.{field}" for field in awq_gemv.REQUIRED}
    return decoded_linear(
        name,
        {field: full for field, full in names.items() if full in shards},
        lambda tensors: awq_gemv.decode(tensors, scheme.weight, name),
        shards,
        findings,
        scheme=scheme,
        traits=frozenset({"gemv"}),
    )
