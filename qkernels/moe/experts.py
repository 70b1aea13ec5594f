"""The prepared experts of one layer, and the plan by which M tokens run.

Legend: M tokens, E experts, k experts of a token, C hidden size, I inner size, N outputs and K
inputs of a product.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from formats.in_memory.fp4 import Fp4Weight
from formats.in_memory.packed import PackedWeight
from formats.in_memory.weights import Weight
from formats.scheme import ActivationSpec, QuantSpec
from qkernels.linear.prepared import PreparedWeight
from qkernels.moe.routing import Glu

# A float matrix, or a quantized one.
ExpertMatrix = torch.Tensor | Weight


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertWeights:
    """The experts of a layer as a checkpoint has them.

    `gate_up` is gate's rows above up's; without a gate it is up. With `routed_experts` these are
    some of a layer's experts: ids count them, and E is the id of all experts that are elsewhere.
    """

    top_k: int  # experts of a token
    gate_up: Sequence[ExpertMatrix]  # of each expert, [2 I, C]; without a gate [I, C]
    down: Sequence[ExpertMatrix]  # [C, I]
    gate_up_bias_EN: torch.Tensor | None = None
    down_bias_EN: torch.Tensor | None = None
    glu: Glu
    routed_experts: int | None = None  # that a token chooses from; None: all are here


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertStack:
    """One product of all experts in one weight: expert e has the outputs from e N on."""

    # packed: few bits, 16-bit inputs; w4a8: 4 bits, 8-bit inputs; codes: 8 bits on both sides
    kind: Literal["packed", "w4a8", "codes", "float"]
    tensors: dict[str, torch.Tensor]
    spec: QuantSpec | None  # None: float
    activation: ActivationSpec | None
    out_features: int  # N
    in_features: int  # K
    bias_EN: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertList:
    """One product of all experts, each a weight of its own."""

    members: tuple[PreparedWeight | torch.Tensor, ...]
    bias_EN: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsProblem:
    """Everything that a plan depends on apart from M."""

    kernel: str  # the row of moe/rows.py
    kind: str  # of the stacks
    spec: QuantSpec | None
    activation: ActivationSpec | None
    num_experts: int  # E
    routed_experts: int  # that a token chooses from; more than E if some are elsewhere
    top_k: int
    hidden: int  # C
    inner: int  # I
    gated: bool = True  # the first product makes gate and up
    gelu: bool = False  # the tanh approximation of GELU is applied to gate
    cut_after: bool = False  # the activation's result is cut above a limit
    dtype: torch.dtype
    device: torch.device
    requested: str | None = None  # kernels that were asked for or forbidden (choice.py)

    @property
    def is_partial(self) -> bool:
        """Return True if some of the experts that tokens choose are elsewhere."""
        return self.routed_experts > self.num_experts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedExperts:
    """One kernel's private copy of a layer's experts, for activations of `dtype`."""

    gate_up: ExpertStack | ExpertList
    down: ExpertStack | ExpertList
    glu: Glu
    problem: ExpertsProblem

    @property
    def device(self) -> torch.device:
        return self.problem.device

    @property
    def dtype(self) -> torch.dtype:
        return self.problem.dtype


def spec_of(matrix: ExpertMatrix) -> QuantSpec | None:
    """Its numerics; None: a float matrix."""
    return None if isinstance(matrix, torch.Tensor) else matrix.spec


def shape_of(matrix: ExpertMatrix) -> tuple[int, int]:
    """[N, K]."""
    if isinstance(matrix, torch.Tensor):
        return tuple(matrix.shape)
    return matrix.out_features, matrix.in_features


def is_packed(matrix: ExpertMatrix) -> bool:
    """True if the weights are integer codes, packed into words, or 4-bit floats."""
    return isinstance(matrix, PackedWeight | Fp4Weight)
