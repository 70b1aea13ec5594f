"""Routing rules, by which tokens choose experts, and the chosen experts.

Legend: M tokens, E experts, k experts per token.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from qkernels.errors import KernelError

TINY = 1e-20  # added to a sum of routing weights, as in the models' own code


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Routing rule of a model: scores of all experts, the choice, and the routing weights.

    The code calls routing weights "shares". Ties go to the lowest expert.
    """

    num_experts: int
    top_k: int
    # Scores from the router's logits. sqrtsoftplus: sqrt(log(1 + exp(x))). softmax_of_chosen:
    # choose by logits, then take the softmax over the chosen ones. sigmoid_of_chosen: choose by
    # logits, then take the sigmoid of each chosen one. sparsemixer: choose by logits;
    # each routing weight comes from a softmax over the logits near the chosen one, without experts
    # chosen before it (arXiv 2409.12136).
    scores: Literal[
        "softmax",
        "sigmoid",
        "sqrtsoftplus",
        "softmax_of_chosen",
        "sigmoid_of_chosen",
        "sparsemixer",
    ] = "softmax"
    jitter: float = 0.0  # sparsemixer: near means within 2 jitter, relative to the larger magnitude
    normalized: bool = False  # divide the routing weights by their sum
    # Experts are divided into `num_groups` groups of equal size; only the `top_groups` best groups
    # take part in the choice.
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"  # best score of a group, or sum of its two best
    factor: float = 1.0  # factor of the routing weights
    rounded: bool = False  # round the routing weights to the logits' dtype

    def __post_init__(self) -> None:
        E, k, G = self.num_experts, self.top_k, self.num_groups
        if not 1 <= k <= E:
            raise KernelError(
                "routing",
                f"expected 1 to {E} experts of a token, found {k}",
                "choose such a number",
            )
        if not 1 <= self.top_groups <= G or E % G or self.top_groups * (E // G) < k:
            raise KernelError(
                "routing",
                f"{k} of {E} experts cannot be chosen from {self.top_groups} of {G} groups",
                "choose fewer experts or more groups",
            )


class Routes(NamedTuple):
    """The chosen experts of M tokens and their routing weights."""

    # int32, distinct for a token, best first; E is the id of every expert of another rank
    ids_Mk: torch.Tensor
    weights_Mk: torch.Tensor  # float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Glu:
    """Activation between the two products of an expert.

    - "swiglu": gate * sigmoid(alpha * gate) * (up + offset). The defaults give silu(gate) * up;
      gpt-oss uses other numbers.
    - "geglu": gelu(gate) * up, with the tanh approximation of GELU.
    - "relu2": the square of ReLU of up, without a gate.
    """

    kind: Literal["swiglu", "geglu", "relu2"] = "swiglu"
    alpha: float = 1.0
    offset: float = 0.0
    limit: float | None = None  # gate is clamped to at most `limit`, up to -limit .. limit
    cut_after: bool = False  # silu(gate) is clamped instead of gate; alpha is 1, offset 0

    @property
    def gated(self) -> bool:
        """Return True if the first product computes gate and up, False if only up."""
        return self.kind != "relu2"

    @property
    def gelu(self) -> bool:
        """Return True if GELU is applied to the gate."""
        return self.kind == "geglu"

    def outputs(self, inner: int) -> int:
        """Return the number of outputs of the first product if the second has `inner` inputs."""
        return 2 * inner if self.gated else inner


SILU = Glu()
GEGLU = Glu(kind="geglu")
RELU2 = Glu(kind="relu2")
