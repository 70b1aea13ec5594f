"""Can a checkpoint be shared out over several GPUs? Knows shapes and groups, no files.

Heads and the features of feed-forwards are shared out as the loader does it (shares.py): in whole
units, of which one GPU may have more than another.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from formats.errors import InputError
from formats.families import FAMILIES
from formats.family import num_experts
from formats.linear_summary import LinearSummary
from formats.quant_config import QuantConfig
from formats.scheme import Scheme
from formats.shares import share_features, share_heads

SIZES = (1, 2, 4, 8)
# last parts of names, with their dot -> the size of the inputs
SPLIT_BY_INPUTS = {
    f".{linear.name.rpartition('.')[2]}": linear.inputs
    for family in FAMILIES.values()
    for projection in family.projections(num_experts=1)
    for linear in projection.linears
    if projection.split == "inputs"
}


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
    if size == 1:
        return ""
    names = config.get("architectures")
    family = FAMILIES.get(names[0]) if isinstance(names, list) and names else None
    if family is not None and family.delta_net is not None:
        return "layers with states are not shared out"
    sizes = family.sizes(config) if family is not None else {}
    attention: list[Scheme | None] = []
    try:
        for linear in linears:
            inputs = next(
                (row for end, row in SPLIT_BY_INPUTS.items() if linear.name.endswith(end)), None
            )
            scheme = None
            if quant is not None and "float" not in linear.traits:
                scheme = quant.scheme_for(linear.name)
            if inputs == "q":
                attention.append(scheme)
            elif inputs is not None:
                share_features(linear.name, linear.in_features, size, scheme)
        heads, kv_heads, head_dim = (
            sizes.get(key) for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        if heads and head_dim:
            share_heads(heads, kv_heads or heads, head_dim, size, list(set(attention)) or [None])
        if family is not None and family.experts and family.experts.fused and num_experts(config):
            inner = sizes.get(family.experts.down.inputs)
            if inner:
                share_features(family.experts.module, inner, size, None)
    except InputError as error:
        return error.problem
    return ""
