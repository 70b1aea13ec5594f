"""Quantized experts in one tensor per projection, presented as a linear per expert.

transformers keeps the float8 codes of all experts of a layer as `experts.gate_up_proj` [E, 2 I, H]
and `experts.down_proj` [E, H, I], with scales next to them. Gate and up follow each other in the
first, so each linear is a run of the file's bytes. Other types are refused by name.
Legend: E experts, I inner size, H hidden size, R rows of scales.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from formats.architecture.expert_names import LEAVES, MODULES, STACKED, experts_apart
from formats.architecture.family import Experts
from formats.errors import CheckpointError
from formats.files.tensor_entry import TensorEntry

# What follows the stack's name -> field of a linear
FIELDS = {
    "": "weight",
    ".weight": "weight",
    "_scale_inv": "weight_scale_inv",
    "_weight_scale": "weight_scale",
    ".weight_scale": "weight_scale",
}
CODES = (torch.float8_e4m3fn,)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
REMEDY = (
    "write the linears of each expert apart (experts.0.gate_proj.weight), or quantize the float"
    " original"
)
_STACK = re.compile(
    rf"(?P<stem>.*\.layers\.\d{{1,9}}\.(?:{'|'.join(MODULES)})\.experts)"
    rf"\.(?P<stack>{'|'.join(STACKED)})(?P<rest>.*)"
)


def split_experts(
    config: Mapping[str, Any], entries: dict[str, TensorEntry]
) -> dict[str, TensorEntry]:
    """Return the tensors with quantized stacks as one linear per expert.

    Float stacks and other tensors are unchanged. Raises CheckpointError for stacks that are not
    read.
    """
    if experts_apart(config) is None:
        return entries
    matches = {name: match for name in entries if (match := _STACK.fullmatch(name))}
    coded = {
        (match["stem"], match["stack"])
        for name, match in matches.items()
        if match["rest"] or entries[name].dtype not in FLOATS
    }
    found = {}
    for name, entry in entries.items():
        match = matches.get(name)
        if match is None or (match["stem"], match["stack"]) not in coded:
            found[name] = entry
            continue
        found |= _linears(match, entry, entries, _block_rows(config))
    return found


def split_float_stacks(
    experts: Experts, layer: str, entries: dict[str, TensorEntry]
) -> dict[str, TensorEntry]:
    """Return the tensors with each float stack of the family's row as one linear per expert.

    `layer`: the row's name of a layer. Raises CheckpointError for a stack of another shape.
    """
    prefix = re.escape(layer).replace(re.escape("{i}"), r"\d{1,9}")
    names = "|".join(map(re.escape, experts.stacks))
    stack = re.compile(rf"(?P<layer>{prefix})\.(?P<stack>{names})\.weight")
    found = {}
    for name, entry in entries.items():
        match = stack.fullmatch(name)
        if match is None:
            found[name] = entry
            continue
        leaves = experts.stacks[match["stack"]]
        if len(entry.shape) != 3 or entry.shape[1] % len(leaves) or entry.dtype not in FLOATS:
            raise CheckpointError(
                name,
                f"expected a float tensor [experts, outputs, inputs] of {' and '.join(leaves)},"
                f" found {entry.dtype} {list(entry.shape)}",
                REMEDY,
            )
        rows = entry.shape[1] // len(leaves)
        for number in range(entry.shape[0]):
            for place, leaf in enumerate(leaves):
                own = f"{match['layer']}.{experts.module}.experts.{number}.{leaf}.weight"
                found[own] = entry.matrix(own, number, place * rows, (place + 1) * rows)
    return found


def _block_rows(config: Mapping[str, Any]) -> int | None:
    """Return the rows that share a scale in blocks; None: no blocks."""
    block = config.get("quantization_config")
    size = block.get("weight_block_size") if isinstance(block, dict) else None
    return size[0] if isinstance(size, list) and size and type(size[0]) is int else None


def _linears(
    match: re.Match, entry: Any, entries: Mapping[str, TensorEntry], block: int | None
) -> dict[str, TensorEntry]:
    """Return the entries of each expert's part of one tensor of a stack."""
    stem, stack, field = match["stem"], match["stack"], FIELDS.get(match["rest"])
    codes = entries.get(f"{stem}.{stack}") or entries.get(f"{stem}.{stack}.weight")
    readable = isinstance(entry, TensorEntry) and codes is not None and codes.dtype in CODES
    if field is None or not readable or len(entry.shape) != 3 or len(codes.shape) != 3:
        shown = codes or entry
        others = [each for each in entries if each.startswith(f"{stem}.{stack}")]
        raise CheckpointError(
            f"{stem}.{stack}",
            f"expected a linear per expert, or float8 codes [experts, outputs, inputs] with their"
            f" scales; found {shown.dtype} {list(shown.shape)} in"
            f" {', '.join(each.removeprefix(f'{stem}.') for each in others[:6])}",
            REMEDY,
        )
    gate, up, down = LEAVES[0]
    leaves = (gate, up) if stack == STACKED[0] else (down,)
    rows = entry.shape[1]
    inner = codes.shape[1] // len(leaves)
    is_scale = field != "weight"
    in_blocks = is_scale and block is not None
    if (
        entry.shape[0] != codes.shape[0]
        or rows % len(leaves)
        or (len(leaves) == 2 and in_blocks and inner % block)
    ):
        raise CheckpointError(
            f"{stem}.{stack}{match['rest']}",
            f"{rows} rows of {entry.shape[0]} experts cannot be divided between"
            f" {' and '.join(leaves)} of {inner} outputs" + f" in blocks of {block}" * in_blocks,
            REMEDY,
        )
    shape = (rows // len(leaves), entry.shape[2])
    size = math.prod(shape) * entry.dtype.itemsize
    names = [
        f"{stem}.{expert}.{leaf}.{field}" for expert in range(entry.shape[0]) for leaf in leaves
    ]
    return {
        name: replace(
            entry, name=name, shape=shape, num_bytes=size, offset=entry.offset + number * size
        )
        for number, name in enumerate(names)
    }
