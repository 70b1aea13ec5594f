"""The prepared experts of one layer, and the key of the plan by which M tokens run.

M  tokens               C  hidden size
E  experts              I  inner size
k  experts per token    N  outputs and
                        K  inputs of a product
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from formats.in_memory.fp4 import Fp4Weight
from formats.in_memory.k_weight import KWeight
from formats.in_memory.packed import PackedWeight
from formats.in_memory.weights import Weight
from formats.scheme import ActivationSpec, QuantSpec
from qkernels.linear.prepared import PreparedWeight
from qkernels.moe.routing import Glu

# A float matrix, or a quantized one.
ExpertMatrix = torch.Tensor | Weight


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertWeights:
    """The experts of a layer as a checkpoint stores them.

    `gate_up` holds gate's rows, then up's; without a gate only up's. With `routed_experts`, this
    rank holds only some of a layer's experts: ids count these, and E is the id of every other
    expert.
    """

    top_k: int  # experts per token
    gate_up: Sequence[ExpertMatrix]  # one per expert, [2 I, C]; without a gate [I, C]
    down: Sequence[ExpertMatrix]  # one per expert, [C, I]
    gate_up_bias_EN: torch.Tensor | None = None
    down_bias_EN: torch.Tensor | None = None
    glu: Glu
    routed_experts: int | None = None  # experts on all ranks; None: all experts are here


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertStack:
    """One product of all experts, stacked into one weight: expert e has the outputs from e N on."""

    # packed: 2- to 8-bit weights, 16-bit inputs; w4a8: 4-bit weights, 8-bit inputs; codes: 8 bits
    # on both sides
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
    """One product of all experts, with a separate weight per expert."""

    members: tuple[PreparedWeight | torch.Tensor, ...]
    bias_EN: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsProblem:
    """Cache key of a plan, apart from M."""

    kernel: str  # the row of moe/rows.py
    kind: str  # kind of the stacks
    spec: QuantSpec | None  # of `down`
    activation: ActivationSpec | None
    num_experts: int  # E
    routed_experts: int  # experts on all ranks; more than E if other ranks hold some
    top_k: int
    hidden: int  # C
    inner: int  # I
    gated: bool = True  # the first product computes gate and up, not only up
    gelu: bool = False  # the gate's activation is the tanh approximation of GELU
    cut_after: bool = False  # the result of the activation is clamped to a limit from above
    alike: bool = True  # both products have the same quantization
    dtype: torch.dtype
    device: torch.device
    requested: str | None = None  # kernels that were requested or forbidden (choice.py)

    @property
    def is_partial(self) -> bool:
        """Return True if other ranks hold some of the experts that tokens choose."""
        return self.routed_experts > self.num_experts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedExperts:
    """One kernel's copy of a layer's experts, for activations of `dtype`."""

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
    """Return the matrix's quantization; None: it is a float matrix."""
    return None if isinstance(matrix, torch.Tensor) else matrix.spec


def shape_of(matrix: ExpertMatrix) -> tuple[int, int]:
    """Return (N, K)."""
    if isinstance(matrix, torch.Tensor):
        return tuple(matrix.shape)
    return matrix.out_features, matrix.in_features


def is_packed(matrix: ExpertMatrix) -> bool:
    """Return True if the weights are packed integer codes, GGUF blocks or 4-bit floats."""
    return isinstance(matrix, PackedWeight | KWeight | Fp4Weight)
