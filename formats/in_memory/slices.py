"""Slices of a decoded weight by outputs or inputs, exact code for code.

Legend: N outputs, K inputs, G groups.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from formats.errors import CheckpointError
from formats.in_memory.fp4 import Fp4Weight
from formats.in_memory.fp8 import Fp8Weight, block_size
from formats.in_memory.k_weight import KWeight
from formats.in_memory.weights import Weight
from formats.numerics.bits import code_multiple, pack, unpack
from formats.scheme import ALL, CHANNEL

# Outputs of a slice, in order, as ranges or indices.
Rows = Sequence[tuple[int, int]] | torch.Tensor


def take_rows(tensor: torch.Tensor, rows: Rows, dim: int = 0) -> torch.Tensor:
    """Copy some rows along a dimension."""
    if tensor.dtype == torch.float8_e4m3fn:  # float8 does not support index_select on every device
        return take_rows(tensor.view(torch.uint8), rows, dim).view(tensor.dtype)
    if isinstance(rows, torch.Tensor):
        return tensor.index_select(dim, rows.to(tensor.device))
    return torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in rows], dim)


def take_outputs(weight: Weight, rows: Rows) -> Weight:
    """Return the weight of some outputs."""
    tensors, spec, block = _by_output(weight), weight.spec, weight.spec.rows
    taken = {}
    if block > 1:  # float8
        scales_RC = tensors.pop("scales_RC")
        if not isinstance(rows, torch.Tensor) and _are_blocks(rows, block, weight.out_features):
            blocks = [(start // block, -(-stop // block)) for start, stop in rows]
            taken["scales_RC"] = take_rows(scales_RC, blocks)
        else:  # if a block is cut, its scale is repeated for each row
            tensors["scales_RC"] = scales_RC.repeat_interleave(block, 0)[: weight.out_features]
            spec = replace(spec, rows=1)
    taken |= {field: take_rows(tensor, rows) for field, tensor in tensors.items()}
    return replace(weight, spec=spec, **taken)


def split_outputs(weight: Weight, count: int) -> list[Weight]:
    """Return `count` weights with equal numbers of outputs, as views of the given weight.

    Raises ValueError if that would divide an output's row, or a block of rows with one scale.
    """
    rows, block = weight.out_features / count, max(weight.spec.rows, 1)
    if rows % block:
        raise ValueError(f"{rows:g} outputs are no multiple of {block}")
    parts = {
        field: tensor.split(len(tensor) // count) for field, tensor in _by_output(weight).items()
    }
    return [
        replace(weight, **{field: rows[number] for field, rows in parts.items()})
        for number in range(count)
    ]


def _by_output(weight: Weight) -> dict[str, torch.Tensor]:
    """Return the fields with a row for each output, or for each block of `spec.rows` outputs."""
    fields = ["words_NW", "scales_NG", "zeros_NG"]
    if isinstance(weight, KWeight):
        fields = ["bytes_NX"]
    elif isinstance(weight, Fp4Weight):
        fields = ["bytes_NB", "scales_NG"]
        for name in ("global_scale", "global_factor"):
            tensor = getattr(weight, name)
            if tensor is not None and tensor.ndim == 2:  # [N, 1] in merged weights, else one number
                fields.append(name)
    elif isinstance(weight, Fp8Weight):
        fields = ["codes_NK"] if weight.spec.rows == ALL else ["codes_NK", "scales_RC"]
    return {field: getattr(weight, field) for field in fields}


def _are_blocks(rows: Sequence[tuple[int, int]], block: int, total: int) -> bool:
    """Return True if the ranges are whole blocks, so the result has the same blocks."""
    *others, last = rows
    inner = all(start % block == 0 and stop % block == 0 for start, stop in others)
    return inner and last[0] % block == 0 and (last[1] % block == 0 or last[1] == total)


def take_inputs(weight: Weight, start: int, stop: int, name: str = "weight") -> Weight:
    """Return the weight of inputs start..stop - 1; with act-order, counted in sorted order.

    With act-order, the result's inputs are input_order[start:stop] of the whole weight, and the
    result has no input_order. If the range begins or ends inside a group, groups are cut into
    smaller ones with the same scale.
    """
    if isinstance(weight, KWeight | Fp4Weight):
        return weight.take_inputs(start, stop, name)
    if isinstance(weight, Fp8Weight):
        return _fp8_inputs(weight, start, stop)
    spec, length = weight.spec, weight.spec.group_length(weight.in_features)
    scales_NG, zeros_NG = weight.scales_NG, weight.zeros_NG
    if spec.group_size != CHANNEL:
        group = math.gcd(length, start, stop)
        if group < length:
            spec = replace(spec, group_size=group)
            scales_NG, zeros_NG = (
                each.repeat_interleave(length // group, 1) for each in (scales_NG, zeros_NG)
            )
        runs = ((start // group, stop // group),)
        scales_NG, zeros_NG = take_rows(scales_NG, runs, 1), take_rows(zeros_NG, runs, 1)
    multiple = code_multiple(spec.bits)
    if start % multiple or stop % multiple:
        if (stop - start) % multiple:
            raise CheckpointError(
                name,
                f"its inputs {start} to {stop - 1} do not fill words of {multiple} codes",
                "use fewer GPUs",
            )
        words_NW = pack(unpack(weight.words_NW, spec.bits)[:, start:stop], spec.bits)
    else:
        words = multiple * spec.bits // 32
        first, last = start // multiple * words, stop // multiple * words
        words_NW = take_rows(weight.words_NW, ((first, last),), 1)
    return replace(
        weight,
        words_NW=words_NW,
        scales_NG=scales_NG,
        zeros_NG=zeros_NG,
        spec=spec,
        in_features=stop - start,
        input_order=None,
    )


def _fp8_inputs(weight: Fp8Weight, start: int, stop: int) -> Fp8Weight:
    codes_NK = take_rows(weight.codes_NK, ((start, stop),), 1)
    spec, scales_RC = weight.spec, weight.scales_RC
    if spec.group_size == CHANNEL:
        return replace(weight, codes_NK=codes_NK)
    _, length = block_size(spec, weight.out_features, weight.in_features)
    first, last = start // length, -(-stop // length)
    if start % length and last - first > 1:
        group = math.gcd(length, start)
        spec = replace(spec, group_size=group)
        scales_RC = scales_RC.repeat_interleave(length // group, 1)
        first, last = start // group, -(-stop // group)
    return replace(
        weight, codes_NK=codes_NK, scales_RC=take_rows(scales_RC, ((first, last),), 1), spec=spec
    )
