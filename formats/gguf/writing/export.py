"""Write a checkpoint as a GGUF file, code for code if its linears are quantized.

Rows of q and k, names and norms are converted to GGUF's conventions. Nothing is rounded unless the
caller asks for a type of the embedding.
"""

import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from formats.architecture.family import Family
from formats.architecture.flags import is_set
from formats.checkpoint import CheckpointReader, TensorEntry
from formats.errors import CheckpointError
from formats.families import FAMILIES
from formats.gguf.architectures.architecture import Architecture
from formats.gguf.architectures.held import Held, Order, order_of, rows_above, stored_shape
from formats.gguf.block_types import BY_NAME, BlockType
from formats.gguf.entries import GgufEntry, JoinedEntry
from formats.gguf.names import (
    BOTH_UP,
    KEY_UP,
    VALUE_UP,
    linear_names,
    other_names,
    outer_names,
    stream_names,
)
from formats.gguf.row_moves import in_steps, to_file
from formats.gguf.row_orders import to_gguf
from formats.gguf.schemes import BLOCK, BLOCK_SCHEMES, fitting, name_of
from formats.gguf.writing.container_writer import (
    NewTensor,
    Value,
    check_file_is_free,
    write_gguf,
)
from formats.gguf.writing.encode import INTEGER_TYPES, encode_floats, encode_weight, type_of
from formats.gguf.writing.fused import fused_names, fused_tensors, is_fused
from formats.gguf.writing.latent import split_by_head
from formats.gguf.writing.metadata import (
    REMEDY,
    architecture_of,
    check_states,
    head_width,
    metadata_of,
    num_experts,
)
from formats.gguf.writing.tokenizer import tokenizer_metadata
from formats.in_memory.weights import Weight
from formats.layouts import decode_linear, layout_of, quantized_modules, tensor_names
from formats.names import GGUF_TYPES
from formats.quant_config import QuantConfig, find_block
from formats.scheme import Scheme
from formats.table import size_text

# Parts of the names of tensors that are F32 in every file.
SMALL = ("ffn_gate_inp", "exp_probs_b", "ssm_conv1d", "shortconv.conv", "ssm_a", "ssm_d")
FLOAT_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
# most frequent type of the linears -> general.file_type
FILE_TYPES = {
    **{"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9},
    **{"Q4_K": 15, "Q5_K": 17, "Q6_K": 18, "BF16": 32, "MXFP4": 38},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """Result of an export."""

    file: Path
    num_bytes: int
    types: Mapping[str, int]  # number of tensors of each type

    def to_text(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in self.types.items())
        return f"Wrote {self.file}: {size_text(self.num_bytes)}; tensors: {counts}"


def export_gguf(
    source: str | Path,
    target: str | Path,
    *,
    embedding_type: str | None = None,
    head_type: str | None = None,
    exact: bool = True,
) -> Exported:
    """Write a checkpoint as one GGUF file. Raises CheckpointError for what GGUF cannot hold.

    `embedding_type` and `head_type` are types such as q8_0 for the embedding and a float head;
    None: as stored. If the source is a GGUF file, its blocks are kept. `exact` False rounds the
    minima of asymmetric weights to float16.
    """
    target = check_file_is_free(target)
    reader = CheckpointReader(source, rounded=True, in_blocks=False)
    family, row = family_of(reader.config)
    outer = {"token_embd.weight": embedding_type, "output.weight": head_type}
    export = _Export(reader, family, row, outer, exact)
    metadata, divisors = metadata_of(
        reader.config, family, row, target.stem, is_split=export.is_split
    )
    metadata |= export.scalars()
    tensors = export.tensors()
    for divided, values in divisors.items():
        data = struct.pack(f"<{len(values)}f", *values)
        tensors.append(
            NewTensor(
                name=divided,
                type=BY_NAME["F32"],
                shape=(len(values),),
                make=lambda data=data: data,
            )
        )
    types = Counter(tensor.type.name for tensor in tensors)
    layers = Counter(t.type.name for t in tensors if ".ffn_" in t.name or ".attn_" in t.name)
    layers.pop("F32", None)
    most = layers.most_common(1)[0][0] if layers else "F32"
    metadata["general.file_type"] = Value(type="u32", value=FILE_TYPES.get(most, 1))
    metadata |= tokenizer_metadata(reader.folder, reader.config["vocab_size"])
    size = write_gguf(target, metadata, tensors)
    try:
        check_states(target, reader.config)
    except CheckpointError:
        target.unlink()
        raise
    return Exported(file=target, num_bytes=size, types=types)


def check_exports(source: str | Path, scheme: Scheme) -> None:
    """Raise CheckpointError if GGUF has no block type for a scheme, or cannot hold the model."""
    spec = scheme.weight
    has_blocks = spec.type == "mxfp4" or scheme in BLOCK_SCHEMES.values()
    has_blocks |= spec.type == "int" and (spec.bits, spec.symmetric) in INTEGER_TYPES
    if scheme.activation is not None or not has_blocks:
        raise CheckpointError(
            f"scheme {scheme}",
            "has no lossless form in GGUF",
            f"use {', '.join(GGUF_TYPES)}",
        )
    config = CheckpointReader(source, as_floats=True).config
    metadata_of(config, *family_of(config), "")


def family_of(config: Mapping[str, Any]) -> tuple[Family, Architecture]:
    names = config.get("architectures") or [""]
    family = FAMILIES.get(names[0])
    if family is None:
        raise CheckpointError(f"architecture {names[0]}", "is not known", "use a known family")
    return family.variant(config), architecture_of(family, config)


class _Export:
    """The tensors of one checkpoint under GGUF's names."""

    def __init__(
        self,
        reader: CheckpointReader,
        family: Family,
        row: Architecture,
        outer_types: Mapping[str, str | None],
        exact: bool,
    ) -> None:
        self._reader, self._family, self._row = reader, family, row
        self._outer_types, self._exact = outer_types, exact
        block = find_block(reader.folder, reader.config)
        self._quant = QuantConfig.from_dict(block) if block else None
        self._coded = set(quantized_modules(reader.entries))
        unread = family.unread(reader.config)  # tensors that the model does not use
        self._left = {name for name in reader.entries if not name.startswith(unread)}
        # True: kv_b_proj of latent attention is written by head; False: a layer has it quantized
        self._joined = linear_names(family, row).get(BOTH_UP, "")
        is_coded = any(name.endswith(f".{self._joined}") for name in self._coded)
        self.is_split = bool(self._joined) and not row.joins_kv_b and not is_coded

    def tensors(self) -> list[NewTensor]:
        """Return all tensors, in the order of the model. Raises CheckpointError."""
        family, config, found = self._family, self._reader.config, []
        modules = {
            name.removesuffix(".weight"): ours.removesuffix(".weight")
            for name, ours in outer_names(family, self._row).items()
            if name.endswith(".weight")
        }
        head, last_norm = modules.pop("output"), modules.pop(self._row.output_norm, None)
        if family.is_tied(config):
            head = modules["token_embd"] if self._row.head == "own" else None
        elif self._row.head == "tied":
            raise CheckpointError(
                head,
                f"is a separate output head, which {self._row.name} does not have in GGUF",
                REMEDY,
            )
        for name, module in modules.items():
            found += self._tensor(name, [module])
        for name, stack in stream_names(family).items():
            found += self._tensor(name, stack, stacked=True)
        for number in range(config["num_hidden_layers"]):
            found += self._layer(number)
        for name, module in ((self._row.output_norm, last_norm), ("output", head)):
            found += self._tensor(name, [module]) if module else []
        self._left.discard(family.head)
        left = sorted(self._left)
        if left:
            raise CheckpointError(
                left[0], f"and {len(left) - 1} more tensors have no name in GGUF", "remove them"
            )
        return found

    def scalars(self) -> dict[str, Value]:
        """Return the metadata for tensors that have one number per layer."""
        found = {}
        layers = range(self._reader.config["num_hidden_layers"])
        for key, name in self._row.scalars.items():
            names = [f"{self._family.layer.format(i=number)}.{name}" for number in layers]
            values = [self._reader.get(each).item() for each in names]
            self._left -= set(names)
            found[key] = Value(type="f32", value=values)
        return found

    def _layer(self, number: int) -> list[NewTensor]:
        family, found = self._family, []
        prefix, stem = family.layer.format(i=number), f"blk.{number}"
        held = {each.name for each in self._row.tensors.values() if isinstance(each, Held)}
        single = {
            **self._row.norms,
            **linear_names(family, self._row, family.has_state(number, self._reader.config)),
            **other_names(family, ""),
        }
        for theirs, ours in single.items():
            if ours in held or f"{ours}.weight" in held:
                continue
            if theirs == BOTH_UP and self.is_split:
                if family.has_state(number, self._reader.config):
                    continue
                found += self._halves(stem, f"{prefix}.{ours}.weight")
                continue
            found += self._tensor(f"{stem}.{theirs}", [f"{prefix}.{ours}"], optional=True)
        has_keys = any(each.name == f"{stem}.attn_k.weight" for each in found)
        if self._row.fills_shared_layers and not has_keys:
            found += self._zero_keys(stem)
        for theirs, ours in self._row.tensors.items():
            if isinstance(ours, Held):
                found += self._held(stem, theirs, f"{prefix}.{ours.name}", ours)
            elif f"{prefix}.{ours}" in self._reader:
                found.append(self._floats(f"{stem}.{theirs}", [f"{prefix}.{ours}"], False))
        stem_of_experts = f"{prefix}.{family.experts.stem}" if family.experts else ""
        if family.experts and family.experts.fused and is_fused(self._reader, stem_of_experts):
            self._left -= fused_names(self._reader, stem_of_experts)
            found += fused_tensors(self._reader, stem, stem_of_experts, self._type_of)
        elif family.experts is not None:
            count = num_experts(self._reader.config) or 0
            for theirs, ours in other_names(family, "{e}").items():
                modules = [f"{prefix}.{ours.format(e=e)}" for e in range(count)]
                found += self._tensor(f"{stem}.{theirs}", modules, optional=True, stacked=True)
        return found

    def _zero_keys(self, stem: str) -> list[NewTensor]:
        """Return zeroed keys and values for a layer that uses those of an earlier layer."""
        config = self._reader.config
        width, hidden = head_width(config), config["hidden_size"]
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        shapes = {
            "attn_k": (heads * width, hidden),
            "attn_v": (heads * width, hidden),
            "attn_k_norm": (width,),
        }
        found = []
        for local, shape in shapes.items():
            kind = BY_NAME["F32" if len(shape) == 1 else "F16"]
            count = kind.row_bytes(torch.Size(shape).numel())
            found.append(
                NewTensor(
                    name=f"{stem}.{local}.weight",
                    type=kind,
                    shape=shape,
                    make=lambda count=count: bytes(count),
                )
            )
        return found

    def _tensor(
        self,
        name: str,
        modules: list[str],
        *,
        optional: bool = False,
        stacked: bool = False,
    ) -> list[NewTensor]:
        """Return the existing weight and bias of a module, or of a stack of modules."""
        found = []
        if modules[0] in self._coded:
            found.append(self._codes(name, modules, stacked))
        elif f"{modules[0]}.weight" in self._reader:
            names = [f"{module}.weight" for module in modules]
            found.append(self._floats(f"{name}.weight", names, stacked))
        elif modules[0] in self._reader:  # a tensor without ".weight", such as sinks
            leaf = ".bias" if name.endswith(".exp_probs_b") else ".weight"
            found.append(self._floats(f"{name}{leaf}", modules, stacked))
        elif not optional:
            raise CheckpointError(f"{modules[0]}.weight", "is missing", "take a whole checkpoint")
        if f"{modules[0]}.bias" in self._reader:
            names = [f"{module}.bias" for module in modules]
            found.append(self._floats(f"{name}.bias", names, stacked))
        return found

    def _held(self, stem: str, theirs: str, name: str, held: Held) -> list[NewTensor]:
        """Return a tensor in GGUF's form, which differs from the family's: one tensor, or two."""
        module, config = name.removesuffix(".weight"), self._reader.config
        is_coded = module != name and module in self._coded
        if not is_coded and name not in self._reader:
            return []
        if is_coded:
            whole = self._codes(f"{stem}.{theirs}", [module], False)
        else:
            whole = self._floats(f"{stem}.{theirs}", [name], False)
        rows, columns = (order_of(order, config) for order in (held.rows, held.columns))
        entry = self._reader.entries.get(name)
        if _holds_blocks(entry) and entry.presented.columns:
            columns = None  # blocks of a GGUF file are already in the file's order
        shape = stored_shape(held.shape, whole.shape, config.get("mamba_n_groups") or 1)

        def make() -> torch.Tensor:
            data = torch.frombuffer(bytearray(whole.make()), dtype=torch.uint8)
            if held.exponent:
                values = -torch.exp(data.view(torch.float32))
                data = values.view(torch.uint8)
            count = whole.shape[0] if rows is not None or held.below else 1
            data = to_file(data.reshape(count, -1), rows)
            return _columns_moved(data, columns, whole) if columns else data

        if not held.below:
            return [
                replace(whole, name=f"{stem}.{theirs}", shape=shape, make=lambda: _to_bytes(make()))
            ]
        above = rows_above(held, shape, config)
        parts = ((theirs, slice(0, above)), (held.below, slice(above, shape[0])))
        return [
            replace(
                whole,
                name=f"{stem}.{part}",
                shape=(which.stop - which.start, *shape[1:]),
                make=lambda which=which: _to_bytes(make()[which]),
            )
            for part, which in parts
        ]

    def _halves(self, stem: str, name: str) -> list[NewTensor]:
        """Return kv_b_proj as two tensors by head: keys, transposed, and values."""
        if name not in self._reader:
            raise CheckpointError(name, "is missing", "take a whole checkpoint")
        entry, config = self._reader.entries[name], self._reader.config
        self._left.discard(name)
        heads, nope = config["num_attention_heads"], config["qk_nope_head_dim"]
        latent, width = entry.shape[1], entry.shape[0] // heads - nope
        shapes = ((KEY_UP, (heads, latent, nope)), (VALUE_UP, (heads, width, latent)))
        found = []
        for number, (local, shape) in enumerate(shapes):
            kind = self._float_type(name, entry)
            if isinstance(entry, JoinedEntry):  # from a GGUF file, whose blocks are kept
                kind = entry.parts[number].presented.stored.type

            def make(number: int = number, kind: BlockType = kind) -> bytes:
                if isinstance(entry, JoinedEntry):
                    return _to_bytes(entry.parts[number].stored_rows())
                part = split_by_head(self._reader.get(name), config)[number]
                return _to_bytes(encode_floats(part.flatten(0, 1), kind))

            found.append(
                NewTensor(name=f"{stem}.{local}.weight", type=kind, shape=shape, make=make)
            )
        return found

    def _codes(self, name: str, modules: list[str], stacked: bool) -> NewTensor:
        first = self._weight(modules[0])
        kind, shape = type_of(first, modules[0]), (first.out_features, first.in_features)
        for module in modules:
            fields = tensor_names(module, layout_of(self._quant), self._reader.entries)
            self._left -= set(fields.values())

        if self._factors(f"{name}.weight"):
            raise CheckpointError(
                modules[0],
                f"has a factor in config.json, which {self._row.name} has in the weights in GGUF",
                "convert the float model to GGUF, and quantize that file",
            )

        def make() -> bytes:
            parts = []
            for module in modules:
                weight = self._weight(module)
                if type_of(weight, module) != kind:
                    raise CheckpointError(module, f"is not {kind.name} as {modules[0]} is")
                parts.append(encode_weight(weight, module, exact=self._exact))
            return _to_bytes(self._reordered(name, torch.cat(parts)))

        full = (len(modules), *shape) if stacked else shape
        return NewTensor(name=f"{name}.weight", type=kind, shape=full, make=make)

    def _weight(self, module: str) -> Weight:
        fields = tensor_names(module, layout_of(self._quant), self._reader.entries)
        tensors = {field: self._reader.get(full) for field, full in fields.items()}
        return decode_linear(module, tensors, self._quant)

    def _floats(self, name: str, names: list[str], stacked: bool) -> NewTensor:
        entry = self._reader.entries[names[0]]
        for each in names:
            if each not in self._reader:
                raise CheckpointError(each, "is missing", "take a whole checkpoint")
            self._left.discard(each)
        kind = self._float_type(name, entry)
        local = name.removesuffix(".weight").rpartition(".")[2]
        is_norm = name.endswith(".weight") and local in (*self._row.norms, self._row.output_norm)
        offset = self._family.norm_offset if is_norm else 0.0
        factors = self._factors(name)

        def make() -> bytes:
            if _holds_blocks(entry):
                rows = [self._reader.entries[each].stored_rows() for each in names]
                return _to_bytes(self._reordered(name.rpartition(".")[0], torch.cat(rows)))
            parts = [self._reader.get(each) for each in names]
            parts = [part.float() + offset if offset else part for part in parts]
            parts = [_times(part, factors) for part in parts]
            rows = [encode_floats(part, kind) for part in parts]
            if len(entry.shape) == 1 and not stacked:
                rows = [row.reshape(entry.shape[0], -1) for row in rows]
            return _to_bytes(self._reordered(name.rpartition(".")[0], torch.cat(rows)))

        shape = (len(names), *entry.shape) if stacked else tuple(entry.shape)
        if ".exp_probs_b" in name:  # some families store it as one row
            shape = shape[-1:]
        return NewTensor(name=name, type=kind, shape=shape, make=make)

    def _factors(self, name: str) -> list[tuple[int, float]]:
        """Return (number of rows, factor) for the rows of a weight; []: all factors are 1."""
        stem, _, leaf = name.removesuffix(".weight.weight").rpartition(".")
        if self._row.factors is None or (leaf != "weight" and name.endswith(".bias")):
            return []
        local = (stem if leaf == "weight" else f"{stem}.{leaf}").rpartition(".")[2]
        found = self._row.factors(local, self._reader.config)
        return found if any(factor != 1.0 for _, factor in found) else []

    def _float_type(self, name: str, entry: TensorEntry) -> BlockType:
        """Return the type of a float tensor: vectors and routers are F32 in every file."""
        wanted, in_features = self._outer_types.get(name), entry.shape[-1]
        if _holds_blocks(entry):
            return entry.presented.stored.type
        if len(entry.shape) == 1 or any(part in name for part in SMALL):
            return BY_NAME["F32"]
        if wanted is not None and in_features % BLOCK == 0:
            return BY_NAME[name_of(fitting(BLOCK_SCHEMES[wanted], in_features)).upper()]
        return BY_NAME[FLOAT_TYPES.get(entry.dtype, "F32")]

    def _type_of(self, name: str) -> BlockType:
        """Return the type of a float tensor by its name in the checkpoint."""
        return self._float_type(name, self._reader.entries[name])

    def _reordered(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of q, k or a fused q, k, v matrix in GGUF's order."""
        local, config = name.rpartition(".")[2], self._reader.config
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        if local == "attn_qkv" and self._family.qkv.by_head:
            return to_gguf(rows, heads, kv_heads)
        own = {"attn_q": heads, "attn_k": kv_heads}.get(local)
        in_pairs = is_set(self._family.interleaved_rope, config)  # already so in the checkpoint
        return rows if own is None or in_pairs or not self._row.permuted else to_gguf(rows, own)


def _times(part: torch.Tensor, factors: list[tuple[int, float]]) -> torch.Tensor:
    """Return a weight with runs of its rows multiplied by factors."""
    if not factors:
        return part
    counts = [count or part.shape[0] for count, _ in factors]
    pieces = part.float().split(counts)
    return torch.cat([piece * each for piece, (_, each) in zip(pieces, factors, strict=True)])


def _columns_moved(data: torch.Tensor, order: Order, whole: NewTensor) -> torch.Tensor:
    """Return rows of blocks with their columns in the file's order. Raises CheckpointError."""
    kind, (N, K) = whole.type, whole.shape
    step = kind.length
    if order.numbers[-1] % step:
        raise CheckpointError(
            whole.name,
            f"has heads of {order.numbers[-1]} inputs, which blocks of {step} do not divide",
            "quantize it in blocks of 32, such as q8_0",
        )
    blocks = data.reshape(N, K // step, -1)
    return to_file(blocks, in_steps(order, step), dim=1).reshape(N, -1)


def _holds_blocks(entry: TensorEntry) -> bool:
    """Return True if the entry presents blocks of a GGUF file as floats."""
    return isinstance(entry, GgufEntry) and not entry.presented.stored.type.float_dtype


def _to_bytes(rows: torch.Tensor) -> bytes:
    return rows.contiguous().numpy().tobytes()
