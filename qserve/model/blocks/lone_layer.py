"""Layers with a single block (Nemotron-H): one norm, then a mixer or an MLP.

T: tokens of the step. C: hidden size.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from qkernels.operands.forms import LinearInput
from qkernels.operands.split_k import LinearOutput
from qserve.model.blocks.attention import StepInputs
from qserve.model.blocks.layer import FeedForward, Mixer
from qserve.model.blocks.linear import LinearPlan, Product
from qserve.model.blocks.norm import BranchOutput, Norm
from qserve.model.cache_spec import Cache, CacheSpec, KvFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class NoCache:
    """Cache of a layer that stores nothing."""

    page_tensors: tuple[torch.Tensor, ...] = ()
    slot_tensors: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NoCacheSpec(CacheSpec):
    """Cache spec of a layer that stores nothing."""

    def make(self, num_pages: int, num_slots: int, device: torch.device) -> NoCache:
        return NoCache()


class NoMixer(torch.nn.Module):
    """An MLP with the interface of a mixer."""

    has_kv_scales = None

    def __init__(self, mlp: FeedForward) -> None:
        super().__init__()
        self.mlp = mlp

    def plan(self, rows: int) -> LinearPlan:
        """Return the plan of the first linear, which sets the output form of the norm before it."""
        return self.mlp.plan(rows)

    def products(self) -> Iterator[Product]:
        """Yield the quantized products, each with the operation that consumes its result."""
        yield from self.mlp.products()

    def cache_spec(self, kv_format: KvFormat, page_size: int) -> CacheSpec:
        """Return the spec of an empty cache."""
        return NoCacheSpec()

    def forward(
        self, x_TC: LinearInput, plan: LinearPlan, step: StepInputs, cache: Cache
    ) -> LinearOutput:
        """Return the MLP's result, the input of the next norm."""
        return self.mlp(x_TC, plan)


class NoFeedForward(torch.nn.Module):
    """Placeholder for the MLP of a layer without an MLP."""

    def products(self) -> Iterator[Product]:
        """Yield nothing."""
        yield from ()


class LoneLayer(torch.nn.Module):
    """x + block(norm(x))."""

    def __init__(self, *, norm: Norm, block: Mixer) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = norm, block, NoFeedForward()

    def forward(
        self,
        x_TC: BranchOutput,
        residual_TC: torch.Tensor | None,
        step: StepInputs,
        cache: Cache,
        aux_states: list[torch.Tensor] | None = None,
    ) -> tuple[BranchOutput, torch.Tensor]:
        """Run the layer. Arguments and result are those of Layer.forward."""
        plan = self.attention.plan(x_TC.shape[0])
        x_TC, residual_TC = self.norm(x_TC, residual_TC, plan.input)
        if aux_states is not None:
            aux_states.append(residual_TC)
        return self.attention(x_TC, plan, step, cache), residual_TC
