"""SpeculativeGraphs: CUDA graphs for the speculative parts of decode and verify steps.

If all requests of a step have the same number of rows, the step runs as three graphs: one fills in
tokens and positions, one is the model's (engine/runner/graphs/cuda_graphs.py), and one samples,
accepts or rejects the drafts, and runs the drafter. Sampling that needs more inputs than the
sampling words runs outside of graphs, between the last two. Rows after those of the step are
padding. Suffixes of tensor names are as in speculative_step.py.
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
from qserve.engine.runner.graphs.capture import capture
from qserve.engine.runner.graphs.cuda_graphs import StepGraphs, ran_out_of_memory
from qserve.engine.runner.graphs.step_buffers import GraphKey, StepOutputs
from qserve.engine.step.device_step import Batch
from qserve.engine.step.draft_rows import DraftRows
from qserve.engine.step.step_input import StepInput
from qserve.engine.step.transfer import HostCopy, PinnedCopies, to_device
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

# Fields of DraftRows that differ between the steps of one graph. The graph's size determines the
# others.
CHANGING = ("rows_R", "known_R", "capacity_R")
PADDING_WORDS = np.array((*pack_row(SampleRow()), 0, 0), np.int64)
# Maximum number of rows with filters in a graph: each row needs a buffer of the vocabulary's size,
# and each graph keeps its buffers.
MAX_FILTERED = 32
RUNS_BEFORE_CAPTURE = 2


class Captured:
    """Work that becomes a CUDA graph at its third run: a capture takes as long as ten runs.

    Without CUDA the work always runs eagerly, for tests.
    """

    def __init__(self, work: Callable[[], object], device: torch.device, pool: object) -> None:
        self._work, self._device, self._pool = work, device, pool
        self._graph: torch.cuda.CUDAGraph | None = None
        self._num_runs, self._result = 0, None

    @property
    def is_captured(self) -> bool:
        return self._graph is not None

    def run(self) -> object:
        """Run the work or replay its graph. The result is valid until the next run."""
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
        """Capture the work. It must have run before, since kernels cannot compile in a capture."""
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with capture(graph, self._pool):
            self._result = self._work()
        self._graph = graph


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """The speculative graphs for one of the model's graphs, and their buffers."""

    batch: Batch
    rows: Rows
    changing: torch.Tensor  # int64: values of CHANGING, then of words_SP
    words_SP: torch.Tensor  # view of `changing`; `fill` corrects the positions in it
    tokens_S: torch.Tensor  # tokens that are sampled outside of the graph
    fill: Captured
    tails: dict["_Variant", Captured]


class _Variant(NamedTuple):
    """Key of a graph that runs after the model's graph."""

    num_drafts: int
    runs_drafter: bool
    any_filter: bool
    draws: bool  # True: the graph includes the sampler


class SpeculativeGraphs:
    """Captures and runs the speculative graphs."""

    def __init__(self, state: State, graphs: StepGraphs, device: torch.device) -> None:
        """`graphs`: CUDA graphs of the model's own steps."""
        self.state, self._graphs, self.device = state, graphs, device
        self._copies = PinnedCopies(device)
        self._entries: dict[GraphKey, _Entry] = {}
        self._is_full = False
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def close(self) -> None:
        """Free the graphs. `StepGraphs.close` gives the reason."""
        self._is_full = True
        self._entries.clear()

    def begin(self, key: GraphKey, step: StepInput, batch: Batch) -> "GraphedStep":
        """Copy a step's inputs to the buffers of its graphs, and return the step."""
        entry = self._entry(key, batch)
        self._copies.send_(self._packed(key, step), entry.changing)
        return GraphedStep(self, key, entry, step.draft_rows)

    @property
    def can_capture_next(self) -> bool:
        return next(self._missing(), None) is not None

    def capture_next(self) -> bool:
        """Capture one graph that steps will need, while idle. Returns False if none is left.

        If the device has too little memory, no more graphs are captured.
        """
        found = next(self._missing(), None)
        if found is None:
            return False
        key, variant = found
        entry = self._entry(key, self._graphs.padded(key))
        self._copies.send_(self._packed(key), entry.changing)
        try:
            self._graphs.replay(key)  # the captured work reads its outputs
            for captured in (entry.fill, self.tail(key, entry, variant)):
                if not captured.is_captured:
                    captured.run()
                    captured.capture()
        except (RuntimeError, MemoryError) as error:
            if self._graphs.in_step or not ran_out_of_memory(error):
                raise
            self._is_full = True
            logger.warning(
                "Out of memory for CUDA graphs of drafts; further steps with drafts run without"
                " graphs"
            )
            return False
        return True

    def _missing(self) -> Iterator[tuple[GraphKey, "_Variant"]]:
        """Yield missing graphs of steps in which all requests have the full number of drafts."""
        if self._is_full:
            return
        for key in self._graphs.decode_keys:
            entry = self._entries.get(key)
            for any_filter in (False, True):
                variant = _Variant(
                    num_drafts=key.count - 1,
                    runs_drafter=key.count > 1,
                    any_filter=any_filter,
                    draws=not any_filter or key.num_tokens <= MAX_FILTERED,
                )
                captured = None if entry is None else entry.tails.get(variant)
                if captured is None or not captured.is_captured:
                    yield key, variant

    def fetch(self, words: torch.Tensor) -> HostCopy:
        """Start to copy a step's results to the host."""
        return self._copies.fetch(words)

    def _packed(self, key: GraphKey, step: StepInput | None = None) -> np.ndarray:
        """Return the content of `changing` for a step; for `step` None, only padding."""
        lines = np.empty((len(CHANGING), _aligned(key.num_requests)), np.int64)
        words_SP = np.empty((key.num_tokens, NUM_WORDS), np.int64)
        num_chunks = num_rows = 0
        if step is not None:
            num_chunks, num_rows = step.num_requests, step.num_sampled
            words_SP[:num_rows] = step.sample_words_SP
        words_SP[num_rows:] = PADDING_WORDS
        # The last row of the tables is reserved for padding.
        padding = len(self.state.tables.rejected_N) - 1, 1, 0
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
            max_sampled=count,
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
            tails={},
        )

    def tail(self, key: GraphKey, entry: _Entry, variant: _Variant) -> Captured:
        """Return the work after the model or the sampler: -> (Settled, drafts [D, K] or None)."""
        if variant not in entry.tails:
            settings = SampleSettings(
                words_SP=entry.words_SP,
                bias_E=entry.words_SP.new_zeros(0),
                any_random=True,
                any_filter=variant.any_filter,
                num_logprobs=-1,
            )
            rows, batch = entry.rows, entry.batch
            chunks = rows.chunks(batch)

            def work() -> tuple[Settled, torch.Tensor | None]:
                tokens_S = entry.tokens_S
                if variant.draws:
                    tokens_S = ops.sample_(
                        self._graphs.outputs(key).logits_SV, settings, None
                    ).tokens_S
                settled = settle_(self.state, chunks, variant.num_drafts, tokens_S, settings)
                if not variant.runs_drafter:
                    return settled, None
                drafts_DK = propose(
                    self.state,
                    rows,
                    batch,
                    self._graphs.outputs(key),
                    settled,
                    variant.num_drafts,
                    settings,
                )
                return settled, drafts_DK

            entry.tails[variant] = Captured(work, self.device, self._pool)
        return entry.tails[variant]


class GraphedStep(SpeculativeStep):
    """A speculative step that runs in CUDA graphs."""

    def __init__(
        self, graphs: SpeculativeGraphs, key: GraphKey, entry: _Entry, rows: DraftRows
    ) -> None:
        super().__init__(graphs.state, entry.rows, rows, entry.batch)
        self._graphs, self._key, self._entry = graphs, key, entry
        self._drafts_DK: torch.Tensor | None = None

    def fill_(self, pipeline: Pipeline | None = None) -> None:
        """See SpeculativeStep. Graphs are not used with pipeline parallelism."""
        assert pipeline is None
        self.back_R = self._entry.fill.run()

    def draw(
        self,
        logits_SV: torch.Tensor,
        settings: SampleSettings,
        draw_rows: DrawRows,
        history_WV: torch.Tensor | None,
    ) -> Samples:
        """Sample, accept or reject drafts, and run the drafter.

        The sampler is in the graph unless it needs more inputs than the sampling words.
        """
        entry, rows, count = self._entry, self.rows, len(settings.words_SP)
        variant = _Variant(
            num_drafts=rows.num_drafts,
            runs_drafter=rows.runs_drafter,
            any_filter=settings.any_filter,
            # bias_E has masks that arrived since `begin`
            draws=not (settings.any_history or settings.num_logprobs >= 0 or len(settings.bias_E))
            and (not settings.any_filter or self._key.num_tokens <= MAX_FILTERED),
        )
        samples = Samples(entry.tokens_S, None, None, None)
        if not variant.draws:
            settings = self._corrected(settings.to(logits_SV.device))
            samples = self._draw(logits_SV, settings, draw_rows)
            entry.tokens_S[:count] = samples.tokens_S
            entry.words_SP[:count] = settings.words_SP
        settled, self._drafts_DK = self._graphs.tail(self._key, entry, variant).run()
        self._keep_results(settled, self._graphs.fetch(settled.for_host), count)
        return samples._replace(tokens_S=settled.for_host[:count])

    def propose(self, outputs: StepOutputs) -> HostCopy | None:
        if self._drafts_DK is None or not self.rows.returns_drafts:
            return None
        return HostCopy(self._drafts_DK[: len(self.rows.chunk_D)])


def _aligned(count: int) -> int:
    """Round up to an even number of int64, since kernels require addresses divisible by 16."""
    return count + count % 2
