"""Checksums of the quantized linears' tensors, to find damage without running the model."""

import zlib
from collections.abc import Iterable, Mapping

import torch

from formats.checkpoint import CheckpointReader
from formats.errors import InputError

# Reading more would take too long at every start, so further linears have no checksum.
MAX_LINEARS, MAX_BYTES = 2000, 2**29
CODES = ("qweight", "weight_packed", "weight")  # names of tensors with codes, which are large


def tensor_checksum(tensor: torch.Tensor) -> int:
    """Return the CRC-32 of a tensor's bytes."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return zlib.crc32(flat.view(torch.uint8).numpy()) if flat.numel() else 0


def checksums(reader: CheckpointReader, linears: Iterable[str]) -> dict[str, int]:
    """Return the CRC-32 by full name of scales, zeros and all other tensors except codes."""
    linears = list(linears)
    step = max(1, -(-len(linears) // MAX_LINEARS))
    found, num_bytes = {}, 0
    for linear in linears[::step]:
        for leaf in reader.children(linear):
            name = f"{linear}.{leaf}"
            num_bytes += reader.entries[name].num_bytes
            if leaf not in CODES and num_bytes <= MAX_BYTES:
                found[name] = tensor_checksum(reader.get(name))
    return found


def damaged(reader: CheckpointReader, stored: Mapping[str, int]) -> list[str]:
    """Return the names of tensors that are missing or differ from their checksum."""
    names = []
    for name, checksum in stored.items():
        try:
            if tensor_checksum(reader.get(name)) != checksum:
                names.append(name)
        except InputError:
            names.append(name)
    return names
