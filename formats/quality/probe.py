"""Start-up probe: logits of a few tokens, stored with a checkpoint and recomputed by a server.

The stored logits are those of the quantized model itself. So an inaccurate model passes, but a
wrong kernel or damaged tensors do not.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch

NUM_TOKENS = 32
NUM_TOP = 16  # likeliest tokens that are kept per position
# Largest mean distance in nats. EXACT_LIMIT: both sides in float32, which differ only in the order
# of sums. LIMIT: 16-bit activations or 8-bit KV pages on at least one side.
EXACT_LIMIT, LIMIT = 0.02, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Token ids, and the log-probabilities of the likeliest tokens after some of them."""

    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    top_ids: tuple[tuple[int, ...], ...]
    log_probs: tuple[tuple[float, ...], ...]
    exact: bool  # computed in float32

    @classmethod
    def of(cls, ids_S: torch.Tensor, logits_SV: torch.Tensor, exact: bool) -> "Probe":
        """Make a probe of the start of a window; `logits_SV` are the logits after each token."""
        length = min(NUM_TOKENS, len(ids_S))
        positions = sorted({0, length // 2, *range(max(0, length - 6), length)})
        rows_PV = logits_SV[positions].float().log_softmax(-1)
        top = rows_PV.topk(min(NUM_TOP, rows_PV.shape[1]), -1)
        return cls(
            token_ids=tuple(ids_S[:length].tolist()),
            positions=tuple(positions),
            top_ids=tuple(map(tuple, top.indices.tolist())),
            log_probs=tuple(tuple(round(p, 6) for p in row) for row in top.values.tolist()),
            exact=exact,
        )

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> "Probe":
        """Restore a probe.

        Raises KeyError, TypeError or ValueError if `to_dict` did not make `stored`.
        """
        found = cls(
            token_ids=tuple(map(int, stored["token_ids"])),
            positions=tuple(map(int, stored["positions"])),
            top_ids=tuple(tuple(map(int, row)) for row in stored["top_ids"]),
            log_probs=tuple(tuple(map(float, row)) for row in stored["log_probs"]),
            exact=bool(stored["exact"]),
        )
        rows = {len(found.positions), len(found.top_ids), len(found.log_probs)}
        same = [len(a) == len(b) for a, b in zip(found.top_ids, found.log_probs, strict=False)]
        fit = all(0 <= p < len(found.token_ids) for p in found.positions)
        if len(rows) != 1 or not found.positions or not all(same) or not fit:
            raise ValueError("its lists differ in length")
        return found

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def limit(self, exact: bool) -> float:
        """Return the largest distance of a correct computation; `exact`: it is in float32, too."""
        return EXACT_LIMIT if exact and self.exact else LIMIT

    def distance(self, logits_SV: torch.Tensor) -> float:
        """Return the mean difference of log-probabilities in nats, weighted by the probabilities.

        It is infinite if a logit is not finite. `logits_SV` may have fewer tokens than the probe.
        """
        total = count = 0.0
        for position, ids, stored in zip(self.positions, self.top_ids, self.log_probs, strict=True):
            if position >= len(logits_SV):
                continue
            row_V = logits_SV[position].float()
            if max(ids) >= len(row_V) or not torch.isfinite(row_V).all():
                return float("inf")
            stored_N = torch.tensor(stored)
            found_N = row_V.log_softmax(-1).cpu()[torch.tensor(ids)]
            weight_N = stored_N.softmax(-1)
            total += float((weight_N * (found_N - stored_N).abs()).sum())
            count += 1
        return total / count if count else 0.0
