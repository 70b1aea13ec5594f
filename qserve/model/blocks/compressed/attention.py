"""Compressed attention (DeepSeek-V4): a sliding window of tokens, and entries of older windows.

A token has one key for all heads, which is also its value. Each head also has a sink. Besides the
last tokens, queries of a layer see

- no other tokens;
- the entries of all windows, if windows are long (heavily compressed attention);
- the entries that an indexer selects, if windows are short (compressed sparse attention).

A value is the key after RoPE, so the result gets the inverse RoPE of the query's position. Groups
of heads have a projection of low rank each, before the output projection. Written in plain torch.

T: rows of the step. C: hidden size. Q: width of a query latent. H: heads. D: width of a head.
I: heads of the indexer. E: entries.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from formats.errors import InputError
from qkernels import ops
from qkernels.operands.forms import LinearInput
from qkernels.operands.split_k import LinearOutput
from qserve.model.blocks.attention import StepInputs
from qserve.model.blocks.compressed.cache import (
    CompressedPages,
    CompressedSpec,
    WindowPages,
    check_page_size,
)
from qserve.model.blocks.compressed.compressor import Compressor, rotated
from qserve.model.blocks.compressed.step_rows import RowsOfStep, Seen, StepRows
from qserve.model.blocks.linear import (
    FLOAT_PLAN,
    FloatLinear,
    Linear,
    LinearPlan,
    Product,
    applied,
    products_of,
)
from qserve.model.blocks.rotary import Rotary
from qserve.model.cache_spec import KvFormat

BYTES_AT_ONCE = 2**28  # float32 entries that are gathered together


class Source(NamedTuple):
    """Entries of all pages, and which of them some rows see."""

    entries_XD: torch.Tensor
    seen: Callable[[slice], Seen]
    most: int  # entries that a row sees


class EntryIndexer(torch.nn.Module):
    """Selects the entries that a row sees, by the rule of latent attention's indexer."""

    def __init__(
        self,
        *,
        compressor: Compressor,
        wq_b: FloatLinear,  # computes queries [I D] from query latents
        weights_proj: FloatLinear,
        rotary: Rotary,
        most: int,
    ) -> None:
        super().__init__()
        self.compressor, self.wq_b, self.weights_proj = compressor, wq_b, weights_proj
        self.rotary, self.most = rotary, most

    def select(
        self,
        x_TC: torch.Tensor,
        latents_TQ: torch.Tensor,
        rows: StepRows,
        pages: WindowPages,
    ) -> Seen:
        """Return the entries with the highest scores, in the order of their windows."""
        spec = self.compressor.spec
        q_TID = self.wq_b(latents_TQ).unflatten(1, (-1, spec.width))
        q_TID = rotated(q_TID, self.rotary, rows.positions_T)
        heads = q_TID.shape[1]
        weights_TI = self.weights_proj(x_TC).float() * (heads * spec.width) ** -0.5
        counts_T = rows.counts(spec.rate)
        found = ops.select_keys(
            q_TID,
            weights_TI,
            pages.entries_PGD,
            rows.step,
            most=self.most,
            last_T=(counts_T - 1).int(),
            num_keys=rows.num_windows(spec.rate),
        )
        number_E = torch.arange(found.slots_TS.shape[1], device=counts_T.device)
        # scores are not numbers while launches are only recorded, and may select anything
        slots_TE = found.slots_TS.long().clamp(0, pages.entries_PGD.shape[:2].numel() - 1)
        return Seen(slots_TE, number_E < counts_T[:, None])


class CompressedAttention(torch.nn.Module):
    """Attention of one layer."""

    has_kv_scales = None

    def __init__(
        self,
        *,
        heads: int,
        window: int,
        eps: float,
        rotary: Rotary,
        qkv_proj: Linear,  # computes query latents, then the token's key
        q_b_proj: Linear,
        o_a: torch.Tensor,  # [groups, rank, H D / groups]
        o_b_proj: Linear,
        q_norm: torch.Tensor,  # [Q]
        kv_norm: torch.Tensor,  # [D]
        sinks: torch.Tensor,  # float32 [H]
        rows_of_step: RowsOfStep,
        compressor: Compressor | None,  # None: queries see the sliding window alone
        indexer: EntryIndexer | None,  # None: queries see all entries
    ) -> None:
        super().__init__()
        self.heads, self.window, self.eps, self.rotary = heads, window, eps, rotary
        self.qkv_proj, self.q_b_proj, self.o_b_proj = qkv_proj, q_b_proj, o_b_proj
        self.register_buffer("o_a", o_a)
        self.register_buffer("q_norm", q_norm)
        self.register_buffer("kv_norm", kv_norm)
        self.register_buffer("sinks", sinks)
        self.compressor, self.indexer, self.rows_of_step = compressor, indexer, rows_of_step

    def cache_spec(self, kv_format: KvFormat, page_size: int) -> CompressedSpec:
        """Return the spec of the layer's pages. Raises InputError for pages of 8 or 4 bits."""
        if kv_format.is_coded:
            raise InputError(
                "--kv-cache-dtype",
                "does not work with compressed attention, whose entries have 16 bits or more",
                "use --kv-cache-dtype auto",
            )
        if self.indexer is not None:
            check_page_size(page_size, self.compressor.spec.rate)
        return CompressedSpec(
            page_size=page_size,
            width=len(self.kv_norm),
            dtype=self.o_a.dtype,
            bytes_at_once=4 * BYTES_AT_ONCE,
            attended=None if self.compressor is None else self.compressor.spec,
            indexed=None if self.indexer is None else self.indexer.compressor.spec,
        )

    def products(self) -> Iterator[Product]:
        """Yield the quantized products, each with the operation that consumes its result."""
        yield from products_of(self.qkv_proj, None)
        yield from products_of(self.q_b_proj, None)
        yield from products_of(self.o_b_proj, None)

    def plan(self, rows: int) -> LinearPlan:
        """Return a plan with a tensor as input, which compressors read, too."""
        return FLOAT_PLAN

    def forward(
        self, x_TC: LinearInput, plan: LinearPlan, step: StepInputs, cache: CompressedPages
    ) -> LinearOutput:
        """Store what later tokens need of the step's tokens; attend to what each row sees."""
        rows = self.rows_of_step.of(step, cache.keys_PBD.shape[1])
        made_TQ = applied(self.qkv_proj, x_TC)
        D = len(self.kv_norm)
        latents_TQ, k_TD = made_TQ.split([made_TQ.shape[1] - D, D], dim=1)
        latents_TQ = _normed(latents_TQ, self.q_norm, self.eps)
        k_T1D = _normed(k_TD, self.kv_norm, self.eps)[:, None]
        k_T1D = rotated(k_T1D, self.rotary, rows.positions_T)
        ops.write_index_keys_(k_T1D[:, 0], cache.keys_PBD, step.slots_T)
        sources = [
            Source(
                cache.keys_PBD.flatten(0, 1),
                lambda some: rows.window(some, self.window),
                self.window,
            )
        ]
        if self.compressor is not None:
            self.compressor.write_(x_TC, step, rows, cache.attended)
            if self.indexer is not None:
                self.indexer.compressor.write_(x_TC, step, rows, cache.indexed)
            sources += self._older(x_TC, latents_TQ, rows, cache)
        if step.on_written is not None:
            step.on_written(cache)
        q_THD = rotated(self._queries(latents_TQ), self.rotary, rows.positions_T)
        out_THD = attend(q_THD, sources, self.sinks, D**-0.5)
        out_THD = rotated(out_THD, self.rotary, rows.positions_T, back=True)
        groups = len(self.o_a)
        by_group = out_THD.flatten(1).unflatten(1, (groups, -1)).transpose(0, 1)
        low_TO = torch.bmm(by_group, self.o_a.transpose(1, 2)).transpose(0, 1).flatten(1)
        output = self.o_b_proj.plan(low_TO.shape[0])
        return self.o_b_proj(ops.in_form(low_TO.contiguous(), output.input), output)

    def _queries(self, latents_TQ: torch.Tensor) -> torch.Tensor:
        """Return the queries [T, H, D], normalized without weights."""
        q_THD = applied(self.q_b_proj, latents_TQ).unflatten(1, (self.heads, -1))
        root_TH1 = (q_THD.float().square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return q_THD * root_TH1.to(q_THD.dtype)

    def _older(
        self,
        x_TC: torch.Tensor,
        latents_TQ: torch.Tensor,
        rows: StepRows,
        cache: CompressedPages,
    ) -> list[Source]:
        """Return the entries of windows that the rows see; none if no row has a whole window."""
        rate = self.compressor.spec.rate
        if not rows.num_windows(rate):
            return []
        entries_XD = cache.attended.entries_PGD.flatten(0, 1)
        if self.indexer is None:
            number = rows.num_windows(rate)
            return [Source(entries_XD, lambda some: rows.entries(some, rate), number)]
        found = self.indexer.select(x_TC, latents_TQ, rows, cache.indexed)

        def selected(some: slice) -> Seen:
            return Seen(found.slots_TE[some], found.seen_TE[some])

        return [Source(entries_XD, selected, found.slots_TE.shape[1])]


def attend(
    q_THD: torch.Tensor, sources: list[Source], sinks_H: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return attention of each row over what it sees, computed in float32: [T, H, D].

    A sink is a score that takes part in the softmax and has the value 0.
    """
    (T, H, D), out_THD = q_THD.shape, torch.empty_like(q_THD)
    most = sum(source.most for source in sources)
    at_once = max(1, BYTES_AT_ONCE // (4 * most * (D + H)))
    for start in range(0, T, at_once):
        some = slice(start, start + at_once)
        seen = [source.seen(some) for source in sources]
        entries_TED = torch.cat(
            [s.entries_XD[each.slots_TE] for s, each in zip(sources, seen, strict=True)], 1
        ).float()
        hidden_TE = ~torch.cat([each.seen_TE for each in seen], 1)
        entries_TED = entries_TED.masked_fill(hidden_TE[..., None], 0)
        scores_THE = q_THD[some].float() @ entries_TED.transpose(1, 2) * scale
        scores_THE = scores_THE.masked_fill(hidden_TE[:, None], -torch.inf)
        sinks_TH1 = sinks_H[None, :, None].expand(len(scores_THE), -1, 1)
        shares_THE = torch.cat([scores_THE, sinks_TH1], -1).softmax(-1)[..., :-1]
        out_THD[some] = (shares_THE @ entries_TED).to(q_THD.dtype)
    return out_THD


def _normed(x_TC: torch.Tensor, weight_C: torch.Tensor, eps: float) -> torch.Tensor:
    return ops.norm(x_TC.contiguous(), None, ops.NormSpec(weight_C=weight_C, eps=eps))[0]
