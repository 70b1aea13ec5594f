"""Decoder layers: attention and MLP in sequence or in parallel.

T: tokens of the step. C: hidden size.
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
from qserve.model.blocks.media_experts import MediaExperts
from qserve.model.blocks.norm import BranchEnd, BranchOutput, Norm
from qserve.model.cache_spec import Cache, CacheSpec, KvFormat


class Mixer(Protocol):
    """Token mixer, the block after the first norm: attention, or a block with recurrent states."""

    # True if the checkpoint has scales for an 8-bit cache; None: the cache has no keys and values
    has_kv_scales: bool | None

    def plan(self, rows: int) -> LinearPlan: ...

    def products(self) -> Iterator[Product]: ...

    def cache_spec(self, kv_format: KvFormat, page_size: int) -> CacheSpec: ...

    def __call__(
        self, x_TC: LinearInput, plan: LinearPlan, step: StepInputs, cache: Cache
    ) -> LinearOutput: ...


class FeedForward(Protocol):
    """The block after the second norm: a dense MLP or experts."""

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
        mlp: FeedForward | DenseAndExperts | MediaExperts,
        attention_end: BranchEnd | None = None,  # None: no norm or factor before it is added
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
        aux_states: list[torch.Tensor] | None = None,
    ) -> tuple[BranchOutput, torch.Tensor]:
        """Return the MLP's output, and the residual stream to which the next norm adds it.

        `aux_states`: if given, the residual stream before this layer is appended to it.
        """
        plan = self.attention.plan(x_TC.shape[0])
        x_TC, residual_TC = self.attention_norm(x_TC, residual_TC, plan.input)
        if aux_states is not None:
            aux_states.append(residual_TC)
        x_TC = self.attention_end(self.attention(x_TC, plan, step, cache))
        plan = self.mlp.plan(x_TC.shape[0])
        x_TC, residual_TC = self.mlp_norm(x_TC, residual_TC, plan.input)
        if isinstance(self.mlp, DenseAndExperts):
            return self.mlp_end(self.mlp(x_TC, plan, residual_TC)), residual_TC
        if isinstance(self.mlp, MediaExperts):
            return self.mlp_end(self.mlp(x_TC, plan, step.is_media_T)), residual_TC
        return self.mlp_end(self.mlp(x_TC, plan)), residual_TC


class ScaledLayer(Layer):
    """A layer whose output sum is multiplied by a factor. A layer input may be added before."""

    def __init__(
        self, *, factor: torch.Tensor, layer_input: LayerInput | None = None, **blocks: Any
    ) -> None:
        """`blocks`: arguments of Layer."""
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
        aux_states: list[torch.Tensor] | None = None,
    ) -> tuple[BranchOutput, torch.Tensor | None]:
        """Return the sum, and None for the residual. Arguments are those of Layer.forward."""
        x_TC, residual_TC = super().forward(x_TC, residual_TC, step, cache, aux_states)
        _, sum_TC = self._sum(x_TC, residual_TC, None)
        if self.layer_input is not None:
            sum_TC = self.layer_input(sum_TC, step.layer_input_TP)
        return sum_TC * self.factor, None


class KeptInput:
    """Input of a layer [T, C], kept during a step for later layers."""

    x_TC: torch.Tensor | None = None


class SkipLayer(Layer):
    """A layer that keeps its input for later layers, or mixes what earlier layers kept into it.

    Mixing: factor * kept + (1 - factor) * input.
    """

    def __init__(
        self,
        *,
        keeps: tuple[KeptInput, ...],
        mixes: tuple[tuple[KeptInput, float], ...],
        **blocks: Any,
    ) -> None:
        """`blocks`: arguments of Layer."""
        super().__init__(**blocks)
        self.keeps, self.mixes = keeps, mixes
        self._sum = Norm(None, 0.0)

    def forward(
        self,
        x_TC: BranchOutput,
        residual_TC: torch.Tensor | None,
        step: StepInputs,
        cache: Cache,
        aux_states: list[torch.Tensor] | None = None,
    ) -> tuple[BranchOutput, torch.Tensor]:
        """Run the layer. Arguments and result are those of Layer.forward."""
        if self.keeps or self.mixes:
            _, x_TC = self._sum(x_TC, residual_TC, None)
            residual_TC = None
            for kept in self.keeps:
                kept.x_TC = x_TC
            for kept, factor in self.mixes:
                x_TC = torch.lerp(x_TC, kept.x_TC, factor)
        return super().forward(x_TC, residual_TC, step, cache, aux_states)


class NormedStreamLayer(torch.nn.Module):
    """h = norm(x), then h * alpha + attention(h) * beta; then the same with the MLP."""

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
        aux_states: list[torch.Tensor] | None = None,
    ) -> tuple[BranchOutput, torch.Tensor]:
        """Run the layer. Arguments and result are those of Layer.forward."""
        h_TC, sum_TC = self.attention_norm(x_TC, residual_TC, None)
        if aux_states is not None:
            aux_states.append(sum_TC)
        plan = self.attention.plan(h_TC.shape[0])
        attended = self.attention(ops.in_form(h_TC, plan.input), plan, step, cache)
        residual_TC = h_TC * self.attention_alpha
        h_TC, _ = self.mlp_norm(self.attention_end(attended), residual_TC, None)
        plan = self.mlp.plan(h_TC.shape[0])
        made = self.mlp(ops.in_form(h_TC, plan.input), plan)
        return self.mlp_end(made), h_TC * self.mlp_alpha


class ParallelLayer(torch.nn.Module):
    """x + attention(norm(x)) + mlp_end(mlp(norm(x))). The MLP may have a separate norm."""

    def __init__(
        self,
        *,
        norm: Norm,
        attention: Mixer,
        mlp: FeedForward,
        mlp_norm: Norm | None = None,  # None: the MLP shares the norm of attention
        mlp_end: BranchEnd | None = None,  # None: no norm or factor before it is added
    ) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp, self.mlp_norm = norm, attention, mlp, mlp_norm
        self.mlp_end = mlp_end or BranchEnd()
        self._sum = Norm(None, 0.0)

    def forward(
        self,
        x_TC: BranchOutput,
        residual_TC: torch.Tensor | None,
        step: StepInputs,
        cache: Cache,
        aux_states: list[torch.Tensor] | None = None,
    ) -> tuple[BranchOutput, torch.Tensor]:
        """Run the layer. Arguments and result are those of Layer.forward."""
        rows = x_TC.shape[0]
        plan, mlp_plan = self.attention.plan(rows), self.mlp.plan(rows)
        # If both blocks share a norm but need different input forms, each converts a tensor.
        is_alone = self.mlp_norm is not None
        form = plan.input if is_alone or plan.input == mlp_plan.input else None
        x_TC, residual_TC = self.norm(x_TC, residual_TC, form)
        if aux_states is not None:
            aux_states.append(residual_TC)
        mlp_TC = x_TC
        if is_alone:
            mlp_TC, _ = self.mlp_norm(residual_TC, None, mlp_plan.input)
        attention_TC = self.attention(x_TC, plan, step, cache)
        _, residual_TC = self._sum(attention_TC, residual_TC, None)
        return self.mlp_end(self.mlp(mlp_TC, mlp_plan)), residual_TC
