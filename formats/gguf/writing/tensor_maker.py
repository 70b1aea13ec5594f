"""Tensors of a checkpoint in the form of a GGUF file, one tensor or one stack at a time.

Codes and blocks stay as they are; floats are written in a plain type, or in blocks where the caller
asks for a type of the embedding or the head.
"""

from collections.abc import Mapping

import torch

from formats.architecture.family import Family
from formats.architecture.flags import is_set
from formats.checkpoint import CheckpointReader, TensorEntry
from formats.errors import CheckpointError
from formats.gguf.architectures.architecture import Architecture
from formats.gguf.block_types import BY_NAME, BlockType
from formats.gguf.entries import GgufEntry
from formats.gguf.row_orders import to_gguf
from formats.gguf.schemes import BLOCK, BLOCK_SCHEMES, fitting, name_of
from formats.gguf.writing.container_writer import NewTensor
from formats.gguf.writing.encode import encode_floats, encode_weight, to_bytes, type_of
from formats.in_memory.weights import Weight
from formats.layouts import decode_linear, layout_of, quantized_modules, tensor_names
from formats.quant_config import QuantConfig, find_block

# Parts of the names of tensors that are F32 in every file.
SMALL = ("ffn_gate_inp", "exp_probs_b", "ssm_conv1d", "shortconv.conv", "ssm_a", "ssm_d")
FLOAT_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class TensorMaker:
    """Makes a file's tensors from those of one checkpoint, and knows which are left.

    `exact` False: minima of asymmetric weights are rounded to float16.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        family: Family,
        row: Architecture,
        outer_types: Mapping[str, str | None],
        exact: bool,
    ) -> None:
        self.reader, self.family, self.row = reader, family, row
        self._outer_types, self._exact = outer_types, exact
        block = find_block(reader.folder, reader.config)
        self._quant = QuantConfig.from_dict(block) if block else None
        self.coded = set(quantized_modules(reader.entries))
        if self.coded and self._quant is None:
            raise CheckpointError(
                f"{reader.folder}/config.json",
                f"has no quantization_config, but {min(self.coded)} is quantized",
                "restore the config.json that was written with the weights",
            )
        unread = family.unread(reader.config)  # tensors that the model does not use
        self.left = {name for name in reader.entries if not name.startswith(unread)}

    def module(
        self,
        name: str,
        modules: list[str],
        *,
        optional: bool = False,
        stack: int = 0,
    ) -> list[NewTensor]:
        """Return the existing weight and bias of a module, or of a stack of modules.

        `stack`: number of parts of the stack, each of as many modules; 0: there is one module.
        """
        found = []
        if modules[0] in self.coded:
            found.append(self.codes(name, modules, stack))
        elif f"{modules[0]}.weight" in self.reader:
            names = [f"{module}.weight" for module in modules]
            found.append(self.floats(f"{name}.weight", names, stack))
        elif modules[0] in self.reader:  # a tensor without ".weight", such as sinks
            leaf = ".bias" if name.endswith(".exp_probs_b") else ".weight"
            found.append(self.floats(f"{name}{leaf}", modules, stack))
        elif not optional:
            raise CheckpointError(f"{modules[0]}.weight", "is missing", "use a complete checkpoint")
        if f"{modules[0]}.bias" in self.reader:
            names = [f"{module}.bias" for module in modules]
            found.append(self.floats(f"{name}.bias", names, stack))
        return found

    def codes(self, name: str, modules: list[str], stack: int = 0) -> NewTensor:
        """Return the codes of a linear, or of a stack of them. Raises CheckpointError."""
        first = self._weight(modules[0])
        kind, shape = type_of(first, modules[0]), (first.out_features, first.in_features)
        for module in modules:
            fields = tensor_names(module, layout_of(self._quant), self.reader.entries)
            self.left -= set(fields.values())
        if self._factors(f"{name}.weight"):
            raise CheckpointError(
                modules[0],
                f"config.json states a factor that {self.row.name} in GGUF includes in its weights",
                "convert the float model to GGUF, and quantize that file",
            )

        def make() -> bytes:
            parts = []
            for module in modules:
                weight = self._weight(module)
                if type_of(weight, module) != kind:
                    raise CheckpointError(
                        module,
                        f"expected {kind.name}, the type of {modules[0]},"
                        f" found {type_of(weight, module).name}",
                        "quantize them with one scheme",
                    )
                parts.append(encode_weight(weight, module, exact=self._exact))
            return to_bytes(self._reordered(name, torch.cat(parts)))

        full = _stack_shape(shape, len(modules), stack)
        return NewTensor(name=f"{name}.weight", type=kind, shape=full, make=make)

    def _weight(self, module: str) -> Weight:
        fields = tensor_names(module, layout_of(self._quant), self.reader.entries)
        tensors = {field: self.reader.get(full) for field, full in fields.items()}
        return decode_linear(module, tensors, self._quant)

    def floats(self, name: str, names: list[str], stack: int = 0) -> NewTensor:
        """Return a float tensor, or a stack of them. Raises CheckpointError if one is missing."""
        entry = self.reader.entries[names[0]]
        for each in names:
            if each not in self.reader:
                raise CheckpointError(each, "is missing", "use a complete checkpoint")
            self.left.discard(each)
        kind = self.float_type(name, entry)
        local = name.removesuffix(".weight").rpartition(".")[2]
        is_norm = name.endswith(".weight") and local in (*self.row.norms, self.row.output_norm)
        offset = self.family.norm_offset if is_norm else 0.0
        factors = self._factors(name)

        def make() -> bytes:
            if holds_blocks(entry):
                for each in names:
                    if self.type_of_floats(each) != kind:
                        raise CheckpointError(
                            each,
                            f"expected {kind.name}, the type of {names[0]},"
                            f" found {self.type_of_floats(each).name}",
                            "quantize them with one scheme",
                        )
                rows = [self.reader.entries[each].stored_rows() for each in names]
                return to_bytes(self._reordered(name.rpartition(".")[0], torch.cat(rows)))
            parts = [self.reader.get(each) for each in names]
            parts = [part.float() + offset if offset else part for part in parts]
            parts = [_times(part, factors) for part in parts]
            rows = [encode_floats(part, kind) for part in parts]
            if len(entry.shape) == 1 and not stack:
                rows = [row.reshape(entry.shape[0], -1) for row in rows]
            return to_bytes(self._reordered(name.rpartition(".")[0], torch.cat(rows)))

        shape = _stack_shape(tuple(entry.shape), len(names), stack)
        if ".exp_probs_b" in name:  # some families store it as one row
            shape = shape[-1:]
        return NewTensor(name=name, type=kind, shape=shape, make=make)

    def _factors(self, name: str) -> list[tuple[int, float]]:
        """Return (number of rows, factor) for the rows of a weight; []: all factors are 1."""
        stem, _, leaf = name.removesuffix(".weight.weight").rpartition(".")
        if self.row.factors is None or (leaf != "weight" and name.endswith(".bias")):
            return []
        local = (stem if leaf == "weight" else f"{stem}.{leaf}").rpartition(".")[2]
        found = self.row.factors(local, self.reader.config)
        return found if any(factor != 1.0 for _, factor in found) else []

    def float_type(self, name: str, entry: TensorEntry) -> BlockType:
        """Return the type of a float tensor: vectors and routers are F32 in every file."""
        wanted, in_features = self._outer_types.get(name), entry.shape[-1]
        if holds_blocks(entry):
            return entry.presented.stored.type
        if len(entry.shape) == 1 or any(part in name for part in SMALL):
            return BY_NAME["F32"]
        if wanted is not None and in_features % BLOCK == 0:
            return BY_NAME[name_of(fitting(BLOCK_SCHEMES[wanted], in_features)).upper()]
        return BY_NAME[FLOAT_TYPES.get(entry.dtype, "F32")]

    def type_of_module(self, module: str) -> BlockType | None:
        """Return the type of a linear's weight; None: it is missing."""
        if module in self.coded:
            return type_of(self._weight(module), module)
        name = f"{module}.weight"
        return self.type_of_floats(name) if name in self.reader else None

    def type_of_floats(self, name: str) -> BlockType:
        """Return the type of a float tensor by its name in the checkpoint."""
        return self.float_type(name, self.reader.entries[name])

    def _reordered(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of q, k or a fused q, k, v matrix in GGUF's order."""
        local, config = name.rpartition(".")[2], self.reader.config
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        if local == "attn_qkv" and self.family.qkv.by_head:
            return to_gguf(rows, heads, kv_heads)
        own = {"attn_q": heads, "attn_k": kv_heads}.get(local)
        in_pairs = is_set(self.family.interleaved_rope, config)  # already so in the checkpoint
        return rows if own is None or in_pairs or not self.row.permuted else to_gguf(rows, own)


def _stack_shape(shape: tuple[int, ...], count: int, stack: int) -> tuple[int, ...]:
    """Return the shape of `count` tensors in a stack of `stack` parts; 0: of one tensor."""
    return (stack, shape[0] * count // stack, *shape[1:]) if stack else shape


def _times(part: torch.Tensor, factors: list[tuple[int, float]]) -> torch.Tensor:
    """Return a weight with runs of its rows multiplied by factors."""
    if not factors:
        return part
    counts = [count or part.shape[0] for count, _ in factors]
    pieces = part.float().split(counts)
    return torch.cat([piece * each for piece, (_, each) in zip(pieces, factors, strict=True)])


def holds_blocks(entry: TensorEntry) -> bool:
    """Return True if the entry presents blocks of a GGUF file as floats."""
    return isinstance(entry, GgufEntry) and not entry.presented.stored.type.float_dtype
