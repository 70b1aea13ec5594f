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
    codes: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> LatentCase:
    """Pages in no order; unused ones, and the rest of last ones, hold NaN: with `codes`, of 8
    bits, their scales do."""
    generator = torch.Generator().manual_seed(sum(lengths) + H)
    R, X, E = len(counts), max(1, -(-max(lengths) // B)), L + rope
    stored = dtype if codes is None else codes
    junk = float("nan") if stored.is_floating_point else 100
    pages = torch.full((R * X + 2, B, E), junk, dtype=stored)
    scales = None if codes is None else torch.full((R * X + 2, B, 2), float("nan"))
    tables = torch.randperm(R * X + 2, generator=generator)[: R * X].view(R, X).int()
    entries = []
    for r, length in enumerate(lengths):
        own = torch.randn(length, E, generator=generator).to(dtype)
        t = torch.arange(length)
        places = (tables[r, t // B].long(), t % B)
        if codes is not None:
            own, scales[places] = _rounded(own, L, codes)
            pages.view(torch.uint8)[places] = own.view(torch.uint8)
            of_parts = scales[places].repeat_interleave(torch.tensor([L, rope]), dim=1)
            own = own.double() * of_parts.double()
        else:
            pages[places] = own
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
        cache=PagedLatents(
            pages=pages.to(device), scales=None if scales is None else scales.to(device)
        ),
        step=step,
        counts=counts,
        lengths=lengths,
        entries=entries,
        latent=L,
    )


def _rounded(
    entries: torch.Tensor, latent: int, codes: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [N, E] and their scales [N, 2], those of the latent and of the key."""
    largest = torch.finfo(codes).max if codes.is_floating_point else 127
    made = []
    for part in (entries[:, :latent].float(), entries[:, latent:].float()):
        scale = part.abs().amax(1, keepdim=True) / largest
        code = part / scale
        made.append((code if codes.is_floating_point else code.round(), scale))
    parts, scales = zip(*made, strict=True)
    return torch.cat(parts, 1).to(codes), torch.cat(scales, 1)
