"""Attention that reads the keys and values of an earlier layer and stores none."""

from dataclasses import dataclass
from typing import Any

from qkernels import ops
from qkernels.operands.forms import LinearInput
from qkernels.operands.split_k import LinearOutput, reduced
from qserve.model.blocks.attention import Attention, StepInputs
from qserve.model.blocks.linear import LinearPlan
from qserve.model.blocks.lone_layer import NoCacheSpec
from qserve.model.cache_spec import KvFormat, SharedCache


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedKvSpec(NoCacheSpec):
    """Cache spec of a layer that reads the pages of another layer."""

    layer: int  # the layer whose pages are read

    @property
    def source(self) -> int | None:
        return self.layer


class SharedAttention(Attention):
    """Attention whose qkv_proj computes only queries."""

    has_kv_scales = None

    def __init__(self, *arguments: Any, source: int, **blocks: Any) -> None:
        """`source`: layer whose keys and values are read. Other arguments are Attention's."""
        super().__init__(*arguments, **blocks)
        self.source = source

    def cache_spec(self, kv_format: KvFormat, page_size: int) -> SharedKvSpec:
        """Return the spec, which names the source layer. Raises InputError for 4-bit pages."""
        kv_format.refuse_int4("a layer reads the keys of another one, which are rotated")
        return SharedKvSpec(layer=self.source)

    @property
    def _qkv_consumer(self) -> None:
        """None, because the norm of queries reads a tensor."""
        return None

    def forward(
        self, x_TC: LinearInput, plan: LinearPlan, step: StepInputs, cache: SharedCache
    ) -> LinearOutput:
        """Attend from the step's tokens [T, C] to the keys that the layer `source` has stored."""
        q_TN = reduced(self.qkv_proj(x_TC, plan))
        spec = ops.NormSpec(weight_C=self.q_norm, eps=self.eps)
        q_PD, _ = ops.norm(q_TN.reshape(-1, self.head_dim), None, spec)
        q = q_PD.view(-1, self.num_heads, self.head_dim)
        cos_sin = self.rotary.cos_sin
        q, _ = ops.apply_rope(q, q[:, :1], cos_sin, step.positions_T, self.rotary.interleaved)
        return self._attended(q, None, step, cache.source)
