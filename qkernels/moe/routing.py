"""Routing rules by which tokens choose experts, and the chosen experts.

Legend: M tokens, E experts, k experts of a token.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from qkernels.errors import KernelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The rule of one model: scores of all experts, the choice, the chosen experts' shares.

    Of equal scores the lowest expert is chosen.
    """

    num_experts: int
    top_k: int
    # of the router's logits; softmax_of_chosen: the choice is by logits, the softmax comes after
    # it; sparsemixer: the same choice, and each share is of a softmax over the logits near the
    # chosen one, without those of experts chosen before (arXiv 2409.12136)
    scores: Literal["softmax", "sigmoid", "softmax_of_chosen", "sparsemixer"] = "softmax"
    jitter: float = 0.0  # of sparsemixer: near is within 2 jitter of the larger magnitude
    normalized: bool = False  # the shares are divided by their sum
    # Experts are divided into groups of equal size; all but the best groups are left out.
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"  # of a group: its best score, or its two best's sum
    factor: float = 1.0  # of the shares
    rounded: bool = False  # the shares are rounded to the logits' dtype

    def __post_init__(self) -> None:
        E, k, G = self.num_experts, self.top_k, self.num_groups
        if not 1 <= k <= E:
            raise KernelError("routing", f"expected 1 to {E} experts of a token, found {k}")
        if not 1 <= self.top_groups <= G or E % G or self.top_groups * (E // G) < k:
            raise KernelError(
                "routing",
                f"{k} of {E} experts cannot be chosen from {self.top_groups} of {G} groups",
            )


class Routes(NamedTuple):
    """The choice of M tokens."""

    # int32, the k of a token distinct, best first; E for all experts that are elsewhere
    ids_Mk: torch.Tensor
    shares_Mk: torch.Tensor  # float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Glu:
    """Activation between an expert's products.

    "swiglu": gate * sigmoid(alpha * gate) * (up + offset). The default is silu(gate) * up; other
    numbers are gpt-oss's. "geglu": gelu(gate) * up, with the tanh approximation of GELU.
    "relu2": the square of ReLU of up, without a gate.
    """

    kind: Literal["swiglu", "geglu", "relu2"] = "swiglu"
    alpha: float = 1.0
    offset: float = 0.0
    limit: float | None = None  # gate is cut above it, up outside of it on both sides
    cut_after: bool = False  # silu(gate) is cut above it, not gate; alpha is 1, offset 0

    @property
    def gated(self) -> bool:
        """Return True if the first product makes gate and up, False if up alone."""
        return self.kind != "relu2"

    @property
    def gelu(self) -> bool:
        """Return True if GELU is applied to the gate."""
        return self.kind == "geglu"

    def outputs(self, inner: int) -> int:
        """Return the outputs of the first product for `inner` inputs of the second."""
        return 2 * inner if self.gated else inner


SILU = Glu()
GEGLU = Glu(kind="geglu")
RELU2 = Glu(kind="relu2")
