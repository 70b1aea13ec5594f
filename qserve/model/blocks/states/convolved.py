"""Inkling's layer: attention with biases, and four short convolutions over time.

Keys, values, and the outputs of attention and of the feed-forward are convolved; each convolution
adds its input. The score of a key is scaled q k + b(distance), where each head of a query has its
own b: a mixture of profiles over distances. b is 0 from the length of the profiles on.

Letters in names:

    T: tokens of the step      X: distances of the profiles
    C: hidden size             F: profiles
    H: heads                   L: keys
    J: KV heads                W: taps
    D: channels of a head
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from qkernels import ops
from qkernels.attention.cache import PagedKv
from qkernels.causal_conv.state import StateSlots
from qkernels.operands.forms import LinearInput
from qkernels.operands.split_k import LinearOutput, reduced
from qserve.model.blocks.attention import Attention, StepInputs, announce_written
from qserve.model.blocks.layer import Layer
from qserve.model.blocks.linear import FLOAT_PLAN, Linear, LinearPlan, Product, products_of
from qserve.model.blocks.norm import BranchOutput
from qserve.model.blocks.states.state import StateSpec, state_step
from qserve.model.cache_spec import CacheSpec, KvFormat, StepLimits, WarmUpShape

# what is convolved, in the order of the rows of the convolutions' weights
Part = Literal["k", "v", "attention", "mlp"]
PARTS: tuple[Part, ...] = ("k", "v", "attention", "mlp")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolvedCache:
    """The pages of a layer's attention and the states of its convolutions."""

    pages: PagedKv
    states: Sequence[StateSlots]  # of each of PARTS

    @property
    def page_tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors of the pages."""
        return self.pages.page_tensors

    @property
    def slot_tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors of all convolutions."""
        return tuple(tensor for each in self.states for tensor in each.slot_tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolvedSpec(CacheSpec):
    """The cache specs of a layer's attention and of its convolutions."""

    pages: CacheSpec
    states: tuple[StateSpec, ...]

    def with_drafts(self, most_rows: int) -> CacheSpec:
        return replace(
            self,
            pages=self.pages.with_drafts(most_rows),
            states=tuple(each.with_drafts(most_rows) for each in self.states),
        )

    def make(self, num_pages: int, num_slots: int, device: torch.device) -> ConvolvedCache:
        return ConvolvedCache(
            pages=self.pages.make(num_pages, num_slots, device),
            states=[each.make(num_pages, num_slots, device) for each in self.states],
        )

    def check_graphs(self, dtype: torch.dtype, device: str) -> None:
        """Do nothing: the decoder states that its steps cannot run in graphs."""

    def warm_up_shapes(
        self, limits: StepLimits, dtype: torch.dtype, device: torch.device
    ) -> Iterator[WarmUpShape]:
        for spec in (self.pages, *self.states[:1]):
            yield from spec.warm_up_shapes(limits, dtype, device)


class RelativeAttention(Attention):
    """Attention of one layer, with biases and with convolved keys and values, in plain torch."""

    def __init__(
        self,
        *arguments: Any,
        factors: Linear,  # computes the factors [H F] of the profiles
        profiles_FX: torch.Tensor,  # float32
        conv_weight: torch.Tensor,  # float32 [channels of all PARTS, W]
        hidden_size: int,
        dtype: torch.dtype,  # of activations
        # Scores of a query at position p, and its biases, are multiplied by
        # 1 + alpha max(0, log((p + 1) / floor)). None: by 1.
        growth: tuple[int, float] | None = None,
        **blocks: Any,
    ) -> None:
        """Other arguments are Attention's."""
        super().__init__(*arguments, **blocks)
        self.factors, self.dtype, self.growth = factors, dtype, growth
        of_keys = self.num_kv_heads * self.head_dim
        self.widths = (of_keys, of_keys, hidden_size, hidden_size)  # channels of each of PARTS
        self.register_buffer("profiles", profiles_FX)
        self.register_buffer("conv_weight", conv_weight)

    def cache_spec(self, kv_format: KvFormat, page_size: int) -> ConvolvedSpec:
        """Return the specs of pages and of convolutions. Raises InputError for 4-bit pages."""
        kv_format.refuse_int4("its attention has biases, which plain torch adds")
        states = tuple(
            StateSpec(channels=width, taps=self.conv_weight.shape[1], memory=None, dtype=self.dtype)
            for width in self.widths
        )
        return ConvolvedSpec(pages=super().cache_spec(kv_format, page_size), states=states)

    def products(self) -> Iterator[Product]:
        """Yield the quantized products, each with the operation that consumes its result."""
        yield from products_of(self.qkv_proj, None)
        yield from products_of(self.factors, None)
        yield from products_of(self.o_proj, None)

    def plan(self, rows: int) -> LinearPlan:
        """Return a plan with a tensor as input, because two linears read the same norm."""
        return FLOAT_PLAN

    def convolved(
        self, x_TC: torch.Tensor, part: Part, step: StepInputs, cache: ConvolvedCache
    ) -> torch.Tensor:
        """Return x plus its convolution, and keep the newest inputs."""
        place = PARTS.index(part)
        weight_CW = self.conv_weight.split(self.widths)[place]
        ones_TC = torch.ones_like(x_TC)
        made_TC = ops.short_conv_(
            torch.cat([ones_TC, ones_TC, x_TC], 1),
            weight_CW,
            None,
            cache.states[place].conv_PCL,
            state_step(step),
        )
        return x_TC + made_TC

    def forward(
        self, x_TC: LinearInput, plan: LinearPlan, step: StepInputs, cache: ConvolvedCache
    ) -> torch.Tensor:
        """Store the keys of the step's tokens, and attend to all tokens of their requests."""
        assert isinstance(x_TC, torch.Tensor) and step.folded_rows == 1
        rows = len(x_TC)
        factors_THF = reduced(self.factors(x_TC)).unflatten(1, (self.num_heads, -1))
        wanted = self.qkv_proj.plan(rows)
        qkv = reduced(self.qkv_proj(ops.in_form(x_TC, wanted.input), wanted))
        of_keys = self.num_kv_heads * self.head_dim
        q, k, v = qkv.split((qkv.shape[1] - 2 * of_keys, of_keys, of_keys), 1)
        k, v = self.convolved(k, "k", step, cache), self.convolved(v, "v", step, cache)
        q_THD, k_TJD, v_TJD = (x.unflatten(1, (-1, self.head_dim)) for x in (q, k, v))
        q_THD = ops.rope_write_kv_(
            q_THD,
            k_TJD,
            v_TJD,
            self.rotary.cos_sin[:, :0],  # norms and writes, without rope
            step.positions_T,
            cache.pages,
            step.slots_T,
            q_norm_D=self.q_norm,
            k_norm_D=self.k_norm,
            eps=self.eps,
            inputs_ready=True,
        )
        announce_written(step, cache.pages)
        biases_THX = factors_THF.float() @ self.profiles
        out_THD = self._over_pages(q_THD, biases_THX, step, cache.pages)
        output = self.o_proj.plan(rows)
        return reduced(self.o_proj(ops.in_form(out_THD.flatten(1), output.input), output))

    def _over_pages(
        self, q_THD: torch.Tensor, biases_THX: torch.Tensor, step: StepInputs, pages: PagedKv
    ) -> torch.Tensor:
        """Return attention [T, H, D] over each request's keys."""
        out_THD = torch.zeros_like(q_THD)
        starts, lengths = step.query_starts_R1.tolist(), step.context_lengths_R.tolist()
        for r, length in enumerate(lengths):
            rows = slice(starts[r], starts[r + 1])
            count = rows.stop - rows.start
            if count:
                first = 0 if self.window is None else max(0, length - count - self.window + 1)
                keys_L = torch.arange(first, length, device=q_THD.device)
                out_THD[rows] = self._attended_rows(
                    q_THD[rows].float(),
                    biases_THX[rows],
                    torch.arange(length - count, length, device=q_THD.device),
                    keys_L,
                    *_keys_and_values(pages, step.block_tables_RX[r], keys_L),
                ).to(out_THD.dtype)
        return out_THD

    def _attended_rows(
        self,
        q_THD: torch.Tensor,
        biases_THX: torch.Tensor,
        positions_T: torch.Tensor,
        keys_L: torch.Tensor,
        k_LJD: torch.Tensor,
        v_LJD: torch.Tensor,
    ) -> torch.Tensor:
        """Return attention [T, H, D] of the rows of one request, in float32."""
        distances_TL = positions_T[:, None] - keys_L
        q_TJQD = q_THD.unflatten(1, (self.num_kv_heads, -1))
        scores_TJQL = torch.einsum("tjqd,ljd->tjql", q_TJQD, k_LJD) * self.scale
        extent = biases_THX.shape[2]
        index_THL = distances_TL.clamp(0, extent - 1)[:, None].expand(-1, self.num_heads, -1)
        biases_THL = biases_THX.gather(2, index_THL)
        biases_THL = biases_THL.masked_fill((distances_TL >= extent)[:, None], 0.0)
        scores_THL = scores_TJQL.flatten(1, 2) + biases_THL
        if self.growth is not None:
            floor, alpha = self.growth
            growth_T = 1 + alpha * ((positions_T + 1) / floor).clamp(min=1.0).log()
            scores_THL = scores_THL * growth_T[:, None, None]
        hidden_TL = distances_TL < 0
        if self.window is not None:
            hidden_TL |= distances_TL >= self.window
        scores_THL = scores_THL.masked_fill(hidden_TL[:, None], float("-inf"))
        weights_TJQL = scores_THL.softmax(-1).unflatten(1, (self.num_kv_heads, -1))
        return torch.einsum("tjql,ljd->tjqd", weights_TJQL, v_LJD).flatten(1, 2)


def _keys_and_values(
    pages: PagedKv, table_X: torch.Tensor, keys_L: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values [L, J, D] of one request, in float32."""
    index = table_X[keys_L // pages.page_size].long(), keys_L % pages.page_size
    k_LJD, v_LJD = pages.k_pages[index].float(), pages.v_pages[index].float()
    if pages.k_scales is None:
        return k_LJD, v_LJD
    return k_LJD * pages.k_scales[index][..., None], v_LJD * pages.v_scales[index][..., None]


class ConvolvedLayer(Layer):
    """x + conv(attention(norm(x))), then x + conv(mlp(norm(x)) * mlp_factor)."""

    attention: RelativeAttention

    def __init__(self, *, mlp_factor: torch.Tensor | None = None, **blocks: Any) -> None:
        """`blocks`: arguments of Layer."""
        super().__init__(**blocks)
        self.register_buffer("mlp_factor", mlp_factor)

    def forward(
        self,
        x_TC: BranchOutput,
        residual_TC: torch.Tensor | None,
        step: StepInputs,
        cache: ConvolvedCache,
        aux_states: list[torch.Tensor] | None = None,
    ) -> tuple[BranchOutput, torch.Tensor]:
        """Run the layer. Arguments and result are those of Layer.forward."""
        plan = self.attention.plan(x_TC.shape[0])
        x_TC, residual_TC = self.attention_norm(x_TC, residual_TC, plan.input)
        if aux_states is not None:
            aux_states.append(residual_TC)
        made_TC = self.attention(x_TC, plan, step, cache)
        made_TC = self.attention.convolved(made_TC, "attention", step, cache)
        plan = self.mlp.plan(made_TC.shape[0])
        x_TC, residual_TC = self.mlp_norm(made_TC, residual_TC, plan.input)
        made: LinearOutput = self.mlp(x_TC, plan)
        made_TC = reduced(made)
        if self.mlp_factor is not None:
            made_TC = (made_TC * self.mlp_factor).to(made_TC.dtype)
        return self.attention.convolved(made_TC, "mlp", step, cache), residual_TC
