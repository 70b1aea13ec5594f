"""PreparedWeight: a weight in the private layout of one kernel.

It is made once at load and never saved: files and state_dict hold the stored format's tensors.
"""

from dataclasses import dataclass, field, replace

import torch

from formats.in_memory.weights import Weight
from formats.scheme import ActivationSpec, QuantSpec
from qkernels.linear.plan import GemmProblem, gemm_problem
from qkernels.operands.codes import InputRounding


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedWeight:
    """One kernel's copy of a weight [N, K], for activations of `dtype`."""

    kernel: str  # row of linear/rows.py that prepared this weight and must run it
    tensors: dict[str, torch.Tensor]
    spec: QuantSpec
    out_features: int
    in_features: int
    dtype: torch.dtype
    # set by ops.prepare_weight: column j of the weight takes input input_order[j]; None: input j
    input_order: torch.Tensor | None = None
    activation: ActivationSpec | None = None  # how the kernel rounds x; None: x stays float
    requested: str | None = None  # kernels that were requested or excluded by name
    problem: GemmProblem = field(init=False)  # cache key of this weight's plans

    def __post_init__(self) -> None:
        rounding = None
        if self.activation is not None:
            rounding = InputRounding(self.activation, self.tensors.get("input_scale"))
        problem = gemm_problem(
            kernel=self.kernel,
            requested=self.requested,
            out_features=self.out_features,
            in_features=self.in_features,
            spec=self.spec,
            activation=self.activation,
            rounding=rounding,
            sorts_inputs=self.input_order is not None,
            in_multiples="multiples" in self.tensors,
            dtype=self.dtype,
            device=self.device,
        )
        object.__setattr__(self, "problem", problem)

    @classmethod
    def of(
        cls,
        weight: Weight,
        *,
        kernel: str,
        tensors: dict[str, torch.Tensor],
        dtype: torch.dtype,
        rounds_input: bool = False,
    ) -> "PreparedWeight":
        """Create a prepared weight from a kernel's tensors.

        `rounds_input`: the kernel takes 8-bit x.
        """
        if rounds_input and weight.input_scale is not None:
            tensors = {**tensors, "input_scale": weight.input_scale}
        return cls(
            kernel=kernel,
            tensors=tensors,
            spec=weight.spec,
            out_features=weight.out_features,
            in_features=weight.in_features,
            dtype=dtype,
            activation=weight.activation if rounds_input else None,
        )

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def sorted_inputs(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., K] with its inputs in the order of the weight's columns."""
        return x if self.input_order is None else x.index_select(-1, self.input_order)

    def to(self, device: torch.device | str) -> "PreparedWeight":
        """Return a copy on another device of the same type."""
        tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        order = None if self.input_order is None else self.input_order.to(device)
        return replace(self, tensors=tensors, input_order=order)
