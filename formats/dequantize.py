"""Write a quantized checkpoint, or a GGUF file, as a folder of floats.

Any program that loads the float model loads the folder. Weights are exact, then rounded to the
requested dtype.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from formats.architecture.stored_form.stacked_experts import with_stacked_experts
from formats.checkpoint import DEFAULT_MAX_SHARD_BYTES, CheckpointReader
from formats.errors import CheckpointError, InputError
from formats.files.model_path import is_gguf_folder
from formats.files.model_writer import open_writer
from formats.files.side_files import find_side_files
from formats.files.tensor_entry import TensorEntry
from formats.float_view import DecodedEntry, rounded
from formats.names import FLOAT_DTYPES
from formats.numerics.torch_state import torch_defaults
from formats.table import count_text, size_text

DTYPE_KEYS = ("dtype", "torch_dtype")  # of config.json: today's, and the one before


@dataclass(frozen=True, slots=True, kw_only=True)
class Dequantization:
    """Result of writing a checkpoint as floats."""

    target: str
    types: tuple[str, ...]  # schemes of the source's linears, or types of a GGUF file's blocks
    num_tensors: int  # how many were decoded
    dtype: str
    bytes_before: int  # bytes of all tensors of the source
    bytes_after: int
    seconds: float

    def to_text(self) -> str:
        return (
            f"{count_text(self.num_tensors, 'tensor')}, {', '.join(self.types)}, to {self.dtype}:"
            f" {size_text(self.bytes_before)} -> {size_text(self.bytes_after)}"
            f" in {self.seconds:.1f} s\nWrote {self.target}"
        )


@torch_defaults()
def dequantize_checkpoint(
    source: str | Path,
    target: str | Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
) -> Dequantization:
    """Write `source` as floats to `target`, which appears only when it is complete.

    `dtype`: one of FLOAT_DTYPES, for all floats; None: that of config.json, or bfloat16. Raises
    CheckpointError if `source` is a float model already, is damaged, or has numbers that exceed
    float16; InputError for another dtype.
    """
    began = time.perf_counter()
    if dtype not in (None, *FLOAT_DTYPES):
        raise InputError(
            "dtype",
            f"expected one of {', '.join(FLOAT_DTYPES)}, found {dtype!r}",
            f"use {' or '.join(FLOAT_DTYPES)}",
        )
    reader = CheckpointReader(source, as_floats=True)
    is_gguf = is_gguf_folder(reader.folder)
    if not reader.decoded and not is_gguf:
        raise CheckpointError(str(source), "is a float model already", "use it as it is")
    find_side_files(reader.folder)  # fail now, not after the work
    name = dtype or next((str(reader.config[k]) for k in DTYPE_KEYS if reader.config.get(k)), "")
    chosen: torch.dtype = getattr(torch, name if name in FLOAT_DTYPES else "bfloat16")
    config = {key: value for key, value in reader.config.items() if key not in DTYPE_KEYS}
    config["dtype"] = str(chosen).removeprefix("torch.")
    before, after = reader.num_bytes, 0
    decoded = [entry for entry in reader.entries.values() if type(entry) is not TensorEntry]
    least = sum(math.prod(entry.shape) * chosen.itemsize for entry in decoded)
    tensors = _decoded(reader, chosen, all_floats=bool(dtype) or is_gguf)
    with open_writer(target, reader, min_bytes=least, max_shard_bytes=max_shard_bytes) as writer:
        for name, tensor in with_stacked_experts(reader.config, reader.entries, tensors):
            after += tensor.nbytes
            writer.add(name, tensor)
        writer.seal(config, side_files_from=reader.folder)
        writer.publish()
    return Dequantization(
        target=str(target),
        types=tuple(
            dict.fromkeys(
                str(reader.decoded.get(entry.name.removesuffix(".weight"), entry.stored_as))
                for entry in decoded
            )
        ),
        num_tensors=len(decoded),
        dtype=config["dtype"],
        bytes_before=before,
        bytes_after=after,
        seconds=time.perf_counter() - began,
    )


def _decoded(
    reader: CheckpointReader, dtype: torch.dtype, *, all_floats: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor, decoded and rounded; False: floats of a folder keep their dtypes."""
    for name, entry in reader.entries.items():
        if isinstance(entry, DecodedEntry):  # rounded once, to the dtype chosen here
            entry = replace(entry, dtype=torch.float32)
        tensor = entry.read()
        if tensor.is_floating_point() and (all_floats or type(entry) is not TensorEntry):
            tensor = rounded(name, tensor, dtype)
        yield name, tensor
