"""Can a checkpoint's linears be split over several GPUs? Knows shapes and groups, no files.

A linear is split by outputs or by inputs, as its family's row says: a GPU's share must hold whole
groups and whole words. Legend: N outputs, K inputs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from formats.families import FAMILIES
from formats.linear_summary import LinearSummary
from formats.quant_config import QuantConfig

SIZES = (1, 2, 4, 8)
# last parts of names, with their dot
SPLIT_BY_INPUTS = tuple(
    {
        f".{linear.name.rpartition('.')[2]}"
        for family in FAMILIES.values()
        for projection in family.projections(num_experts=1)
        for linear in projection.linears
        if projection.split == "inputs"
    }
)
MULTIPLE = 8  # of every share: a word of 4-bit codes


def parallel_sizes(
    config: Mapping[str, Any], quant: QuantConfig | None, linears: Sequence[LinearSummary]
) -> dict[int, str]:
    """For each number of GPUs: empty where it works, otherwise the first reason against it."""
    return {size: _why_not(size, config, quant, linears) for size in SIZES}


def _why_not(
    size: int,
    config: Mapping[str, Any],
    quant: QuantConfig | None,
    linears: Sequence[LinearSummary],
) -> str:
    heads = config.get("num_attention_heads")
    if isinstance(heads, int) and heads % size:
        return f"{heads} attention heads"
    for linear in linears:
        by_inputs = linear.name.endswith(SPLIT_BY_INPUTS)
        extent = linear.in_features if by_inputs else linear.out_features
        if extent % size:
            return f"{linear.name}: {extent} features"
        if "float" in linear.traits or quant is None:
            continue
        share = extent // size
        scheme = quant.scheme_for(linear.name)
        unit = MULTIPLE if scheme is None or scheme.weight.type == "int" else 1
        if by_inputs and scheme is not None and scheme.weight.group_size > 0 and size > 1:
            unit = scheme.weight.group_size
        if not by_inputs and scheme is not None and scheme.weight.rows > 1:
            unit = scheme.weight.rows
        if share % unit:
            return f"{linear.name}: a share of {share} is not divisible by {unit}"
    return ""
