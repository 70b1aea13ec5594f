"""Experts in one tensor per projection, presented as one linear per expert.

transformers keeps the weights of all experts of a layer as `experts.gate_up_proj` [E, 2 I, H] and
`experts.down_proj` [E, H, I] in float; some families have other names and orders of dims
(`Experts.stacks`). Tools store codes under these names, with scales next to them:

- transformers, in float8;
- NVIDIA's Model Optimizer, in NVFP4 (`gate_up_proj`, `gate_up_proj_weight_scale_2`);
- llm-compressor, as tensors of compressed-tensors (`gate_up_proj.weight_packed`, or
  `gate_up_proj_packed`).

In the first tensor, gate is followed by up, so each linear is a contiguous run of the file's bytes.
Other forms are refused by name. Float files of Qwen3-VL-MoE have either order of dims: [E, H, 2 I]
and [E, I, H] as published, the usual order if transformers 5 wrote them.

Legend: E experts, N outputs, K inputs, I inner size, H hidden size.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from formats.architecture.expert_names import LEAVES, MODULES, STACKED, separate_experts
from formats.architecture.experts import Experts
from formats.architecture.family import EITHER_ORDER
from formats.architecture.projection import Projection
from formats.architecture.sizes import is_size
from formats.errors import CheckpointError
from formats.families import FAMILIES
from formats.files.tensor_entry import ComputedEntry, TensorEntry

# suffix of the stack's name -> field of a linear
FIELDS = {
    "": "weight",
    ".weight": "weight",
    "_packed": "weight_packed",
    ".weight_packed": "weight_packed",
    "_scale_inv": "weight_scale_inv",
    "_scale": "weight_scale",
    "_weight_scale": "weight_scale",
    ".weight_scale": "weight_scale",
    "_zero_point": "weight_zero_point",
    ".weight_zero_point": "weight_zero_point",
    "_global_scale": "weight_global_scale",
    ".weight_global_scale": "weight_global_scale",
    "_weight_scale_2": "weight_scale_2",
    ".weight_scale_2": "weight_scale_2",
    "_input_scale": "input_scale",
    ".input_scale": "input_scale",
    "_input_global_scale": "input_global_scale",
    ".input_global_scale": "input_global_scale",
    "_shape": "weight_shape",
    ".weight_shape": "weight_shape",
}
# fields with one number per linear, per expert, or for all
NUMBERS = ("weight_global_scale", "weight_scale_2", "input_scale", "input_global_scale")
# suffix of the stack's name -> dtypes of its codes
CODES = {
    **dict.fromkeys(("", ".weight"), (torch.float8_e4m3fn, torch.uint8)),
    **dict.fromkeys(("_packed", ".weight_packed"), (torch.int32, torch.uint8)),
}
SCALES = "_scale_inv"  # what follows the name of a stack with blocks of float8
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
REMEDY = (
    "store the linears of each expert separately (experts.0.gate_proj.weight), or quantize the"
    " float model"
)
_STACK = re.compile(
    rf"(?P<stem>.*\.layers\.\d{{1,9}}(?:\.(?:{'|'.join(MODULES)}))?\.experts)"
    rf"\.(?P<stack>{'|'.join(STACKED)})(?P<rest>.*)"
)


def split_experts(
    config: Mapping[str, Any], entries: dict[str, TensorEntry]
) -> dict[str, TensorEntry]:
    """Return the tensors with each stack split into one linear per expert; others are unchanged.

    Raises CheckpointError for stacks that are not supported.
    """
    experts = separate_experts(config)
    if experts is None:
        return entries
    if experts.always is not None:
        entries = _split_always_active(config, experts, entries)
    if not experts.stacks:
        entries = _split_codes(config, entries)
    return _split_floats(config, experts, entries)


def _split_always_active(
    config: Mapping[str, Any], experts: Experts, entries: dict[str, TensorEntry]
) -> dict[str, TensorEntry]:
    """Return the tensors with the experts that every token uses after the others, one by one.

    Files have a stack of all of them, or their linears with numbers from 0.
    """
    first, always = config.get("n_routed_experts"), re.escape(experts.always.module)
    leaves = [name.rpartition(".")[2] for name, _ in experts.gate_up.members]
    leaves += [name.rpartition(".")[2] for name, _ in experts.down.members]
    pattern = re.compile(
        rf"(?P<prefix>.*\.){always}\.(?:(?P<number>\d{{1,9}})\.)?(?P<leaf>{'|'.join(leaves)})"
        r"(?P<rest>\.weight)?"
    )
    found = {}
    for name, entry in entries.items():
        match = pattern.fullmatch(name)
        is_stack = match is not None and not (match["number"] or match["rest"])
        if match is None or not is_size(first) or (is_stack and len(entry.shape) != 3):
            found[name] = entry
            continue
        for number in range(entry.shape[0]) if is_stack else (int(match["number"] or 0),):
            own = f"{match['prefix']}{experts.stem}.{first + number}.{match['leaf']}.weight"
            found[own] = _rows(entry, own, number, 0, entry.shape[1]) if is_stack else entry
    return found


def _split_codes(
    config: Mapping[str, Any], entries: dict[str, TensorEntry]
) -> dict[str, TensorEntry]:
    """Return the tensors with each quantized stack split into one linear per expert."""
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
        if config.get(EITHER_ORDER):
            raise CheckpointError(
                f"{match['stem']}.{match['stack']}",
                f"holds the codes of all experts in one tensor of unknown dimension order: {name}",
                REMEDY,
            )
        found |= _linears(match, entry, entries, _block_rows(config))
    return found


def coded_stacks(
    config: Mapping[str, Any], entries: Mapping[str, TensorEntry]
) -> dict[str, torch.dtype]:
    """Return the dtype of the codes of each supported stack, by the stack's name."""
    if separate_experts(config) is None:
        return {}
    return {
        f"{match['stem']}.{match['stack']}": entry.dtype
        for name, entry in entries.items()
        if (match := _STACK.fullmatch(name)) and entry.dtype in CODES.get(match["rest"], ())
    }


def _block_rows(config: Mapping[str, Any]) -> int | None:
    """Return the rows per block if scales are for blocks; None: no blocks."""
    block = config.get("quantization_config")
    size = block.get("weight_block_size") if isinstance(block, dict) else None
    return size[0] if isinstance(size, list) and size and type(size[0]) is int else None


def _linears(
    match: re.Match, entry: Any, entries: Mapping[str, TensorEntry], block: int | None
) -> dict[str, TensorEntry]:
    """Return the entries of each expert's part of one tensor of a stack."""
    stem, stack, field = match["stem"], match["stack"], FIELDS.get(match["rest"])
    stacks = {rest: entries.get(f"{stem}.{stack}{rest}") for rest in CODES}
    codes = next((each for each in stacks.values() if each is not None), None)
    is_read = any(each and each.dtype in CODES[rest] for rest, each in stacks.items())
    is_read &= field is not None and isinstance(entry, TensorEntry)
    if not is_read or len(codes.shape) != 3:
        raise _not_read(match, entry, codes, entries)
    gate, up, down = LEAVES[0]
    leaves = (gate, up) if stack == STACKED[0] else (down,)
    names = [f"{stem}.{e}.{leaf}.{field}" for e in range(codes.shape[0]) for leaf in leaves]
    if field == "weight_shape":  # shape of the whole stack; the words' shape says the same
        return {}
    if field in NUMBERS:
        return _numbers(match, entry, codes, entries, names)
    is_scale = field not in ("weight", "weight_packed")
    has_rows = codes.dtype == torch.float8_e4m3fn or field == "weight_zero_point"
    if len(entry.shape) != 3 or not (has_rows or entry.shape[1] == codes.shape[1]):
        raise _not_read(match, entry, codes, entries)
    rows = entry.shape[1]
    inner = codes.shape[1] // len(leaves)
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
    return _cut(entry, names, (rows // len(leaves), entry.shape[2]), range(len(names)))


def _numbers(
    match: re.Match,
    entry: TensorEntry,
    codes: TensorEntry,
    entries: Mapping[str, TensorEntry],
    names: list[str],
) -> dict[str, TensorEntry]:
    """Return entries with one number for each linear of a stack."""
    count, experts = math.prod(entry.shape), codes.shape[0]
    if count not in (1, experts, len(names)) or (count > 1 and entry.shape[0] != experts):
        raise _not_read(match, entry, codes, entries)
    return _cut(entry, names, (1,), [i * count // len(names) for i in range(len(names))])


def _cut(
    entry: TensorEntry, names: list[str], shape: tuple[int, ...], places: Iterable[int]
) -> dict[str, TensorEntry]:
    """Return entries of equal parts of a tensor, each with its position in the tensor."""
    size = math.prod(shape) * entry.dtype.itemsize
    return {
        name: replace(
            entry, name=name, shape=shape, num_bytes=size, offset=entry.offset + place * size
        )
        for name, place in zip(names, places, strict=True)
    }


def _not_read(
    match: re.Match, entry: Any, codes: Any, entries: Mapping[str, TensorEntry]
) -> CheckpointError:
    """Return the error for a stack in an unsupported form, with what was found."""
    stem, stack, shown = match["stem"], match["stack"], codes or entry
    others = [each for each in entries if each.startswith(f"{stem}.{stack}")]
    return CheckpointError(
        f"{stem}.{stack}",
        "expected a linear per expert, or codes [experts, outputs, inputs] in float8, NVFP4 or"
        f" packed integers with their scales; found {shown.dtype} {list(shown.shape)} in"
        f" {', '.join(each.removeprefix(f'{stem}.') for each in others[:6])}",
        REMEDY,
    )


def _split_floats(
    config: Mapping[str, Any], experts: Experts, entries: dict[str, TensorEntry]
) -> dict[str, TensorEntry]:
    """Return the tensors with each float stack split into one matrix [N, K] per linear.

    Raises CheckpointError for a stack that is not float, or whose shape does not divide.
    """
    family = FAMILIES[config["architectures"][0]]
    layer = re.escape(family.layer).replace(re.escape("{i}"), r"\d{1,9}")
    stems = ("experts", *(f"{module}.experts" for module in MODULES))
    projections = {
        name: projection
        for own in ([experts.stacks] if experts.stacks else map(_usual, stems))
        for name, projection in zip(own, _projections(experts), strict=True)
    }
    names = "|".join(map(re.escape, projections))
    stack = re.compile(rf"(?P<layer>{layer})\.(?P<stack>{names})(?P<rest>[._]\w+)?")
    found = {}
    for name, entry in entries.items():
        match = stack.fullmatch(name)
        if match is None:
            found[name] = entry
            continue
        leaf = _leaf(match, entry, entries, experts)
        if not leaf or len(entry.shape) != 3:
            raise CheckpointError(
                f"{match['layer']}.{match['stack']}",
                f"expected float weights of all experts in three dims, found {name}"
                f" {entry.dtype} {list(entry.shape)}",
                REMEDY,
            )
        projection = projections[match["stack"]]
        transposed = experts.stacks_transposed
        if config.get(EITHER_ORDER):  # the same decision as in transformers
            transposed = entry.shape[2] != config.get(projection.inputs)
        found |= _float_linears(match["layer"], name, entry, projection, transposed, leaf)
    return found


def named_stacks(experts: Experts) -> dict[str, Projection]:
    """Return the linears of each stack of a layer, by the name that the family's files give it."""
    names = experts.stacks or _usual(experts.stem)
    return dict(zip(names, _projections(experts), strict=True))


def _usual(stem: str) -> tuple[str, ...]:
    return tuple(f"{stem}.{name}" for name in STACKED)


def _projections(experts: Experts) -> tuple[Projection, ...]:
    """Return the linears of each stack; three stacks have one linear each."""
    both = (experts.gate_up, experts.down)
    if len(experts.stacks) != 3:
        return both
    return tuple(each.only(place) for each in both for place in range(len(each.members)))


def _leaf(match: re.Match, entry: Any, entries: Mapping[str, TensorEntry], experts: Experts) -> str:
    """Return the field of a linear that a tensor of a stack holds; "": one that is not read.

    Stacks of one linear each, as Step-3.5's, may hold float8 with a scale for each block.
    """
    if not match["rest"] and entry.dtype in FLOATS:
        return "weight"
    codes = entries.get(f"{match['layer']}.{match['stack']}")
    scales = entries.get(f"{match['layer']}.{match['stack']}{SCALES}")
    if len(experts.stacks) != 3 or codes is None or codes.dtype != torch.float8_e4m3fn:
        return ""
    if scales is None or scales.shape[:1] != codes.shape[:1]:
        return ""
    return {"": "weight", SCALES: f"weight{SCALES}"}.get(match["rest"] or "", "")


def _float_linears(
    prefix: str, name: str, entry: Any, projection: Projection, transposed: bool, leaf: str
) -> dict[str, TensorEntry]:
    """Return the entries of a field of one stack's linears."""
    count, outputs = len(projection.members), entry.shape[2 if transposed else 1]
    if outputs % count:
        raise CheckpointError(
            name, f"{outputs} outputs cannot be divided by {count} linears", REMEDY
        )
    each, take = outputs // count, _columns if transposed else _rows
    return {
        full: take(entry, full, expert, each * place, each)
        for expert in range(entry.shape[0])
        for place, linear in enumerate(projection.expert(expert).linears)
        for full in [f"{prefix}.{linear.name}.{leaf}"]
    }


def _rows(entry: Any, name: str, expert: int, start: int, count: int) -> Any:
    """Return `count` rows of one expert's matrix."""
    if not isinstance(entry, TensorEntry):  # a tensor in memory (MemoryTensors)
        return replace(entry, tensor=entry.tensor[expert, start : start + count])
    _, rows, columns = entry.shape
    size = columns * entry.dtype.itemsize
    return replace(
        entry,
        name=name,
        shape=(count, columns),
        num_bytes=count * size,
        offset=entry.offset + (expert * rows + start) * size,
    )


def _columns(entry: Any, name: str, expert: int, start: int, count: int) -> Any:
    """Return `count` columns of one expert's matrix as rows."""
    if not isinstance(entry, TensorEntry):
        return replace(entry, tensor=entry.tensor[expert, :, start : start + count].T)
    _, rows, columns = entry.shape
    size = rows * entry.dtype.itemsize
    return ColumnsEntry(
        name=name,
        dtype=entry.dtype,
        shape=(count, rows),
        num_bytes=count * size,
        file=entry.file,
        offset=entry.offset + expert * columns * size,
        start=start,
        columns=columns,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnsEntry(ComputedEntry):
    """Columns of a matrix of a file, read as rows. `offset` is the position of the matrix."""

    start: int  # index of the first column
    columns: int  # number of columns of the file's matrix

    def read(self) -> torch.Tensor:
        """Read the matrix, and return its columns as rows [N, K]. Raises CheckpointError."""
        count, rows = self.shape
        data = self.read_bytes(0, rows * self.columns * self.dtype.itemsize)
        matrix_KN = data.view(self.dtype).reshape(rows, self.columns)
        return matrix_KN[:, self.start : self.start + count].T.contiguous()
