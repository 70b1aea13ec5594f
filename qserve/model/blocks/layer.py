"""Decoder layers: attention and feed-forward one after the other, or side by side.

Legend: T tokens of the step, C hidden size.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from qkernels import ops
from qkernels.operands.forms import LinearInput
from qkernels.operands.split_k import LinearOutput
from qserve.model.blocks.attention import StepInputs
from qserve.model.blocks.dense_and_experts import DenseAndExperts
from qserve.model.blocks.gemma.layer_inputs import LayerInput
from qserve.model.blocks.linear import LinearPlan, Product
from qserve.model.blocks.norm import BranchEnd, BranchOutput, Norm
from qserve.model.cache_spec import Cache, CacheSpec, KvFormat


class Mixer(Protocol):
    """Block after the first norm: attention, or one with a state in its place."""

    # True if the checkpoint has scales for an 8-bit cache; None: the cache has no keys and values
    has_kv_scales: bool | None

    def plan(self, rows: int) -> LinearPlan: ...

    def products(self) -> Iterator[Product]: ...

    def cache_spec(self, kv_format: KvFormat, page_size: int) -> CacheSpec: ...

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
        attention_norm: Norm,
        attention: Mixer,
        mlp_norm: Norm,
        mlp: FeedForward | DenseAndExperts,
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
        if isinstance(self.mlp, DenseAndExperts):
            return self.mlp_end(self.mlp(x_TC, plan, residual_TC)), residual_TC
        return self.mlp_end(self.mlp(x_TC, plan)), residual_TC


class ScaledLayer(Layer):
    """A layer whose sum is multiplied by a factor, after its own input was added, if it has one."""

    def __init__(
        self, *, factor: torch.Tensor, layer_input: LayerInput | None = None, **blocks: Any
    ) -> None:
        """`blocks`: those of Layer."""
        super().__init__(**blocks)
        self.layer_input = layer_input
        self.register_buffer("factor", factor)
        self._sum = Norm(None, 0.0)

    def forward(
        self,
        x_TC: BranchOutput,
        residual_TC: torch.Tensor | None,
        step: StepInputs,
        cache: Cache,
        taps: list[torch.Tensor] | None = None,
    ) -> tuple[BranchOutput, torch.Tensor | None]:
        """As Layer.forward; the residual is None, since what is returned is the sum."""
        x_TC, residual_TC = super().forward(x_TC, residual_TC, step, cache, taps)
        _, sum_TC = self._sum(x_TC, residual_TC, None)
        if self.layer_input is not None:
            sum_TC = self.layer_input(sum_TC, step.layer_input_TP)
        return sum_TC * self.factor, None


class NormedStreamLayer(torch.nn.Module):
    """h = norm(x), then h * alpha + attention(h) * beta; the same with the feed-forward."""

    def __init__(
        self,
        *,
        attention_norm: Norm,
        attention: Mixer,
        attention_factors: tuple[float, float],  # alpha, beta
        mlp_norm: Norm,
        mlp: FeedForward,
        mlp_factors: tuple[float, float],
    ) -> None:
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self.attention_alpha, self.mlp_alpha = attention_factors[0], mlp_factors[0]
        self.attention_end = BranchEnd(factor=attention_factors[1])
        self.mlp_end = BranchEnd(factor=mlp_factors[1])

    def forward(
        self,
        x_TC: BranchOutput,
        residual_TC: torch.Tensor | None,
        step: StepInputs,
        cache: Cache,
        taps: list[torch.Tensor] | None = None,
    ) -> tuple[BranchOutput, torch.Tensor]:
        """As Layer.forward."""
        h_TC, sum_TC = self.attention_norm(x_TC, residual_TC, None)
        if taps is not None:
            taps.append(sum_TC)
        plan = self.attention.plan(h_TC.shape[0])
        attended = self.attention(ops.in_form(h_TC, plan.input), plan, step, cache)
        residual_TC = h_TC * self.attention_alpha
        h_TC, _ = self.mlp_norm(self.attention_end(attended), residual_TC, None)
        plan = self.mlp.plan(h_TC.shape[0])
        made = self.mlp(ops.in_form(h_TC, plan.input), plan)
        return self.mlp_end(made), h_TC * self.mlp_alpha


class ParallelLayer(torch.nn.Module):
    """x + attention(norm(x)) + mlp(norm(x)); the feed-forward may have a norm of its own."""

    def __init__(
        self,
        *,
        norm: Norm,
        attention: Mixer,
        mlp: FeedForward,
        mlp_norm: Norm | None = None,  # None: it reads the norm of attention
    ) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp, self.mlp_norm = norm, attention, mlp, mlp_norm
        self._sum = Norm(None, 0.0)

    def forward(
        self,
        x_TC: BranchOutput,
        residual_TC: torch.Tensor | None,
        step: StepInputs,
        cache: Cache,
        taps: list[torch.Tensor] | None = None,
    ) -> tuple[BranchOutput, torch.Tensor]:
        """As Layer.forward."""
        rows = x_TC.shape[0]
        plan, mlp_plan = self.attention.plan(rows), self.mlp.plan(rows)
        # where two readers of one norm take different forms each converts a tensor
        is_alone = self.mlp_norm is not None
        form = plan.input if is_alone or plan.input == mlp_plan.input else None
        x_TC, residual_TC = self.norm(x_TC, residual_TC, form)
        if taps is not None:
            taps.append(residual_TC)
        mlp_TC = x_TC
        if is_alone:
            mlp_TC, _ = self.mlp_norm(residual_TC, None, mlp_plan.input)
        attention_TC = self.attention(x_TC, plan, step, cache)
        _, residual_TC = self._sum(attention_TC, residual_TC, None)
        return self.mlp(mlp_TC, mlp_plan), residual_TC
