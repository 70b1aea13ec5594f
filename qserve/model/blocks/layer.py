"""A decoder layer whose halves, attention and feed-forward, each read the residual through a norm.

Legend: T tokens of the step, C hidden size.
"""

from collections.abc import Iterator
from typing import Protocol

import torch

from qkernels.attention.cache import PagedKv
from qkernels.delta_net.state import StateSlots
from qkernels.linear.plan import LinearInput
from qkernels.operands.split_k import LinearOutput
from qserve.model.blocks.attention import StepInputs
from qserve.model.blocks.linear import LinearPlan, Product
from qserve.model.blocks.norm import BranchEnd, BranchOutput, RmsNorm

Cache = PagedKv | StateSlots  # what one layer keeps of requests


class Mixer(Protocol):
    """What stands behind the first norm: attention, or what has a state in its place."""

    def plan(self, rows: int) -> LinearPlan: ...

    def products(self) -> Iterator[Product]: ...

    def __call__(
        self, x_TC: LinearInput, plan: LinearPlan, step: StepInputs, cache: Cache
    ) -> LinearOutput: ...


class FeedForward(Protocol):
    """What stands behind the second norm."""

    def plan(self, rows: int) -> LinearPlan: ...

    def products(self) -> Iterator[Product]: ...

    def __call__(self, x_TC: LinearInput, plan: LinearPlan) -> LinearOutput: ...


class Layer(torch.nn.Module):
    """x + attention_end(attention(norm(x))), then x + mlp_end(mlp(norm(x)))."""

    def __init__(
        self,
        *,
        attention_norm: RmsNorm,
        attention: Mixer,
        mlp_norm: RmsNorm,
        mlp: FeedForward,
        attention_end: BranchEnd | None = None,  # None: it is added as it is
        mlp_end: BranchEnd | None = None,
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.attention_end = attention_end or BranchEnd()
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.mlp_end = mlp_end or BranchEnd()

    def forward(
        self,
        x_TC: BranchOutput,
        residual_TC: torch.Tensor | None,
        step: StepInputs,
        cache: Cache,
        taps: list[torch.Tensor] | None = None,
    ) -> tuple[BranchOutput, torch.Tensor]:
        """Returns what this layer adds, and the residual it is to be added to.

        `taps`, if given, gets the residual stream before this layer.
        """
        plan = self.attention.plan(x_TC.shape[0])
        x_TC, residual_TC = self.attention_norm(x_TC, residual_TC, plan.input)
        if taps is not None:
            taps.append(residual_TC)
        x_TC = self.attention_end(self.attention(x_TC, plan, step, cache))
        plan = self.mlp.plan(x_TC.shape[0])
        x_TC, residual_TC = self.mlp_norm(x_TC, residual_TC, plan.input)
        return self.mlp_end(self.mlp(x_TC, plan)), residual_TC
