"""Speculator: the device's side of speculation: the drafter, its pages, and what requests await.

It holds, for each running request, its newest token, its drafts, and how many drafts of its last
verify came to nothing. The host plans a step as if all of them had come true; the step itself
(speculative_step.py) puts the tokens in their places and moves positions back by those that did
not. Legend: N rows of the tables, K drafts.
"""

from dataclasses import replace

import torch

from qkernels.attention.cache import PagedKv
from qkernels.drafts.chunks import DraftTables
from qkernels.gpu.launch import launches_nothing
from qserve.engine.batch import Batch
from qserve.engine.cuda_graphs import StepGraphs
from qserve.engine.step_buffers import GraphKey
from qserve.engine.step_input import StepInput
from qserve.engine.step_plan import Drafting
from qserve.engine.transfer import all_to_device, to_device
from qserve.model.kv_format import KvFormat, new_cache
from qserve.speculation.acceptance import synthetic_shares
from qserve.speculation.config import SpeculativeConfig
from qserve.speculation.drafter import DeviceDrafter
from qserve.speculation.graphs import SpeculativeGraphs
from qserve.speculation.speculative_step import Rows, SpeculativeStep, State, starts


class Speculator:
    """Of one worker."""

    def __init__(
        self,
        config: SpeculativeConfig,
        drafter: DeviceDrafter | None,
        *,
        vocab_size: int,
        max_num_seqs: int,
        max_model_len: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        self.drafter = drafter
        shares = None
        if drafter is not None and config.draws_drafts:
            shape = max_num_seqs + 1, config.most_tokens, vocab_size
            shares = torch.zeros(shape, dtype=torch.float32, device=device)
        self.device = device
        self.state = State(
            config=config,
            drafter=drafter,
            # the last row is for padding
            tables=DraftTables(
                tokens_NK1=torch.zeros(
                    max_num_seqs + 1, 1 + config.most_tokens, dtype=torch.int64, device=device
                ),
                refused_N=torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device),
            ),
            max_model_len=max_model_len,
            page_size=page_size,
            draft_shares=shares,
            synthetic_shares_K=synthetic_shares(config, device),
        )
        self.graphs: SpeculativeGraphs | None = None

    @property
    def taps(self) -> tuple[int, ...]:
        return () if self.drafter is None else self.drafter.taps

    @property
    def drafting(self) -> Drafting:
        """The most that a step does for drafts."""
        has_drafter = self.drafter is not None
        return Drafting(self.state.config.most_tokens if has_drafter else 0, has_drafter)

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Rows that a request that decodes may have."""
        return tuple(1 + count for count in (0, *self.state.config.depths))

    @property
    def max_rows(self) -> int:
        """Of all requests of a step, where they have drafts."""
        return self.state.config.max_rows

    @property
    def looks_ahead(self) -> bool:
        return self.drafter is not None and self.drafter.looks_ahead

    @property
    def caches(self) -> list[PagedKv]:
        """Of the drafter's layers."""
        return self.state.caches

    def bytes_per_page(self, kv_format: KvFormat) -> int:
        """Keys and values of one page, the drafter's layers."""
        attentions = () if self.drafter is None else self.drafter.attentions
        kv_format = replace(kv_format, static_scales=False)
        return sum(
            2 * self.state.page_size * each.num_kv_heads * kv_format.bytes_per_head(each.head_dim)
            for each in attentions
        )

    def allocate_pages(self, num_pages: int, kv_format: KvFormat) -> None:
        """Make the drafter's pages, of the same numbers as the model's."""
        attentions = () if self.drafter is None else self.drafter.attentions
        kv_format = replace(kv_format, static_scales=False)  # which the model's checkpoint has
        size = self.state.page_size
        self.state.caches[:] = [
            new_cache(
                each, kv_format, (num_pages, size, each.num_kv_heads, each.head_dim), self.device
            )
            for each in attentions
        ]

    def begin(self, step: StepInput, batch: Batch, key: GraphKey | None) -> SpeculativeStep:
        """What goes with a step. `key`: of the graph that it runs in."""
        rows = step.draft_rows
        if self.graphs is not None and key is not None and rows.is_uniform and not key.is_chunk:
            return self.graphs.begin(key, step, batch)
        found = all_to_device([getattr(rows, name) for name in Rows.ARRAYS], self.device)
        found = Rows(
            **dict(zip(Rows.ARRAYS, found, strict=True)),
            logits_rows_S=to_device(step.logits_rows_S, self.device),
            starts_D1=starts(len(rows.chunk_D), self.device),
            most_sampled=rows.most_sampled,
            # while launches are recorded a step stands for those that have some
            has_unknown=launches_nothing() or bool(rows.known_R.sum() < step.num_tokens),
            has_pending=not rows.known_R.all(),
        )
        return SpeculativeStep(self.state, found, rows, batch)

    def use_graphs(self, graphs: StepGraphs) -> None:
        """Run what goes with steps in graphs, too."""
        if self.drafter is not None and not self.state.config.judges_by_row:
            self.graphs = SpeculativeGraphs(self.state, graphs, self.device)

    @property
    def can_capture_next(self) -> bool:
        """Whether a graph is left to capture in an idle moment."""
        return self.graphs is not None and self.graphs.can_capture_next

    def capture_next(self) -> bool:
        """Capture one more. Returns False where there is none left."""
        return self.graphs is not None and self.graphs.capture_next()
