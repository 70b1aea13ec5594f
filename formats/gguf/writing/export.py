"""Write a checkpoint as a GGUF file, code for code if its linears are quantized.

model_tensors.py converts rows of q and k, names and norms. Nothing is rounded unless the
caller asks for a type of the embedding.
"""

import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.architecture.family import Family
from formats.checkpoint import CheckpointReader
from formats.errors import CheckpointError
from formats.families import FAMILIES
from formats.gguf.architectures.architecture import Architecture
from formats.gguf.block_types import BY_NAME
from formats.gguf.schemes import BLOCK_SCHEMES
from formats.gguf.writing.container_writer import (
    NewTensor,
    Value,
    check_file_is_free,
    write_gguf,
)
from formats.gguf.writing.encode import INTEGER_TYPES
from formats.gguf.writing.metadata import (
    architecture_of,
    check_states,
    metadata_of,
)
from formats.gguf.writing.model_tensors import ModelTensors
from formats.gguf.writing.tensor_maker import TensorMaker
from formats.gguf.writing.tokenizer import tokenizer_metadata
from formats.names import GGUF_TYPES
from formats.scheme import Scheme
from formats.table import size_text

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
    export = ModelTensors(TensorMaker(reader, family, row, outer, exact))
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
    metadata |= tokenizer_metadata(reader.folder, reader.config["vocab_size"], row.name)
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
    reader = CheckpointReader(source, as_floats=True)
    family, row = family_of(reader.config)
    metadata_of(reader.config, family, row, "")
    tokenizer_metadata(reader.folder, reader.config["vocab_size"], row.name)


def family_of(config: Mapping[str, Any]) -> tuple[Family, Architecture]:
    """Return the rows that a model is written with. Raises CheckpointError if there are none."""
    names = config.get("architectures") or [""]
    family = FAMILIES.get(names[0])
    if family is None:
        raise CheckpointError(f"architecture {names[0]}", "is not known", "use a known family")
    return family.variant(config), architecture_of(family, config)
