"""Mixers whose caches have shapes that no mixer of the product has, in plain torch on a CPU.

`LatentMixer` keeps one tensor of 576 values a token, shared by all heads, with the tokens of a page
in the last dimension. `ShiftedMixer` keeps such pages and a state, the input of the last token.
They compute the attention of a Llama model with one KV head of 288 channels, which transformers
computes, too. Run as a module, this file is a rank of such a model.

Legend: P pages, B tokens of a page, T tokens of the step, H heads, D head dim, G groups of values,
V values of a group, N keys of a request, S state slots, C hidden size.
"""

import os
from dataclasses import dataclass

import torch

from qkernels import ops
from qkernels.attention.reference import apply_rope
from qkernels.operands.split_k import reduced
from qserve.engine.distributed import rank_process
from qserve.model.blocks.linear import FLOAT_PLAN, products_of
from qserve.model.cache_spec import CacheSpec
from qserve.model.families import llama

HEAD_DIM = 288
GROUPS, VALUES = 3, 192  # 576 values of a token
SHIFT = 0.5  # of the token before that is added to each


@dataclass(frozen=True, kw_only=True)
class LatentCache:
    latent_PGVB: torch.Tensor
    marks_PB: torch.Tensor  # uint8; an odd number of bytes a page
    last_SC: torch.Tensor | None

    @property
    def page_tensors(self):
        return self.marks_PB, self.latent_PGVB

    @property
    def slot_tensors(self):
        return () if self.last_SC is None else (self.last_SC,)


@dataclass(frozen=True, kw_only=True)
class LatentSpec(CacheSpec):
    page_size: int
    state_size: int  # 0: no state

    def make(self, num_pages, num_slots, device):
        shape = num_pages, GROUPS, VALUES, self.page_size
        states = torch.zeros(num_slots, self.state_size, device=device)
        return LatentCache(
            latent_PGVB=torch.zeros(shape, device=device),
            marks_PB=torch.zeros(
                num_pages, 2 * self.page_size + 1, dtype=torch.uint8, device=device
            ),
            last_SC=states if self.state_size else None,
        )


class LatentMixer(torch.nn.Module):
    has_kv_scales = None
    shifts = False

    def __init__(self, config, weights):
        super().__init__()
        assert (config.num_kv_heads, config.head_dim) == (1, HEAD_DIM)
        self.num_heads, self.hidden_size = config.num_heads, config.hidden_size
        self.rotary = weights.rotary
        self.qkv_proj = weights.linear(config.family.qkv)
        self.o_proj = weights.linear(config.family.o)

    def products(self):
        yield from products_of(self.qkv_proj, None)
        yield from products_of(self.o_proj, "norm")

    def plan(self, rows):
        return FLOAT_PLAN

    def cache_spec(self, kv_format, page_size):
        return LatentSpec(page_size=page_size, state_size=self.hidden_size if self.shifts else 0)

    def forward(self, x_TC, plan, step, cache):
        bounds = step.query_starts_R1.tolist()
        requests = list(zip(bounds, bounds[1:], step.context_lengths_R.tolist(), strict=False))
        if self.shifts:
            x_TC = shifted(x_TC, requests, step.state_slots_R.tolist(), cache.last_SC)
        T, H, D = len(x_TC), self.num_heads, HEAD_DIM
        own = self.qkv_proj.plan(T)
        made = reduced(self.qkv_proj(ops.in_form(x_TC, own.input), own)).view(T, H + 2, D)
        q_THD, k_T1D, v_T1D = made.split([H, 1, 1], 1)
        q_THD, k_T1D = apply_rope(q_THD, k_T1D, self.rotary.cos_sin, step.positions_T)
        latent_TGV = torch.cat([k_T1D, v_T1D], 1).reshape(T, GROUPS, VALUES)
        B = cache.latent_PGVB.shape[-1]
        page_T, offset_T = step.slots_T // B, step.slots_T % B
        cache.latent_PGVB[page_T, :, :, offset_T] = latent_TGV
        cache.marks_PB[page_T, offset_T] = 1
        out_THD = torch.empty_like(q_THD)
        for (start, stop, num_keys), table_X in zip(requests, step.block_tables_RX, strict=True):
            pages = table_X[: -(-num_keys // B)].long()
            assert cache.marks_PB[pages][:, :B].flatten()[:num_keys].all(), "a key was not written"
            values_N = cache.latent_PGVB[pages].permute(0, 3, 1, 2).reshape(-1, 2 * D)[:num_keys]
            keys_ND, values_ND = values_N.split(D, 1)
            scores_HTN = q_THD[start:stop].transpose(0, 1) @ keys_ND.T * D**-0.5
            first = num_keys - (stop - start)
            hidden = torch.arange(num_keys) > torch.arange(first, num_keys)[:, None]
            weights_HTN = scores_HTN.masked_fill(hidden, -torch.inf).softmax(-1)
            out_THD[start:stop] = (weights_HTN @ values_ND).transpose(0, 1)
        output = self.o_proj.plan(T, "norm")
        return self.o_proj(ops.in_form(out_THD.flatten(1), output.input), output)


class ShiftedMixer(LatentMixer):
    shifts = True


def shifted(x_TC, requests, slots, last_SC):
    """x plus a share of the token before, whose newest is kept in the request's slot."""
    out_TC = x_TC.clone()
    for (start, stop, num_keys), slot in zip(requests, slots, strict=True):
        before_TC = torch.zeros_like(x_TC[start:stop])
        before_TC[1:] = x_TC[start : stop - 1]
        if num_keys > stop - start:
            before_TC[0] = last_SC[slot]
        last_SC[slot] = x_TC[stop - 1]
        out_TC[start:stop] += SHIFT * before_TC
    return out_TC


if __name__ == "__main__":
    llama.build_attention = LatentMixer
    os._exit(rank_process.main())
