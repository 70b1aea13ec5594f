"""Checks whether a checkpoint can be divided over several GPUs, by shapes and groups alone.

Heads and feed-forward features are divided as the loader does it (shards.py): in whole units, with
possibly more units on one GPU than on another. Experts too narrow for that may be placed whole.
"""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from formats.architecture.columns import HeadsKind
from formats.architecture.sizes import check_heads, num_experts
from formats.errors import InputError
from formats.families import FAMILIES, family_of
from formats.in_memory.dense import is_dense
from formats.in_memory.shards import EXPERT, shard_features, shard_heads
from formats.in_memory.state_shards import check_state_shards, shard_states
from formats.inspection.linear_summary import LinearSummary
from formats.quant_config import QuantConfig
from formats.rules import LAYER_NUMBER
from formats.scheme import Scheme

SIZES = (1, 2, 4, 8)
# suffix of a linear's name, with its dot -> name of the size of its inputs
SPLIT_BY_INPUTS = {
    f".{linear.name.rpartition('.')[2]}": linear.inputs
    for family in FAMILIES.values()
    for projection in family.projections(num_experts=1)
    for linear in projection.linears
    if projection.split == "inputs" and not family.blocks({}).state
}
# names of the sizes of attention's queries and outputs
BY_HEAD = ("q", *(f"{kind}_{name}" for kind in get_args(HeadsKind) for name in ("q", "o")))


def parallel_sizes(
    config: Mapping[str, Any], quant: QuantConfig | None, linears: Sequence[LinearSummary]
) -> dict[int, str]:
    """Return, for each number of GPUs, why tensor parallelism fails; "": it works."""
    return {size: _reason(size, config, quant, linears) for size in SIZES}


def _reason(
    size: int,
    config: Mapping[str, Any],
    quant: QuantConfig | None,
    linears: Sequence[LinearSummary],
) -> str:
    reason = _why_not(size, config, quant, linears)
    if not reason or (num_experts(config) or 0) < size:
        return reason
    family = family_of(config)
    if family is not None and family.experts is not None and family.experts.media_inner:
        return reason
    others = [linear for linear in linears if EXPERT not in linear.name]
    if _why_not(size, config, quant, others, whole_experts=True):
        return reason
    return f"{reason}; --enable-expert-parallel works"


def _why_not(
    size: int,
    config: Mapping[str, Any],
    quant: QuantConfig | None,
    linears: Sequence[LinearSummary],
    whole_experts: bool = False,
) -> str:
    if not config:
        return "unknown without a config.json"
    if size == 1:
        return ""
    family = family_of(config)
    if family is None:
        return "unknown: config.json names no architecture that is known here"
    sizes, mixer = family.sizes(config), family.state_mixer
    has_linears = mixer is not None and mixer.out is not None
    state_end = f".{mixer.out.linears[0].name}" if has_linears else None
    # schemes of attention's output projections, by (heads, KV heads, inputs per head)
    attention: dict[tuple[int, int, int], set[Scheme | None]] = {}
    try:
        check_state_shards(mixer, size)
        for linear in linears:
            inputs = next(
                (row for end, row in SPLIT_BY_INPUTS.items() if linear.name.endswith(end)), None
            )
            scheme = None
            if quant is not None and "float" not in linear.traits:
                scheme = quant.scheme_for(linear.name)
                scheme = None if scheme is not None and is_dense(scheme.weight) else scheme
            number = LAYER_NUMBER.search(linear.name)
            layer = -1 if number is None else int(number[1])
            is_end = state_end is not None and linear.name.endswith(state_end)
            if is_end and (mixer.parallel_to_attention or family.has_state(layer, config)):
                shard_states(mixer, sizes, linear.in_features, size, scheme, linear.name)
            elif inputs in BY_HEAD and sizes.get("num_attention_heads"):
                heads, kv_heads = family.heads_of_layer(layer, config)
                check_heads(heads, kv_heads)
                key = heads, kv_heads, linear.in_features // heads
                attention.setdefault(key, set()).add(scheme)
            elif inputs in BY_HEAD:
                continue
            elif inputs is not None:
                shard_features(linear.name, linear.in_features, size, scheme)
        heads, kv_heads, head_dim = (
            sizes.get(key) for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        has_attention = mixer is None or not mixer.alone
        if has_attention and not attention and heads and head_dim:
            attention[heads, kv_heads or heads, head_dim] = {None}
        for each, schemes in attention.items():
            shard_heads(*each, size, sorted(schemes, key=str))
        if not whole_experts and family.experts and family.experts.fused and num_experts(config):
            inner = sizes.get(family.experts.down.inputs)
            if inner:
                shard_features(family.experts.module, inner, size, None)
    except InputError as error:
        return error.problem
    return ""
