"""Compressor: one entry for each window of m tokens.

    entry = norm(sum over the window of softmax(gate + ape) * value)

The softmax is per channel. An overlapping compressor has two values and gates of each token: the
first for the entry of the next window, the second for that of the token's own window, so that an
entry sums over 2 m tokens.

T: rows of the step. C: hidden size. N: windows. M: tokens that an entry sums over. X: outputs of
the projection. D: width of an entry. R: rotated channels, the last ones.
"""

import torch

from qkernels import ops
from qserve.model.blocks.attention import StepInputs
from qserve.model.blocks.compressed.cache import WindowPages, WindowSpec
from qserve.model.blocks.compressed.step_rows import StepRows
from qserve.model.blocks.linear import FloatLinear
from qserve.model.blocks.rotary import Rotary


def rotated(
    x_TJD: torch.Tensor, rotary: Rotary, positions_T: torch.Tensor, *, back: bool = False
) -> torch.Tensor:
    """Rotate the last channels of each row by its position; `back`: in the opposite direction."""
    cos_sin_TR = rotary.cos_sin[positions_T.clamp(min=0)]
    R = cos_sin_TR.shape[1]
    cos_T1, sin_T1 = cos_sin_TR[:, None].chunk(2, dim=-1)
    sin_T1 = -sin_T1 if back else sin_T1
    kept, turned = x_TJD.split([x_TJD.shape[-1] - R, R], dim=-1)
    even, odd = turned.float().unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack([even * cos_T1 - odd * sin_T1, odd * cos_T1 + even * sin_T1], -1)
    return torch.cat([kept, pairs.flatten(-2).to(x_TJD.dtype)], -1)


class Compressor(torch.nn.Module):
    """Keeps the projections of a step's tokens, and writes the entries of windows that end."""

    def __init__(
        self,
        *,
        projection: FloatLinear,  # [2 X, C]: values, then gates
        ape: torch.Tensor,  # float32 [m, X], added to gates
        norm: torch.Tensor,  # [D]
        eps: float,
        rotary: Rotary,
    ) -> None:
        super().__init__()
        self.projection, self.eps, self.rotary = projection, eps, rotary
        self.register_buffer("ape", ape)
        self.register_buffer("norm", norm)

    @property
    def spec(self) -> WindowSpec:
        """Sizes of the compressor's part of a page."""
        rate, outputs = self.ape.shape
        return WindowSpec(rate=rate, outputs=outputs, width=len(self.norm))

    @property
    def overlaps(self) -> bool:
        """True if an entry also sums over the window before its own."""
        return self.spec.outputs > self.spec.width

    def write_(
        self, x_TC: torch.Tensor, step: StepInputs, rows: StepRows, pages: WindowPages
    ) -> None:
        """Store the tokens' projections, and the entries of windows that end with one of them."""
        ops.write_index_keys_(self.projection(x_TC), pages.inputs_PBX, step.slots_T)
        closed = rows.closed(self.spec.rate, with_before=self.overlaps)
        if not len(closed.entry_N):
            return
        value_NMX, gate_NMX = pages.inputs_PBX.flatten(0, 1)[closed.slots_NM].chunk(2, dim=-1)
        gate_NMX = gate_NMX + self.ape.repeat(1 + self.overlaps, 1)
        if self.overlaps:
            value_NMX, gate_NMX = self._of_both(value_NMX), self._of_both(gate_NMX)
        gate_NMX = gate_NMX.masked_fill(~closed.seen_NM[..., None], -torch.inf)
        value_NMX = value_NMX.masked_fill(~closed.seen_NM[..., None], 0)
        share_NMX = gate_NMX.softmax(dim=1, dtype=torch.float32).to(value_NMX.dtype)
        spec = ops.NormSpec(weight_C=self.norm, eps=self.eps)
        entry_ND, _ = ops.norm((value_NMX * share_NMX).sum(1), None, spec)
        entry_N1D = rotated(entry_ND[:, None], self.rotary, closed.first_N)
        pages.entries_PGD.view(-1, self.spec.width)[closed.entry_N] = entry_N1D[:, 0]

    def _of_both(self, each_NMX: torch.Tensor) -> torch.Tensor:
        """Return the first half of the channels before the window, the second half in it."""
        before, own = each_NMX.chunk(2, dim=1)
        D = self.spec.width
        return torch.cat([before[..., :D], own[..., D:]], 1)
