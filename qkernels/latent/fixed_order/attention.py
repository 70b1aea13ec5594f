"""Batch-invariant latent attention: a row's bits depend only on its request and position.

Keys are divided into segments at multiples of 256. Each segment has its own sums, which are folded
from a row's last segment to its first, in one program or from memory (triton_segments.py). Prompts
also run over entries: with expanded keys the products would be different ones. On a CPU each row is
computed alone.
"""

from dataclasses import replace

import torch

from qkernels.attention.cache import AttentionStep
from qkernels.gpu import device as gpu_device
from qkernels.latent import reference
from qkernels.latent.cache import PagedLatents


def latent_attention(
    q_THE: torch.Tensor,
    cache: PagedLatents,
    step: AttentionStep,
    *,
    latent_width: int,
    scale: float,
) -> torch.Tensor:
    """Implement ops.latent_attention."""
    settings = {"latent_width": latent_width, "scale": scale}
    if gpu_device.arch(q_THE.device) != "cpu":
        from qkernels.latent.fixed_order import triton_segments

        return triton_segments.latent_attention(q_THE, cache, step, **settings)
    out_THL = q_THE.new_zeros((*q_THE.shape[:2], latent_width))
    starts, lengths = step.query_starts_R1.tolist(), step.context_lengths_R.tolist()
    for request, length in enumerate(lengths):
        stop = starts[request + 1]
        for row in range(starts[request], stop):
            alone = replace(
                step,
                block_tables_RX=step.block_tables_RX[request : request + 1],
                query_starts_R1=torch.tensor([0, 1], dtype=torch.int32),
                context_lengths_R=torch.tensor([length - (stop - 1 - row)], dtype=torch.int32),
                max_query_len=1,
            )
            q = q_THE[row : row + 1].clone()
            out_THL[row] = reference.latent_attention(q, cache, alone, **settings)[0]
    return out_THL


def fixed_order_heads(
    x_THK: torch.Tensor, weight_HKN: torch.Tensor, out_THN: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply each head's rows of x by the head's matrix, batch-invariant: [T, H, N].

    The result is written to `out_THN` if it is given.
    """
    if out_THN is None:
        out_THN = x_THK.new_empty(*x_THK.shape[:2], weight_HKN.shape[2])
    if gpu_device.arch(x_THK.device) != "cpu":
        from qkernels.latent.fixed_order import triton_heads

        triton_heads.multiply(x_THK, weight_HKN, out_THN)
        return out_THN
    for t in range(x_THK.shape[0]):
        out_THN[t] = torch.bmm(x_THK[t][:, None].contiguous(), weight_HKN)[:, 0]
    return out_THN
