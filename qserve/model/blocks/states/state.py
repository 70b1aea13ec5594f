"""StateBlock: base class of mixers with states. StateSpec: their cache spec."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from qkernels.causal_conv.state import StateSlots, StateStep
from qserve.model.blocks.attention import StepInputs
from qserve.model.blocks.linear import Linear, LinearPlan, Product, products_of
from qserve.model.cache_spec import CacheSpec, StepLimits, WarmUpShape


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec(CacheSpec):
    """Cache spec: a state of fixed size in each slot, and no pages."""

    channels: int  # channels of the convolution; 0: no convolution
    taps: int
    memory: tuple[int, int, int] | None  # shape of the heads' states; None: no such states
    dtype: torch.dtype  # of activations
    inputs: int = 0  # width of a row's inputs to the state update, kept for verifications
    most_rows: int = 0  # maximum number of rows of a verification; 0: no speculation

    @property
    def slot_names(self) -> tuple[str, ...]:
        has_memory = self.memory is not None
        names = {
            "convolution": bool(self.channels),
            "memory": has_memory,
            "recent": has_memory and bool(self.most_rows),
        }
        return tuple(name for name, is_there in names.items() if is_there)

    def with_drafts(self, most_rows: int) -> CacheSpec:
        return replace(self, most_rows=most_rows)

    def warm_up_shapes(
        self, limits: StepLimits, dtype: torch.dtype, device: torch.device
    ) -> Iterator[WarmUpShape]:
        if self.most_rows > 1:
            yield 1, self.most_rows, self.most_rows

    def make(self, num_pages: int, num_slots: int, device: torch.device) -> StateSlots:
        return StateSlots.zeros(
            num_slots,
            channels=self.channels,
            taps=self.taps,
            memory=self.memory,
            dtype=self.dtype,
            device=device,
            most_rows=self.most_rows,
            inputs=self.inputs,
        )


class StateBlock(torch.nn.Module):
    """Base class of mixers with states, which run from `in_proj` to `out_proj`."""

    has_kv_scales = None
    in_proj: Linear
    out_proj: Linear

    def products(self) -> Iterator[Product]:
        """Yield the quantized products, each with the operation that consumes its result."""
        yield from products_of(self.in_proj, None)
        yield from products_of(self.out_proj, "norm")

    def plan(self, rows: int) -> LinearPlan:
        """Return the plan of the first linear, which sets the output form of the norm before it."""
        return self.in_proj.plan(rows)


def state_step(step: StepInputs) -> StateStep:
    """Return the rows of a step and the state slot of each request."""
    return StateStep(
        query_starts_R1=step.query_starts_R1,
        context_lengths_R=step.context_lengths_R,
        slots_R=step.state_slots_R,
        max_query_len=step.max_query_len,
        lacking_R=step.lacking_R,
    )
