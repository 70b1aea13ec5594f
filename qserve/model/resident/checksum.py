"""Checksum of a loaded model's tensors, computed where they are.

Each 64-bit word is multiplied by an odd number of its place and added up modulo 2^64, so that any
change of one word changes the sum. It finds different weights; it does not resist an attacker, as
the SHA-256 digests of weight updates do (formats/weight_digest.py).
"""

import hashlib

import torch

from qserve.model.resident.leaves import leaves

WORDS = 2**23  # 64-bit words per piece: 64 MiB, which bounds the memory


@torch.inference_mode()
def checksum(root: object) -> str:
    """Hex digest of every tensor below an object, with its path, dtype and shape.

    A GPU reads 1 to 2 TB/s; one synchronization in all.
    """
    digest = hashlib.sha256()
    sums: list[torch.Tensor] = []
    factors: dict[torch.device, torch.Tensor] = {}
    for path, leaf in leaves(root):
        if not isinstance(leaf, torch.Tensor):
            continue
        digest.update(f"{path} {leaf.dtype} {list(leaf.shape)}\n".encode())
        flat = leaf.contiguous().flatten().view(torch.uint8)
        whole = len(flat) // 8 * 8
        for piece in flat[:whole].split(WORDS * 8):
            words = _words(piece)
            if leaf.device not in factors:
                numbers = torch.arange(WORDS, dtype=torch.int64, device=leaf.device)
                factors[leaf.device] = numbers.mul_(2).add_(0x9E3779B97F4A7C15 - 2**64)
            sums.append((words * factors[leaf.device][: len(words)]).sum())
        rest = flat[whole:].to(torch.int64)
        sums.append((rest << (8 * torch.arange(len(rest), device=leaf.device))).sum())
    for device in dict.fromkeys(each.device for each in sums):
        values = torch.stack([each for each in sums if each.device == device])
        digest.update(values.cpu().numpy().astype("<i8").tobytes())
    return digest.hexdigest()


def _words(piece: torch.Tensor) -> torch.Tensor:
    """64-bit words of bytes, which may begin at any address."""
    if piece.storage_offset() % 8:
        piece = piece.clone()
    return piece.view(torch.int64)
