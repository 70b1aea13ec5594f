"""Checksum of a loaded model's tensors, computed on their device.

Each 64-bit word is multiplied by an odd number that depends on its position, and the products are
added modulo 2^64, so that any change of one word changes the sum. The checksum detects different
weights, but does not resist an attacker. The SHA-256 digests of weight updates do
(formats/weight_digest.py).
"""

import hashlib

import torch

from qserve.model.resident.leaves import leaves

WORDS = 2**23  # 64-bit words per piece: 64 MiB, which limits the memory for products


@torch.inference_mode()
def checksum(root: object) -> str:
    """Return a hex digest of all tensors below an object, with their paths, dtypes and shapes.

    A GPU processes 1 to 2 TB/s. There is one synchronization per device.
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
    """View bytes, which may begin at any address, as 64-bit words."""
    if piece.storage_offset() % 8:
        piece = piece.clone()
    return piece.view(torch.int64)
