"""Output of a head over its draft vocabulary, spread to the target's.

Legend: D rows, C hidden size, V the target's vocabulary, U draft vocabulary.
"""

import torch

from formats.heads.layers_config import LayersConfig
from qkernels import ops
from qserve.model.blocks.linear import Linear
from qserve.speculation.heads.loading import HeadWeights


class DraftOutput(torch.nn.Module):
    """A head's output matrix, or the target's, and the target's tokens of its rows."""

    def __init__(
        self,
        head: Linear,
        target_ids_U: torch.Tensor | None,  # None: draft ids are the target's
        vocab_size: int,
        *,
        factor: float = 1.0,
        cap: float = 0.0,  # 0: none
    ) -> None:
        super().__init__()
        self.head, self.factor, self.cap = head, factor, cap
        columns_V = None  # the draft id of each of the target's tokens
        if target_ids_U is not None:
            columns_V = target_ids_U.new_full((vocab_size,), -1, dtype=torch.int32)
            columns_V[target_ids_U] = torch.arange(
                len(target_ids_U), dtype=torch.int32, device=columns_V.device
            )
        self.register_buffer("columns", columns_V)

    def forward(self, read_DC: torch.Tensor) -> torch.Tensor:
        """Logits [D, U] over the draft vocabulary."""
        logits_DU = self.head(read_DC)
        if self.factor != 1:
            logits_DU = logits_DU * self.factor
        if self.cap:
            logits_DU = torch.tanh(logits_DU / self.cap) * self.cap
        return logits_DU

    def spread(self, logits_DU: torch.Tensor) -> torch.Tensor:
        """Logits [D, V] over the target's vocabulary, -inf for tokens that the head lacks."""
        if self.columns is None:
            return logits_DU
        return ops.spread_logits(logits_DU, self.columns)

    @classmethod
    def load(
        cls, weights: HeadWeights, config: LayersConfig, *, factor: float = 1.0, cap: float = 0.0
    ) -> "DraftOutput":
        """Load the head's own matrix and tables, or use the target's matrix."""
        has_own = weights.folder.has_linear("lm_head")
        return cls(
            weights.linear("lm_head") if has_own else weights.context.target.head,
            weights.target_ids(config),
            config.vocab_size,
            factor=factor,
            cap=cap,
        )
