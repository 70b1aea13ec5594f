"""Digests of a model's weights, by which a trainer compares its weights with a server's.

A float tensor's digest covers its dtype, shape and bytes. A quantized linear's digest covers the
tensors of its decoded weight (codes, scales, zero points), whatever format stored them. README.md
("Digests") is the specification.
"""

import hashlib
from collections.abc import Iterable, Mapping

import torch

from formats.in_memory.weights import Weight, round_to_nearest, tensors_of, with_activation
from formats.scheme import Scheme

WEIGHT = ".weight"  # suffix of a linear's matrix


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's dtype, shape and bytes, in hex.

    Bytes are row-major and little-endian.
    """
    return _digest({"": tensor})


def weight_digest(weight: Weight) -> str:
    """Return the SHA-256 of a quantized weight's decoded tensors, in hex."""
    return _digest(tensors_of(weight))


def rounded_digest(weight_NK: torch.Tensor, scheme: str | Scheme, name: str = "weight") -> str:
    """Return the digest of a float matrix after rounding to nearest, as a server runs it.

    Raises CheckpointError if the matrix cannot be rounded.
    """
    return weight_digest(rounded(weight_NK, Scheme.parse(scheme), name))


def rounded(weight_NK: torch.Tensor, scheme: Scheme, name: str) -> Weight:
    """Return a float matrix rounded as by `--recipe rtn`. Raises CheckpointError."""
    return with_activation(round_to_nearest(weight_NK, scheme.weight, name), scheme, None, name)


def digests(
    tensors: Mapping[str, torch.Tensor], schemes: Mapping[str, str | Scheme] | None = None
) -> dict[str, str]:
    """Return the digests of a trainer's float tensors by name, as a server runs them.

    `schemes` maps each linear that the server rounds, by name without `.weight`, to its scheme, as
    `GET /weights/digest` lists them.
    """
    found = {}
    for name, tensor in tensors.items():
        scheme = (schemes or {}).get(name.removesuffix(WEIGHT)) if name.endswith(WEIGHT) else None
        if scheme is None:
            found[name] = tensor_digest(tensor)
        else:
            found[name] = rounded_digest(tensor.detach(), scheme, name)
    return found


def total_digest(found: Mapping[str, str]) -> str:
    """Return the SHA-256 of the lines "NAME DIGEST", sorted by name."""
    total = hashlib.sha256()
    for name in sorted(found):
        total.update(f"{name} {found[name]}\n".encode())
    return total.hexdigest()


def differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Return, sorted, the names whose digests differ or that only one side has."""
    return sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        dtype = str(tensor.dtype).removeprefix("torch.")
        total.update(f"{name} {dtype} {list(tensor.shape)}\n".encode())
        for part in _bytes_of(tensor):
            total.update(part)
    return total.hexdigest()


def _bytes_of(tensor: torch.Tensor) -> Iterable[memoryview]:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8).cpu()
    yield memoryview(flat.numpy())
