"""Rows of an indexer with random numbers, for tests of selected keys. Legend as in
latent/selected/ops.py.
"""

from dataclasses import dataclass

import torch

from qkernels.attention.cache import AttentionStep


@dataclass(frozen=True, kw_only=True)
class SelectedCase:
    """Requests of `counts` rows each, whose last rows see `lengths` keys."""

    q_TID: torch.Tensor
    weights_TI: torch.Tensor
    keys_PBD: torch.Tensor
    step: AttentionStep
    counts: tuple[int, ...]
    lengths: tuple[int, ...]

    def exact(self) -> list[torch.Tensor]:
        """Scores of the keys that each row sees, in float64, row by row."""
        found, row, B = [], 0, self.keys_PBD.shape[1]
        for r, (count, length) in enumerate(zip(self.counts, self.lengths, strict=True)):
            t = torch.arange(length)
            keys = self.keys_PBD[self.step.block_tables_RX[r, t // B].long(), t % B].double()
            for i in range(count):
                seen = keys[: length - count + i + 1]
                products = (self.q_TID[row].double() @ seen.T).relu()
                found.append(self.weights_TI[row].double() @ products)
                row += 1
        return [each.cpu() for each in found]

    def slots(self, request: int, positions: torch.Tensor) -> list[int]:
        """Slots of a request's keys."""
        B, table = self.keys_PBD.shape[1], self.step.block_tables_RX[request].cpu()
        return (table[positions // B] * B + positions % B).tolist()


def selected_case(
    counts: tuple[int, ...],
    lengths: tuple[int, ...],
    *,
    heads: int,
    D: int,  # noqa: N803
    B: int,  # noqa: N803
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> SelectedCase:
    """Pages in no order; those that no request has, and the rest of last ones, hold NaN."""
    generator = torch.Generator().manual_seed(sum(lengths) + heads)
    R, X, T = len(counts), max(1, -(-max(lengths) // B)), sum(counts)
    keys = torch.full((R * X + 2, B, D), float("nan"), dtype=dtype)
    tables = torch.randperm(R * X + 2, generator=generator)[: R * X].view(R, X).int()
    for r, length in enumerate(lengths):
        t = torch.arange(length)
        own = torch.randn(length, D, generator=generator).to(dtype)
        keys[tables[r, t // B].long(), t % B] = own
        tables[r, -(-length // B) :] = -7  # stale
    step = AttentionStep(
        block_tables_RX=tables.to(device),
        query_starts_R1=torch.tensor([0, *counts]).cumsum(0).int().to(device),
        context_lengths_R=torch.tensor(lengths, dtype=torch.int32, device=device),
        max_query_len=max(counts),
        max_context_len=max(lengths),
    )
    return SelectedCase(
        q_TID=torch.randn(T, heads, D, generator=generator).to(device, dtype),
        weights_TI=torch.randn(T, heads, generator=generator).to(device),
        keys_PBD=keys.to(device),
        step=step,
        counts=counts,
        lengths=lengths,
    )
