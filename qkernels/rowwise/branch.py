"""What some models do to the result of attention or feed-forward before the residual is added."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A norm over its channels (Gemma, OLMo 2) or a factor (Granite), or both, in this order."""

    norm_C: torch.Tensor | None = None
    eps: float = 0.0
    factor: float = 1.0

    def launch_constants(self) -> dict[str, float]:
        """Those of a kernel that computes it."""
        return {"BRANCH_EPS": self.eps, "BRANCH_FACTOR": self.factor}


PLAIN = Branch()
