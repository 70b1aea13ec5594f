"""The indexer of latent attention, which selects the keys that a query sees, and its cache's spec.

DeepSeek Sparse Attention (DeepSeek-V3.2, arXiv 2512.02556). The indexer has keys of its own, one
for each token, and queries of several heads, made from the latents of attention's queries:

    score = sum over heads of w_i relu(q_i k)        w = weights_proj(x)

A query sees the keys with the highest scores, and all keys where there are no more. Layers without
an indexer see those that the last one before them selected.

Legend: T tokens of the step, C hidden size, Q numbers of a query's latent, I heads of the indexer,
D numbers of its keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import layer_norm

from qkernels import ops
from qkernels.gpu.device import shared_bytes, sm_count
from qkernels.latent.config import selected_boundaries
from qkernels.latent.selected.cache import IndexedLatents, SelectedKeys
from qkernels.latent.selected.select import MAX_BYTES
from qkernels.operands.split_k import reduced
from qserve.model.blocks.attention import StepInputs
from qserve.model.blocks.linear import FloatLinear, Linear
from qserve.model.blocks.rotary import Rotary
from qserve.model.cache_spec import CacheSpec, SplitRule, StepLimits, WarmUpShape

KEY_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedLatentsSpec(CacheSpec):
    """The entries of a layer, and the keys of its indexer; every rank holds all of them."""

    latents: CacheSpec
    heads: int  # of attention, on this rank
    page_size: int
    width: int  # D
    dtype: torch.dtype  # of the indexer's keys: that of activations
    most: int  # keys that a query sees

    def make(self, num_pages: int, num_slots: int, device: torch.device) -> IndexedLatents:
        shape = num_pages, self.page_size, self.width
        return IndexedLatents(
            latents=self.latents.make(num_pages, num_slots, device),
            keys_PBD=torch.zeros(shape, dtype=self.dtype, device=device),
        )

    @property
    def split_rule(self) -> SplitRule | None:
        return self.latents.split_rule

    @property
    def bytes_to_come(self) -> int:
        # scores, their order in twice the bytes, and what topk makes of it
        return self.latents.bytes_to_come + 7 * MAX_BYTES

    def check_graphs(self, dtype: torch.dtype, device: str) -> None:
        self.latents.check_graphs(dtype, device)

    def warm_up_shapes(
        self, limits: StepLimits, dtype: torch.dtype, device: torch.device
    ) -> Iterator[WarmUpShape]:
        yield from self.latents.warm_up_shapes(limits, dtype, device)
        yield from selected_boundaries(
            heads=self.heads,
            element_size=dtype.itemsize,
            sm_count=sm_count(device),
            shared_bytes=shared_bytes(device),
            most=self.most,
            max_tokens=limits.max_tokens,
            max_context_len=limits.max_model_len,
        )


class Selection:
    """Keys that the last layer with an indexer selected in this step, for layers after it."""

    def __init__(self) -> None:
        self.keys: SelectedKeys | None = None  # None: all keys


class Indexer(torch.nn.Module):
    """Scores of one layer's keys."""

    def __init__(
        self,
        *,
        wq_b: Linear,  # makes queries [I D] from latents
        wk: Linear,  # makes keys [D]
        weights_proj: FloatLinear,  # float32
        k_norm: tuple[torch.Tensor, torch.Tensor],  # weight and bias [D]
        rotary: Rotary,
        is_interleaved: bool,
        most: int,
    ) -> None:
        super().__init__()
        self.wq_b, self.wk, self.weights_proj = wq_b, wk, weights_proj
        self.register_buffer("k_norm_weight", k_norm[0])
        self.register_buffer("k_norm_bias", k_norm[1])
        self.rotary, self.is_interleaved, self.most = rotary, is_interleaved, most

    @property
    def width(self) -> int:
        """Numbers of a key."""
        return len(self.k_norm_weight)

    def forward(
        self, x_TC: torch.Tensor, latents_TQ: torch.Tensor, step: StepInputs, keys_PBD: torch.Tensor
    ) -> torch.Tensor:
        """Write the tokens' keys, and return their queries [T, I, D]."""
        k_TD = reduced(self.wk(x_TC))
        norm = (self.k_norm_weight, self.k_norm_bias, KEY_NORM_EPS)
        k_TD = layer_norm(k_TD, (self.width,), *norm)
        q_TID = reduced(self.wq_b(latents_TQ)).unflatten(1, (-1, self.width))
        table = (self.rotary.cos_sin, step.positions_T, self.is_interleaved)
        q_TID, k_T1D = ops.apply_rope(q_TID, k_TD[:, None], *table)
        ops.write_index_keys_(k_T1D[:, 0], keys_PBD, step.slots_T)
        return q_TID

    def select(
        self,
        x_TC: torch.Tensor,
        q_TID: torch.Tensor,
        step: StepInputs,
        keys_PBD: torch.Tensor,
    ) -> SelectedKeys:
        """Return the keys of each row with the highest scores."""
        heads = q_TID.shape[1]
        weights_TI = self.weights_proj(x_TC.float()) * (heads * self.width) ** -0.5
        return ops.select_keys(q_TID, weights_TI, keys_PBD, step, most=self.most)
