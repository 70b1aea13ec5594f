"""Specifications of norms, activations and branch epilogues, as kernel arguments.

Legend: C channels.
"""

from dataclasses import dataclass
from typing import Literal

import torch

NormKind = Literal["rms", "layer"]
ActKind = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2", "swiglu_oai"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NormSpec:
    """Norm over the channels of a row, computed in float32.

    "rms" is weight * x / sqrt(mean(x^2) + eps). With a weight in x's dtype, x / rms(x) is rounded
    before the multiplication, as in Llama. With a float32 weight only the product is rounded, as in
    Gemma. "layer" is weight * (x - mean(x)) / sqrt(var(x) + eps) + bias, rounded once. Families
    that store weight - 1 add it when weights are loaded.
    """

    kind: NormKind = "rms"
    weight_C: torch.Tensor  # in x's dtype or float32
    bias_C: torch.Tensor | None = None  # "layer" only
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ActSpec:
    """Activation function. If gated, the first half of x is activated and multiplied by the second.

    "gelu_tanh" is the tanh approximation of GELU, "relu2" the square of ReLU. "swiglu_oai", always
    gated, is gate * sigmoid(alpha * gate), multiplied by 1 + the second half (gpt-oss, MiniMax-M3).
    With a `limit` the function's result (for "swiglu_oai": the gate) is cut above it, and the
    second half outside of it on both sides.
    """

    kind: ActKind
    gated: bool = True
    limit: float | None = None
    alpha: float = 1.0  # of "swiglu_oai"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Branch:
    """Epilogue of an attention or feed-forward block, applied before the residual is added.

    It is a norm (Gemma, OLMo 2), a factor (Granite), or both in this order.
    """

    norm: NormSpec | None = None
    factor: float = 1.0


PLAIN = Branch()


def norm_tensors(spec: NormSpec | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return a norm's (weight, bias) as kernel arguments."""
    return (None, None) if spec is None else (spec.weight_C, spec.bias_C)


def norm_constants(spec: NormSpec | None, branch: Branch) -> dict[str, object]:
    """Return the compile-time constants of a kernel that normalizes a sum with a branch."""
    end = branch.norm
    return {
        "KIND": "rms" if spec is None else spec.kind,
        "BRANCH_KIND": "rms" if end is None else end.kind,
        "BRANCH_EPS": 0.0 if end is None else end.eps,
        "BRANCH_FACTOR": branch.factor,
    }
