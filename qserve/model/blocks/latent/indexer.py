"""The indexer of latent attention, which selects the keys that a query attends to.

DeepSeek Sparse Attention (DeepSeek-V3.2, arXiv 2512.02556). The indexer has separate keys, one per
token, and separate queries with several heads, computed from the query latents of attention:

    score = sum over heads of w_i relu(q_i k)        w = weights_proj(x)

A query attends to the `most` keys with the highest scores, or to all keys if there are fewer. A
layer without an indexer uses the keys that the last layer with an indexer selected.

Letters in names:

    T: tokens of the step
    C: hidden size
    Q: width of a query latent
    I: heads of the indexer
    D: width of an indexer key
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import layer_norm

from qkernels import ops
from qkernels.gpu.device import shared_bytes, sm_count
from qkernels.latent.config import selected_boundaries
from qkernels.latent.selected.selected_keys import SelectedKeys
from qkernels.operands.split_k import reduced
from qserve.model.blocks.attention import StepInputs
from qserve.model.blocks.indexed_cache import IndexedSpec
from qserve.model.blocks.linear import FloatLinear, Linear
from qserve.model.blocks.rotary import Rotary
from qserve.model.cache_spec import SplitRule, StepLimits, WarmUpShape

KEY_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedLatentsSpec(IndexedSpec):
    """Cache spec: latent entries and indexer keys of a layer. Every rank holds all of them."""

    heads: int  # attention heads on this rank
    entry: int  # width of an entry of latents

    @property
    def split_rule(self) -> SplitRule | None:
        return self.pages.split_rule

    def selected_shapes(
        self, limits: StepLimits, dtype: torch.dtype, device: torch.device
    ) -> Iterator[WarmUpShape]:
        """Yield shapes of steps that launch every kernel of attention to selected keys."""
        yield from selected_boundaries(
            heads=self.heads,
            element_size=dtype.itemsize,
            sm_count=sm_count(device),
            shared_bytes=shared_bytes(device),
            entry=self.entry,
            most=self.most_keys,
            max_tokens=limits.max_tokens,
            max_context_len=limits.max_model_len,
        )


class Selection:
    """The keys that the last layer with an indexer selected in this step, for later layers."""

    def __init__(self) -> None:
        self.keys: SelectedKeys | None = None  # None: all keys


class Indexer(torch.nn.Module):
    """Scores the keys of one layer and selects those with the highest scores."""

    def __init__(
        self,
        *,
        wq_b: Linear,  # computes queries [I D] from query latents
        wk: Linear,  # computes keys [D]
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
        """Width of a key (D)."""
        return len(self.k_norm_weight)

    def forward(
        self, x_TC: torch.Tensor, latents_TQ: torch.Tensor, step: StepInputs, keys_PBD: torch.Tensor
    ) -> torch.Tensor:
        """Write the tokens' keys to `keys_PBD`. Returns their queries [T, I, D]."""
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
        """Return, for each row, the keys with the highest scores."""
        heads = q_TID.shape[1]
        weights_TI = self.weights_proj(x_TC.float()) * (heads * self.width) ** -0.5
        return ops.select_keys(q_TID, weights_TI, keys_PBD, step, most=self.most)
