"""SpeculativeGraphs: what goes with decodes and verifies, as CUDA graphs beside the model's own.

A step whose requests have equally many rows runs as: a graph that fills tokens and positions in,
the model's graph (engine/cuda_graphs.py), and a graph that draws, judges the drafts and runs the
drafter. What needs more than its words to be drawn is drawn between the two. Legend as in
speculative_step.py; what the step lacks of its graph's size is padding.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from qkernels import ops
from qkernels.drafts.chunks import Settled
from qkernels.sampling.settings import Samples, SampleSettings
from qkernels.sampling.words import NUM_WORDS, SampleRow, pack_row
from qserve.engine.batch import Batch
from qserve.engine.capture import capture
from qserve.engine.cuda_graphs import StepGraphs, ran_out_of_memory
from qserve.engine.draft_rows import DraftRows
from qserve.engine.step_buffers import GraphKey
from qserve.engine.step_input import StepInput
from qserve.engine.step_outputs import StepOutputs
from qserve.engine.transfer import HostCopy, PinnedCopies, to_device
from qserve.parallel.pipeline import Pipeline
from qserve.speculation.speculative_step import (
    DrawRows,
    Rows,
    SpeculativeStep,
    State,
    propose,
    settle_,
    starts,
)

logger = logging.getLogger(__name__)

# What differs between the steps of one graph; all other rows follow from its size.
CHANGING = ("rows_R", "known_R", "capacity_R")
PADDING_WORDS = np.array((*pack_row(SampleRow()), 0, 0), np.int64)
# Rows with a filter need room for all of the vocabulary, which each graph keeps.
MOST_FILTERED = 32
RUNS_BEFORE_CAPTURE = 2


class Captured:
    """Work that is launched at once: from its third run on, since a capture takes as long as ten.

    Where there is no CUDA it runs each time: for tests.
    """

    def __init__(self, work: Callable[[], object], device: torch.device, pool: object) -> None:
        self._work, self._device, self._pool = work, device, pool
        self._graph: torch.cuda.CUDAGraph | None = None
        self._num_runs, self._result = 0, None

    @property
    def is_captured(self) -> bool:
        return self._graph is not None

    def run(self) -> object:
        """The result, valid until the next run."""
        is_due = self._num_runs >= RUNS_BEFORE_CAPTURE and self._device.type == "cuda"
        if is_due and self._graph is None:
            self.capture()
        if self._graph is not None:
            self._graph.replay()
        else:
            self._num_runs += 1
            self._result = self._work()
        return self._result

    def capture(self) -> None:
        """Be ready to launch it at once. It has run before: a capture cannot compile kernels."""
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with capture(graph, self._pool):
            self._result = self._work()
        self._graph = graph


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """Of one of the model's graphs."""

    batch: Batch
    rows: Rows
    changing: torch.Tensor  # int64: the places of CHANGING, then of words_SP
    words_SP: torch.Tensor  # positions corrected, once `fill` has run
    tokens_S: torch.Tensor  # where they are drawn outside
    fill: Captured
    behind: dict["_Sort", Captured]


class _Sort(NamedTuple):
    """What the graphs behind one model graph differ in."""

    num_drafts: int
    runs_drafter: bool
    any_filter: bool
    draws: bool  # it begins with the sampler


class SpeculativeGraphs:
    """By the keys of the model's graphs."""

    def __init__(self, state: State, graphs: StepGraphs, device: torch.device) -> None:
        """`graphs`: the model's."""
        self.state, self._graphs, self.device = state, graphs, device
        self._copies = PinnedCopies(device)
        self._entries: dict[GraphKey, _Entry] = {}
        self._is_full = False
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def begin(self, key: GraphKey, step: StepInput, batch: Batch) -> "GraphedStep":
        """Copies what a step tells of drafts to where its graphs read it."""
        entry = self._entry(key, batch)
        self._copies.send_(self._packed(key, step), entry.changing)
        return GraphedStep(self, key, entry, step.draft_rows)

    @property
    def can_capture_next(self) -> bool:
        return next(self._missing(), None) is not None

    def capture_next(self) -> bool:
        """Capture a graph that will be needed, in an idle moment. Returns False: there is none.

        Where the device has no memory for it, there will be no more.
        """
        found = next(self._missing(), None)
        if found is None:
            return False
        key, sort = found
        entry = self._entry(key, self._graphs.padded(key))
        self._copies.send_(self._packed(key), entry.changing)
        try:
            self._graphs.replay(key)  # whose results are read below
            for captured in (entry.fill, self.behind(key, entry, sort)):
                if not captured.is_captured:
                    captured.run()
                    captured.capture()
        except (RuntimeError, MemoryError) as error:
            if self._graphs.in_step or not ran_out_of_memory(error):
                raise
            self._is_full = True
            logger.warning("No memory for more CUDA graphs of drafts; what lacks one runs without")
            return False
        return True

    def _missing(self) -> Iterator[tuple[GraphKey, "_Sort"]]:
        """What steps need once all requests have as many drafts as are drafted."""
        if self._is_full:
            return
        for key in self._graphs.decode_keys:
            entry = self._entries.get(key)
            for any_filter in (False, True):
                sort = _Sort(
                    num_drafts=key.count - 1,
                    runs_drafter=key.count > 1,
                    any_filter=any_filter,
                    draws=not any_filter or key.num_tokens <= MOST_FILTERED,
                )
                captured = None if entry is None else entry.behind.get(sort)
                if captured is None or not captured.is_captured:
                    yield key, sort

    def fetch(self, words: torch.Tensor) -> HostCopy:
        """Copy numbers of a step to the host."""
        return self._copies.fetch(words)

    def _packed(self, key: GraphKey, step: StepInput | None = None) -> np.ndarray:
        """All of `changing`, for a step; None: for one of nothing."""
        lines = np.empty((len(CHANGING), _aligned(key.num_requests)), np.int64)
        words_SP = np.empty((key.num_tokens, NUM_WORDS), np.int64)
        num_chunks = num_rows = 0
        if step is not None:
            num_chunks, num_rows = step.num_requests, step.num_sampled
            words_SP[:num_rows] = step.sample_words_SP
        words_SP[num_rows:] = PADDING_WORDS
        # the tables' last row is nobody's
        padding = len(self.state.tables.refused_N) - 1, 1, 0
        for line, name, value in zip(lines, CHANGING, padding, strict=True):
            if step is not None:
                line[:num_chunks] = getattr(step.draft_rows, name)
            line[num_chunks:] = value
        return np.concatenate([lines.reshape(-1), words_SP.reshape(-1)])

    def _entry(self, key: GraphKey, batch: Batch) -> _Entry:
        if key not in self._entries:
            self._entries[key] = self._make(key, batch)
        return self._entries[key]

    def _make(self, key: GraphKey, batch: Batch) -> _Entry:
        R, T = key.num_requests, key.num_tokens
        count, device = T // R, self.device
        changing = to_device(self._packed(key), device)
        num_words = T * NUM_WORDS
        lines = changing[:-num_words].view(len(CHANGING), -1)[:, :R]
        words_SP = changing[-num_words:].view(T, NUM_WORDS)
        request_R, row_T = torch.arange(R, device=device), torch.arange(T, device=device)
        rows = Rows(
            **dict(zip(CHANGING, lines, strict=True)),
            chunk_of_S=row_T // count,
            place_R=request_R,
            chunk_D=request_R,
            first_D=request_R * count,
            count_D=torch.full_like(request_R, count),
            next_R=torch.zeros_like(request_R),
            logits_rows_S=row_T,
            starts_D1=starts(R, device),
            most_sampled=count,
        )
        chunks, page_size = rows.chunks(batch), self.state.page_size

        def fill() -> torch.Tensor:
            tables = self.state.tables
            return ops.fill_drafts_(chunks, tables, page_size=page_size, words_TP=words_SP)

        return _Entry(
            batch=batch,
            rows=rows,
            changing=changing,
            words_SP=words_SP,
            tokens_S=torch.zeros(T, dtype=torch.int64, device=device),
            fill=Captured(fill, device, self._pool),
            behind={},
        )

    def behind(self, key: GraphKey, entry: _Entry, sort: _Sort) -> Captured:
        """The graph that follows the model's, or the sampler: (Settled, drafts [D, K] or None)."""
        if sort not in entry.behind:
            settings = SampleSettings(
                words_SP=entry.words_SP,
                bias_E=entry.words_SP.new_zeros(0),
                any_random=True,
                any_filter=sort.any_filter,
                num_logprobs=-1,
            )
            rows, batch = entry.rows, entry.batch
            chunks = rows.chunks(batch)

            def work() -> tuple[Settled, torch.Tensor | None]:
                tokens_S = entry.tokens_S
                if sort.draws:
                    tokens_S = ops.sample_(
                        self._graphs.outputs(key).logits_SV, settings, None
                    ).tokens_S
                settled = settle_(self.state, chunks, sort.num_drafts, tokens_S, settings)
                if not sort.runs_drafter:
                    return settled, None
                drafts_DK = propose(
                    *(self.state, rows, batch, self._graphs.outputs(key), settled, sort.num_drafts),
                    settings,
                )
                return settled, drafts_DK

            entry.behind[sort] = Captured(work, self.device, self._pool)
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
        """Also proposes, and draws where that needs nothing of the host: one graph does all."""
        entry, rows, count = self._entry, self.rows, len(settings.words_SP)
        sort = _Sort(
            num_drafts=rows.num_drafts,
            runs_drafter=rows.runs_drafter,
            any_filter=settings.any_filter,
            # masks that came since `begin` are in bias_E
            draws=not (settings.any_history or settings.num_logprobs >= 0 or len(settings.bias_E))
            and (not settings.any_filter or self._key.num_tokens <= MOST_FILTERED),
        )
        samples = Samples(entry.tokens_S, None, None, None)
        if not sort.draws:
            settings = self._corrected(settings.to(logits_SV.device))
            samples = self._draw(logits_SV, settings, draw_rows)
            entry.tokens_S[:count] = samples.tokens_S
            entry.words_SP[:count] = settings.words_SP
        settled, self._drafts_DK = self._graphs.behind(self._key, entry, sort).run()
        self._tell(settled, self._graphs.fetch(settled.told), count)
        return samples._replace(tokens_S=settled.told[:count])

    def propose(self, outputs: StepOutputs) -> HostCopy | None:
        if self._drafts_DK is None or not self.rows.tells_drafts:
            return None
        return HostCopy(self._drafts_DK[: len(self.rows.chunk_D)])


def _aligned(count: int) -> int:
    """The next even number: kernels want addresses that 16 divides."""
    return count + count % 2
