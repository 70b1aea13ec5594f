"""SpeculativeGraphs: what goes with decodes and verifies, as CUDA graphs beside the model's own.

A step whose requests have equally many rows runs as: a graph that fills tokens and positions in,
the model's graph (engine/cuda_graphs.py), the sampler, and a graph that judges the drafts and runs
the drafter. Legend as in speculative_step.py; what the step lacks of its graph's size is padding.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from qkernels.sampling.settings import Samples, SampleSettings
from qkernels.sampling.words import NUM_WORDS
from qserve.engine.batch import Batch
from qserve.engine.capture import capture
from qserve.engine.draft_rows import DraftRows
from qserve.engine.step_buffers import GraphKey
from qserve.engine.step_outputs import StepOutputs
from qserve.engine.transfer import HostCopy, on_host
from qserve.parallel.pipeline import Pipeline
from qserve.speculation.speculative_step import (
    DrawRows,
    Rows,
    SpeculativeStep,
    State,
    fill_,
    propose,
    settle_,
)

# What differs between the steps of one graph; all other rows follow from its size.
CHANGING = ("rows_R", "is_pending_R", "capacity_R")


class Captured:
    """Work that is launched at once. Where there is no CUDA it runs each time: for tests."""

    def __init__(self, work: Callable[[], object], device: torch.device, pool: object) -> None:
        self._work, self._graph = work, None
        self.result = work()  # compiles kernels, which a capture may not
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._graph = torch.cuda.CUDAGraph()
            with capture(self._graph, pool):
                self.result = work()

    def run(self) -> object:
        """The result, valid until the next run."""
        if self._graph is None:
            self.result = self._work()
        else:
            self._graph.replay()
        return self.result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """Of one of the model's graphs."""

    batch: Batch
    rows: Rows
    changing: torch.Tensor  # int64 [3, R]: the places of CHANGING
    tokens_S: torch.Tensor
    words_SP: torch.Tensor
    fill: Captured
    behind: dict[tuple[int, bool, bool], Captured]  # by drafts, whether the drafter runs, filters


class SpeculativeGraphs:
    """By the keys of the model's graphs."""

    def __init__(
        self, state: State, outputs: Callable[[GraphKey], StepOutputs], device: torch.device
    ) -> None:
        """`outputs`: where the model's graph of a key leaves its results."""
        self.state, self._outputs, self.device = state, outputs, device
        self._entries: dict[GraphKey, _Entry] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def begin(self, key: GraphKey, rows: DraftRows, batch: Batch) -> "GraphedStep":
        """Copies what a step tells of drafts to where its graphs read it."""
        entry = self._entries.get(key)
        if entry is None:
            kept = batch.token_ids_T.clone(), batch.positions_T.clone(), batch.slots_T.clone()
            lengths_R = batch.context_lengths_R.clone()
            entry = self._entries[key] = self._make(key, batch)
            # capturing ran it, for a step of nothing
            for place, value in zip(
                (batch.token_ids_T, batch.positions_T, batch.slots_T), kept, strict=True
            ):
                place.copy_(value)
            batch.context_lengths_R.copy_(lengths_R)
        packed = np.zeros((len(CHANGING), key.num_requests), np.int64)
        packed[0] = len(self.state.refused_N) - 1
        for line, name in zip(packed, CHANGING, strict=True):
            array = getattr(rows, name)
            line[: len(array)] = array
        entry.changing.copy_(on_host(packed, self.device), non_blocking=True)
        return GraphedStep(self, key, entry, rows)

    def _make(self, key: GraphKey, batch: Batch) -> _Entry:
        R, T = key.num_requests, key.num_tokens
        count, device = T // R, self.device
        changing = torch.zeros(len(CHANGING), R, dtype=torch.int64, device=device)
        changing[0] = len(self.state.refused_N) - 1
        request_R, row_T = torch.arange(R, device=device), torch.arange(T, device=device)
        rows = Rows(
            **dict(zip(CHANGING, changing, strict=True)),
            chunk_of_T=row_T // count,
            chunk_of_S=row_T // count,
            place_M=row_T,
            chunk_M=row_T // count,
            column_M=row_T % count,
            chunk_D=request_R,
            first_D=request_R * count,
            count_D=torch.full_like(request_R, count),
            next_R=torch.zeros_like(request_R),
            logits_rows_S=row_T,
            most_sampled=count,
            has_pending=True,
            are_all=True,
        )
        return _Entry(
            batch=batch,
            rows=rows,
            changing=changing,
            tokens_S=torch.zeros(T, dtype=torch.int64, device=device),
            words_SP=torch.zeros(T, NUM_WORDS, dtype=torch.int64, device=device),
            fill=Captured(lambda: fill_(self.state, rows, batch), device, self._pool),
            behind={},
        )

    def behind(
        self, key: GraphKey, entry: _Entry, num_drafts: int, runs_drafter: bool, any_filter: bool
    ) -> Captured:
        """The graph that follows the sampler; its result: (accepted [D], drafts [D, K] or None)."""
        sort = num_drafts, runs_drafter, any_filter
        if sort not in entry.behind:
            tokens = entry.tokens_S.clone()
            settings = SampleSettings(
                words_SP=entry.words_SP,
                bias_E=entry.words_SP.new_zeros(0),
                any_random=True,
                any_filter=any_filter,
                num_logprobs=-1,
            )

            def work() -> tuple[torch.Tensor, torch.Tensor | None]:
                accepted_D = settle_(self.state, entry.rows, entry.batch, entry.tokens_S)
                if not runs_drafter:
                    return accepted_D, None
                drafts_DK = propose(
                    *(self.state, entry.rows, entry.batch, self._outputs(key), num_drafts),
                    *(entry.tokens_S, accepted_D, settings),
                )
                return accepted_D, drafts_DK

            # Made in the midst of a step, whose tables it must leave as they are.
            tables = self.state.tokens_NK1, self.state.refused_N
            kept = [table.clone() for table in tables]
            entry.behind[sort] = Captured(work, self.device, self._pool)
            for table, value in zip(tables, kept, strict=True):
                table.copy_(value)
            entry.tokens_S.copy_(tokens)
        return entry.behind[sort]


class GraphedStep(SpeculativeStep):
    """One that runs in graphs."""

    def __init__(
        self, graphs: SpeculativeGraphs, key: GraphKey, entry: _Entry, rows: DraftRows
    ) -> None:
        super().__init__(graphs.state, entry.rows, rows, entry.batch)
        self._graphs, self._key, self._entry = graphs, key, entry
        self._drafts_DK: torch.Tensor | None = None

    def fill_(self, pipeline: Pipeline | None = None) -> None:
        """As SpeculativeStep. There are no graphs where there are stages."""
        assert pipeline is None
        self.back_R = self._entry.fill.run()

    def draw(
        self,
        logits_SV: torch.Tensor,
        settings: SampleSettings,
        draw_rows: DrawRows,
        history_WV: torch.Tensor | None,
    ) -> Samples:
        """Also proposes: one graph does both."""
        settings, entry = self._corrected(settings), self._entry
        samples = self._draw(logits_SV, settings, draw_rows)
        count = len(samples.tokens_S)
        entry.tokens_S[:count] = samples.tokens_S
        entry.words_SP[:count] = settings.words_SP
        rows = self.rows
        behind = self._graphs.behind(
            self._key, entry, rows.num_drafts, rows.runs_drafter, settings.any_filter
        )
        accepted_D, self._drafts_DK = behind.run()
        if rows.verifies:
            self.num_emitted = HostCopy(accepted_D[: len(rows.chunk_D)] + 1)
        return samples._replace(tokens_S=entry.tokens_S[:count])

    def propose(self, outputs: StepOutputs) -> HostCopy | None:
        if self._drafts_DK is None or not self.rows.tells_drafts:
            return None
        return HostCopy(self._drafts_DK[: len(self.rows.chunk_D)])
