"""DraftOutput: logits of a head over its draft vocabulary, and their mapping to the target's.

Suffixes of tensor names: D rows, C hidden size, V target's vocabulary, U draft vocabulary.
"""

import torch

from formats.heads.layers_config import LayersConfig
from qkernels import ops
from qserve.model.blocks.linear import Linear
from qserve.speculation.heads.loading import HeadWeights


class DraftOutput(torch.nn.Module):
    """Output matrix of a head (or the target's), and the target's token id of each of its rows."""

    def __init__(
        self,
        head: Linear,
        target_ids_U: torch.Tensor | None,  # None: draft ids equal the target's ids
        vocab_size: int,
        *,
        factor: float = 1.0,
        cap: float = 0.0,  # 0: no soft cap
    ) -> None:
        super().__init__()
        self.head, self.factor, self.cap = head, factor, cap
        columns_V = None  # target's token id -> draft id, or -1
        if target_ids_U is not None:
            columns_V = target_ids_U.new_full((vocab_size,), -1, dtype=torch.int32)
            columns_V[target_ids_U] = torch.arange(
                len(target_ids_U), dtype=torch.int32, device=columns_V.device
            )
        self.register_buffer("columns", columns_V)

    def forward(self, read_DC: torch.Tensor) -> torch.Tensor:
        """Return logits over the draft vocabulary, [D, U]."""
        logits_DU = self.head(read_DC)
        if self.factor != 1:
            logits_DU = logits_DU * self.factor
        if self.cap:
            logits_DU = torch.tanh(logits_DU / self.cap) * self.cap
        return logits_DU

    def spread(self, logits_DU: torch.Tensor) -> torch.Tensor:
        """Map logits to the target's vocabulary, [D, V]; -inf for tokens that the head lacks."""
        if self.columns is None:
            return logits_DU
        return ops.spread_logits(logits_DU, self.columns)

    @classmethod
    def load(
        cls, weights: HeadWeights, config: LayersConfig, *, factor: float = 1.0, cap: float = 0.0
    ) -> "DraftOutput":
        """Load the head's output matrix and id tables. Without its own, use the target's matrix."""
        has_own = weights.folder.has_linear("lm_head")
        return cls(
            weights.linear("lm_head") if has_own else weights.context.target.head,
            weights.target_ids(config),
            config.vocab_size,
            factor=factor,
            cap=cap,
        )
