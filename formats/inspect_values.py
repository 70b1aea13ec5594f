"""Are the numbers of float tensors numbers? Reads them all, a block at a time. Knows no model.

Norms, biases, embeddings, the head, linears in float and float8 codes. As fast as most disks: the
smallest and the largest of a block are found at 2 to 4 GB/s of one processor.
"""

import math
from collections.abc import Iterator

import torch

from formats.checkpoint import TensorEntry
from formats.findings import Findings
from formats.fp8 import FP8_DTYPE
from formats.inspect_files import Shards
from formats.inspect_kv import is_kv_scale
from formats.layouts import is_quantized

# Stays in a processor's cache.
BLOCK_BYTES = 2**22
# of quantized linears: the checks of each layout read them
SCALES = ("scales", "weight_scale", "input_scale")


def check_values(shards: Shards, findings: Findings) -> None:
    """Report NaN and infinity in every float tensor that has no check of its own."""
    for name, entry in shards.entries.items():
        module, _, field = name.rpartition(".")
        is_scale = field in SCALES and is_quantized(module, shards.entries)
        if not entry.dtype.is_floating_point or is_scale or is_kv_scale(name):
            continue
        try:
            _check_values(entry, findings)
        except OSError as error:
            findings.error(
                name, f"cannot be read from {entry.file.name}: {error}", "fetch the file again"
            )


def _check_values(entry: TensorEntry, findings: Findings) -> None:
    count, first = 0, -1
    for begin, block in _blocks(entry):
        if _all_numbers(block):
            continue
        wrong = _is_no_number(block)
        first = begin + int(wrong.int().argmax()) if first < 0 else first
        count += int(wrong.sum())
    if count:
        place = [int(index) for index in torch.unravel_index(torch.tensor(first), entry.shape)]
        findings.error(
            entry.name,
            f"{count} of {math.prod(entry.shape)} values are NaN or infinite, the first at {place}",
            "fetch the file again, or quantize again from a model without",
        )


def _blocks(entry: TensorEntry) -> Iterator[tuple[int, torch.Tensor]]:
    """(number of its first value, values), until all were there: each block replaces the last.

    Raises OSError.
    """
    buffer = torch.empty(min(BLOCK_BYTES, entry.num_bytes), dtype=torch.uint8)
    with entry.file.open("rb", buffering=0) as file:
        file.seek(entry.offset)
        for begin in range(0, entry.num_bytes, BLOCK_BYTES):
            block = buffer[: entry.num_bytes - begin]
            if file.readinto(memoryview(block.numpy())) != len(block):
                raise OSError("the file ends inside")
            yield begin // entry.dtype.itemsize, block.view(entry.dtype)


def _all_numbers(values: torch.Tensor) -> bool:
    """The smallest and the largest of values are NaN where any is."""
    if values.dtype == FP8_DTYPE:
        return not _is_no_number(values).any()
    return all(math.isfinite(end) for end in torch.aminmax(values))


def _is_no_number(values: torch.Tensor) -> torch.Tensor:
    if values.dtype == FP8_DTYPE:  # it has two NaN and no infinity
        return (values.view(torch.uint8) & 0x7F) == 0x7F
    return ~torch.isfinite(values)
