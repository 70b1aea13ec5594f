"""SHA-256 digests of tensors and texts."""

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch


def tensor_digest(tensor: torch.Tensor) -> str:
    """SHA-256 of dtype, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode())
    digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def tensors_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of names and tensors, independent of their order.

    Tensors are hashed in threads, because hashing releases the GIL.
    """
    names = sorted(tensors)
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(tensor_digest, (tensors[name] for name in names)))
    return combined(f"{name} {digest}" for name, digest in zip(names, digests, strict=True))


def combined(parts: Iterable[str]) -> str:
    """SHA-256 of texts, joined by newlines."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
