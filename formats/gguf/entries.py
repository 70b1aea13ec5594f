"""Tensors of a GGUF file as checkpoint entries: read, decoded and reordered on request.

A linear whose blocks kernels can run is presented as codes and scales (kernel_forms.py), any other
tensor as floats. Nothing is decoded before it is read.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from formats.architecture.family import Family
from formats.files.tensor_entry import ComputedEntry, TensorEntry
from formats.gguf import kernel_forms
from formats.gguf.blocks import decode_rows
from formats.gguf.kernel_forms import CODES, SCALES, form_of
from formats.gguf.names import GATE, UP, Presented, other_names
from formats.gguf.row_moves import from_file
from formats.gguf.row_orders import to_family
from formats.gguf.staged import BLOCKS
from formats.scheme import Scheme

FLOATS = "floats"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufEntry(TensorEntry):
    """Tensor that is decoded when it is read. `num_bytes` is its size in the file."""

    presented: Presented
    content: str = FLOATS  # FLOATS, or the name of a tensor of kernel_forms.py

    @property
    def stored_as(self) -> str:
        """Type of the tensor's blocks."""
        return self.presented.stored.type.name.lower()

    def read(self) -> torch.Tensor:
        """Read and decode the whole tensor. Raises CheckpointError."""
        presented = self.presented
        rows = self._decoded(0, self._num_rows)
        if presented.below is not None:
            part = _part_below(self)
            rows = torch.cat([rows, part._decoded(0, part._num_rows)])
        if presented.heads:
            rows = to_family(rows, presented.heads, presented.kv_heads)
        rows = from_file(from_file(rows, presented.rows), presented.columns, dim=1)
        if presented.exponent:
            rows = torch.log(-rows)
        if presented.offset:
            rows = rows - presented.offset
        return rows.reshape(self.shape).to(self.dtype)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Read and decode rows `start` to `stop`. Raises CheckpointError."""
        if is_moved(self.presented) or len(self.shape) != 2:
            return self.read()[start:stop]
        return self._decoded(start, stop).to(self.dtype)

    def blocks(self, max_bytes: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (index of the first value, values) of runs of rows, at most `max_bytes` each."""
        if len(self.shape) != 2 or is_moved(self.presented):
            yield 0, self.read()
            return
        step = max(1, max_bytes // (self.shape[1] * self.dtype.itemsize))
        for begin in range(0, self.shape[0], step):
            values = self.rows(begin, min(begin + step, self.shape[0]))
            yield begin * self.shape[1], values.flatten()

    def stored_rows(self) -> torch.Tensor:
        """Read the blocks of all rows, in the family's order: uint8 [rows, row bytes]."""
        row_bytes = self.presented.stored.type.row_bytes(self._row_length)
        first = self.presented.first_row
        data = self.read_bytes(first * row_bytes, (first + self._num_rows) * row_bytes)
        rows = data.reshape(-1, row_bytes)
        presented = self.presented
        if presented.below is not None:
            rows = torch.cat([rows, _part_below(self).stored_rows()])
        if presented.heads:
            return to_family(rows, presented.heads, presented.kv_heads)
        return from_file(rows, presented.rows)

    @property
    def _row_length(self) -> int:
        """Number of values of a stored row; 1 for a vector of floats."""
        presented = self.presented
        is_column = len(presented.shape) == 1 and presented.stored.type.float_dtype
        return 1 if is_column else presented.shape[-1]

    @property
    def _num_rows(self) -> int:
        """Number of stored rows; a quantized vector is one row."""
        presented = self.presented
        shape = presented.shape if presented.below is None else presented.stored.shape
        return torch.Size(shape).numel() // self._row_length

    def _decoded(self, start: int, stop: int) -> torch.Tensor:
        presented, kind = self.presented, self.presented.stored.type
        in_features = self._row_length
        row_bytes = kind.row_bytes(in_features)
        first = presented.first_row + start
        data = self.read_bytes(first * row_bytes, (presented.first_row + stop) * row_bytes)
        if self.content == BLOCKS:
            return data.reshape(-1, row_bytes)
        if self.content == CODES:
            return kernel_forms.codes_of(data, kind, in_features)
        if self.content == SCALES:
            return kernel_forms.scales_of(data, kind, in_features, self.name)
        return decode_rows(data, kind, in_features)


def is_moved(presented: Presented) -> bool:
    """Return True if the presented tensor is not a contiguous run of the file's values."""
    moves = (presented.heads, presented.offset, presented.rows, presented.columns)
    return any(moves) or presented.exponent or presented.below is not None


def _part_below(entry: GgufEntry) -> GgufEntry:
    """Return the entry of the second of two stored tensors, which holds the last rows."""
    stored = entry.presented.below
    return replace(
        entry,
        name=stored.name,
        shape=stored.shape,
        num_bytes=stored.type.row_bytes(torch.Size(stored.shape).numel()),
        file=stored.file,
        offset=stored.offset,
        presented=Presented(name=stored.name, stored=stored, shape=stored.shape),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedEntry(ComputedEntry):
    """kv_b_proj of latent attention, which the file stores as keys and values by head."""

    keys: GgufEntry  # [heads * latent, key]
    values: GgufEntry  # [heads * value, latent]
    heads: int

    @property
    def stored_as(self) -> str:
        """Type of the blocks of the keys."""
        return self.keys.stored_as

    def read(self) -> torch.Tensor:
        """Read and decode the whole tensor. Raises CheckpointError."""
        keys, values = (part.read().unflatten(0, (self.heads, -1)) for part in self.parts)
        return torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1).contiguous()

    @property
    def parts(self) -> tuple[GgufEntry, GgufEntry]:
        """The entries of keys and values, in the form of the file."""
        return self.keys, self.values


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarEntry(ComputedEntry):
    """Tensor of one number, which the metadata contain."""

    value: float

    def read(self) -> torch.Tensor:
        return torch.full(self.shape, self.value, dtype=self.dtype)


def make_scalars(
    found: Mapping[str, tuple[tuple[int, ...], float]], file: Path
) -> dict[str, TensorEntry]:
    """Return entries of tensors that the metadata contain, given (shape, number) by name."""
    return {
        name: ScalarEntry(
            name=name,
            dtype=torch.float32,
            shape=shape,
            num_bytes=torch.float32.itemsize,
            file=file,
            offset=0,
            value=value,
        )
        for name, (shape, value) in found.items()
    }


def _joined(name: str, presented: Presented, dtype: torch.dtype | None) -> JoinedEntry:
    heads = presented.stored.shape[0]
    keys, values = (
        GgufEntry(
            name=stored.name,
            dtype=dtype or torch.float32,
            shape=(heads * stored.shape[1], stored.shape[2]),
            num_bytes=stored.type.row_bytes(torch.Size(stored.shape).numel()),
            file=stored.file,
            offset=stored.offset,
            presented=replace(
                presented, stored=stored, shape=(heads * stored.shape[1], stored.shape[2])
            ),
        )
        for stored in (presented.stored, presented.values)
    )
    return JoinedEntry(
        name=name,
        dtype=keys.dtype,
        shape=presented.shape,
        num_bytes=keys.num_bytes + values.num_bytes,
        file=keys.file,
        offset=keys.offset,
        keys=keys,
        values=values,
        heads=heads,
    )


def make_entries(
    found: Mapping[str, Presented],
    runs_on_codes: Iterable[str],
    *,
    float_dtype: torch.dtype | None = None,
) -> dict[str, TensorEntry]:
    """Return entries by name. Modules in `runs_on_codes` have codes and scales instead of weights.

    `float_dtype` is the dtype that decoded blocks are rounded to; None: float32, which is exact.
    """
    on_codes = set(runs_on_codes)
    entries: dict[str, TensorEntry] = {}
    for name, presented in found.items():
        module = name.removesuffix(".weight")
        if presented.values is not None:
            entries[name] = _joined(name, presented, float_dtype)
        elif module != name and module in on_codes:
            for content, entry in _coded(module, presented).items():
                entries[f"{module}.{content}"] = entry
        else:
            entries[name] = _floats(name, presented, float_dtype)
    return entries


def _floats(name: str, presented: Presented, dtype: torch.dtype | None) -> TensorEntry:
    kind = presented.stored.type
    num_bytes = kind.row_bytes(torch.Size(presented.shape).numel())
    if presented.below is not None:
        num_bytes = sum(
            part.type.row_bytes(torch.Size(part.shape).numel())
            for part in (presented.stored, presented.below)
        )
    plain = getattr(torch, kind.float_dtype) if kind.float_dtype else None
    if plain is not None and not is_moved(presented):
        row_length = 1 if len(presented.shape) == 1 else presented.shape[-1]
        row_bytes = kind.row_bytes(row_length)
        return TensorEntry(
            name=name,
            dtype=plain,
            shape=presented.shape,
            num_bytes=num_bytes,
            file=presented.stored.file,
            offset=presented.stored.offset + presented.first_row * row_bytes,
        )
    return GgufEntry(
        name=name,
        dtype=plain or dtype or torch.float32,
        shape=presented.shape,
        num_bytes=num_bytes,
        file=presented.stored.file,
        offset=presented.stored.offset,
        presented=presented,
    )


def _coded(module: str, presented: Presented) -> dict[str, TensorEntry]:
    kind = presented.stored.type
    form, (N, K) = form_of(kind), presented.shape
    if form.in_blocks:
        blocks = GgufEntry(
            name=f"{module}.{BLOCKS}",
            dtype=torch.uint8,
            shape=(N, kind.row_bytes(K)),
            num_bytes=kind.row_bytes(N * K),
            file=presented.stored.file,
            offset=presented.stored.offset,
            presented=presented,
            content=BLOCKS,
        )
        return {BLOCKS: blocks}
    groups = K // kernel_forms.GROUP
    scale_bytes = N * groups * form.scales_dtype.itemsize
    shapes = {
        CODES: ((N, K // form.codes_per_item), form.codes_dtype),
        SCALES: ((N, groups), form.scales_dtype),
    }
    return {
        content: GgufEntry(
            name=f"{module}.{content}",
            dtype=dtype,
            shape=shape,
            num_bytes=scale_bytes if content == SCALES else kind.row_bytes(N * K) - scale_bytes,
            file=presented.stored.file,
            offset=presented.stored.offset,
            presented=presented,
            content=content,
        )
        for content, (shape, dtype) in shapes.items()
    }


def _is_expert(module: str) -> bool:
    """Return True for a linear of one expert, which has a number below its layer's."""
    return bool(re.search(r"\.experts\.\d+\.", module))


def _unequal_experts(schemes: Mapping[str, Scheme | None], family: Family) -> list[str]:
    """Return gate and up of experts where they have different schemes: kernels run both as one."""
    names = other_names(family, "{e}")
    if GATE not in names:
        return []
    gate, up = (f".{names[key].rpartition('.')[2]}" for key in (GATE, UP))
    found = []
    for module in schemes:
        other = module.removesuffix(gate) + up
        if module.endswith(gate) and _is_expert(module) and other in schemes:
            found += [module, other] if schemes[module] != schemes[other] else []
    return found


def schemes_of(found: Mapping[str, Presented], family: Family) -> dict[str, Scheme | None]:
    """Return the scheme of every linear; None: it is read as floats.

    A linear of a layer, or a separate head, keeps its codes if a kernel takes them.
    """
    schemes: dict[str, Scheme | None] = {}
    outer = {family.embedding.removesuffix(".weight")}
    before = family.layer.partition("{i}")[0]
    router = f".{family.experts.router}" if family.experts else None
    shared = family.experts.shared.gate if family.experts and family.experts.shared else ""
    head = family.head.removesuffix(".weight")
    for name, presented in found.items():
        module = name.removesuffix(".weight")
        is_matrix = module != name and len(presented.shape) == 2 and module not in outer
        if not is_matrix or not (module.startswith(before) or module == head):
            continue
        if family.float_linears and module.endswith(family.float_linears):
            continue
        if (router and module.endswith(router)) or (shared and module.endswith(f".{shared}")):
            continue
        form = form_of(presented.stored.type)
        is_mixed = presented.below is not None and presented.below.type != presented.stored.type
        runs = (
            form is not None
            and not is_mixed
            and presented.columns is None
            and presented.values is None
            and form.runs(presented.shape[0])
        )
        schemes[module] = form.scheme if runs else None
    schemes |= dict.fromkeys(_unequal_experts(schemes, family))
    if schemes.get(head) is None:
        schemes.pop(head, None)
    return schemes
