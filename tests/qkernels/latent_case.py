"""A step of latent attention with random numbers, for its tests. Legend as in latent/ops.py."""

from dataclasses import dataclass

import torch

from qkernels.attention.cache import AttentionStep
from qkernels.latent.cache import PagedLatents


@dataclass(frozen=True, kw_only=True)
class LatentCase:
    """Requests of `counts` rows each, whose last rows see `lengths` entries."""

    q_THE: torch.Tensor
    cache: PagedLatents
    step: AttentionStep
    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    entries: list[torch.Tensor]  # of each request, in order
    latent: int

    @property
    def scale(self) -> float:
        return self.q_THE.shape[2] ** -0.5

    def exact(self) -> torch.Tensor:
        """[T, H, L] in float64, row by row."""
        rows, first = [], 0
        for count, length, entries in zip(self.counts, self.lengths, self.entries, strict=True):
            for i in range(count):
                seen = entries[: length - count + i + 1].double()
                scores = self.q_THE[first + i].double().cpu() @ seen.T * self.scale
                rows.append(scores.softmax(-1) @ seen[:, : self.latent])
            first += count
        return torch.stack(rows)


def latent_case(
    counts: tuple[int, ...],
    lengths: tuple[int, ...],
    *,
    H: int,  # noqa: N803
    L: int,  # noqa: N803
    rope: int,
    B: int,  # noqa: N803
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> LatentCase:
    """Pages in no order; unused ones, and the rest of last ones, hold NaN."""
    generator = torch.Generator().manual_seed(sum(lengths) + H)
    R, X, E = len(counts), max(1, -(-max(lengths) // B)), L + rope
    pages = torch.full((R * X + 2, B, E), float("nan"), dtype=dtype)
    tables = torch.randperm(R * X + 2, generator=generator)[: R * X].view(R, X).int()
    entries = []
    for r, length in enumerate(lengths):
        own = torch.randn(length, E, generator=generator).to(dtype)
        t = torch.arange(length)
        pages[tables[r, t // B].long(), t % B] = own
        tables[r, -(-length // B) :] = -7  # stale
        entries.append(own)
    q_THE = torch.randn(sum(counts), H, E, generator=generator).to(dtype)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    step = AttentionStep(
        block_tables_RX=tables.to(device),
        query_starts_R1=starts.to(device),
        context_lengths_R=torch.tensor(lengths, dtype=torch.int32, device=device),
        max_query_len=max(counts),
        max_context_len=max(lengths),
    )
    return LatentCase(
        q_THE=q_THE.to(device),
        cache=PagedLatents(pages=pages.to(device)),
        step=step,
        counts=counts,
        lengths=lengths,
        entries=entries,
        latent=L,
    )
