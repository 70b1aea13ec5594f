"""SelectiveBlock: base class of mixers that compute dt, B and C from the convolution's output.

T: tokens of the step. I: channels of the convolution. N: state size of a channel. R: rank of dt.
"""

from collections.abc import Iterator

import torch

from qkernels import ops
from qkernels.operands.split_k import LinearOutput, reduced
from qserve.model.blocks.linear import Linear, Product, products_of
from qserve.model.blocks.states.state import StateBlock
from qserve.parallel.communicator import RankPartial


class SelectiveBlock(StateBlock):
    """A mixer whose `x_proj` computes B, C and the inputs of `dt_proj`, which computes dt."""

    def __init__(
        self,
        *,
        rank: int,  # number of inputs of dt_proj
        state: int,
        in_proj: Linear,
        out_proj: Linear,
        conv_weight: torch.Tensor,  # [I, taps]
        skip: torch.Tensor,  # float32, of each head or channel
        kernel: str | None = None,  # kernel of the operations on states, selected by name
        x_proj: Linear,  # outputs the inputs of dt_proj, then B and C
        dt_proj: Linear,
        dt_last: bool = False,  # x_proj outputs B and C, then the inputs of dt_proj
        dt_norm: torch.Tensor | None = None,  # [R], of dt_proj's inputs; None: no norms
        b_norm: torch.Tensor | None = None,  # [N]
        c_norm: torch.Tensor | None = None,  # [N]
        eps: float,  # of these norms
    ) -> None:
        super().__init__()
        self.rank, self.state, self.dt_last, self.eps = rank, state, dt_last, eps
        self.kernel = kernel
        self.in_proj, self.out_proj = in_proj, out_proj
        self.x_proj, self.dt_proj = x_proj, dt_proj
        self.register_buffer("conv_weight", conv_weight)
        self.register_buffer("skip", skip)
        self.register_buffer("dt_norm", dt_norm)
        self.register_buffer("b_norm", b_norm)
        self.register_buffer("c_norm", c_norm)

    def products(self) -> Iterator[Product]:
        """Yield the quantized products, each with the operation that consumes its result."""
        for linear in (self.in_proj, self.x_proj, self.dt_proj):
            yield from products_of(linear, None)
        yield from products_of(self.out_proj, "norm")

    def selection(self, x_TI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return dt of this rank's heads or channels before softplus, B and C, from x."""
        T, sizes = x_TI.shape[0], [self.state, self.state]
        plan = self.x_proj.plan(T)
        made = self.x_proj(ops.in_form(x_TI, plan.input), plan)
        made = made.total() if isinstance(made, RankPartial) else reduced(made)
        if self.dt_last:
            b_TN, c_TN, dt_TR = made.split([*sizes, self.rank], 1)
        else:
            dt_TR, b_TN, c_TN = made.split([self.rank, *sizes], 1)
        dt_TR = self._normed(dt_TR.contiguous(), self.dt_norm)
        b_TN, c_TN = self._normed(b_TN, self.b_norm), self._normed(c_TN, self.c_norm)
        plan = self.dt_proj.plan(T)
        return reduced(self.dt_proj(ops.in_form(dt_TR, plan.input), plan)), b_TN, c_TN

    def gated_output(self, read_TI: torch.Tensor, z_TI: torch.Tensor) -> LinearOutput:
        """Gate what was read from the states. Return the input of the next norm."""
        gated_TI = ops.gated_group_norm(read_TI, z_TI, None, 1, self.eps, False, self.kernel)
        output = self.out_proj.plan(gated_TI.shape[0], "norm")
        return self.out_proj(ops.in_form(gated_TI, output.input), output)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is None:
            return x
        spec = ops.NormSpec(weight_C=weight, eps=self.eps)
        normed, _ = ops.norm(x.contiguous(), None, spec)
        return normed
