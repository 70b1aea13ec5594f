"""SpeculativeStep: the speculative parts of one step: fill, draw, propose.

Suffixes of tensor names:

    T: tokens of the step
    R: requests of the step
    S: sampled rows
    D: requests that sample
    N: rows of the tables
    K: drafts
    V: vocabulary
    P: sampling words
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from qkernels import ops
from qkernels.drafts.chunks import DraftChunks, DraftTables, Settled
from qkernels.sampling.settings import Samples, SampleSettings
from qkernels.sampling.words import HISTORY_ROW, POSITION
from qserve.engine.runner.graphs.step_buffers import StepOutputs
from qserve.engine.step.device_step import Batch, DraftMedia
from qserve.engine.step.draft_rows import DraftRows
from qserve.engine.step.transfer import HostCopy, to_device
from qserve.model.cache_spec import Cache
from qserve.parallel.pipeline import Pipeline
from qserve.speculation.acceptance import Verify, passes_by_chance
from qserve.speculation.config import SpeculativeConfig
from qserve.speculation.draft_step import DraftStep
from qserve.speculation.drafter import DeviceDrafter
from qserve.speculation.draws import Draws
from qserve.speculation.rejection import draw_verify, judge_of

DrawRows = Callable[[torch.Tensor, SampleSettings], Samples]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """State that persists between steps."""

    config: SpeculativeConfig
    drafter: DeviceDrafter | None
    tables: DraftTables
    max_model_len: int
    page_size: int
    caches: list[Cache] = field(default_factory=list)  # caches of the drafter's layers
    # float32 [N, K, V]: distributions of the drafts, for `rejection`; None: point masses
    draft_probs: torch.Tensor | None = None
    synthetic_rates_K: torch.Tensor | None = None  # acceptance rates, for `synthetic`

    def num_draft_positions(self, num_drafts: int) -> int:
        """Return the number of rows that the drafter may run after a step to make drafts."""
        if not num_drafts or self.drafter is None:
            return num_drafts
        return num_drafts + self.drafter.extra_positions


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """DraftRows on the device."""

    ARRAYS: ClassVar[tuple[str, ...]] = (
        *("rows_R", "chunk_of_S", "known_R", "place_R", "chunk_D", "first_D", "count_D"),
        *("next_R", "capacity_R"),
    )
    rows_R: torch.Tensor
    chunk_of_S: torch.Tensor
    known_R: torch.Tensor
    place_R: torch.Tensor
    chunk_D: torch.Tensor
    first_D: torch.Tensor
    count_D: torch.Tensor
    next_R: torch.Tensor
    capacity_R: torch.Tensor
    logits_rows_S: torch.Tensor
    starts_D1: torch.Tensor  # int32: 0, 1 .. D
    max_sampled: int
    has_unknown: bool = True  # True: some tokens are only on the device
    has_pending: bool = True  # True: some sequence lengths are only on the device

    def chunks(self, batch: Batch) -> DraftChunks:
        return DraftChunks(
            token_ids_T=batch.token_ids_T,
            positions_T=batch.positions_T,
            slots_T=batch.slots_T,
            context_lengths_R=batch.context_lengths_R,
            query_starts_R1=batch.query_starts_R1,
            block_tables_RX=batch.block_tables_RX,
            rows_R=self.rows_R,
            known_R=self.known_R,
            next_R=self.next_R,
            capacity_R=self.capacity_R,
            place_R=self.place_R,
            chunk_D=self.chunk_D,
            first_D=self.first_D,
            count_D=self.count_D,
            max_sampled=self.max_sampled,
        )


class SpeculativeStep:
    """One step. Call `fill_`, run the model, then call `draw` and `propose`."""

    def __init__(self, state: State, found: Rows, rows: DraftRows, batch: Batch) -> None:
        self.state, self.found, self.rows, self.batch = state, found, rows, batch
        self.chunks = found.chunks(batch)
        self.back_R: torch.Tensor | None = None  # planned minus true position; None: 0
        self._settings: SampleSettings | None = None
        self._settled: Settled | None = None
        self.tokens: HostCopy | None = None  # tokens of all sampled rows; set by `draw`
        self.num_emitted: HostCopy | None = (
            None  # emitted tokens per chunk; None: all. Set by `draw`
        )
        self.media: DraftMedia | None = None  # images of the step

    def fill_(self, pipeline: Pipeline | None = None) -> None:
        """Fill in tokens that only the device knows, and correct positions.

        With pipeline parallelism, the first stage knows how many drafts were rejected, and sends
        the numbers to the other stages.
        """
        state, found, back_R = self.state, self.found, None
        is_first = pipeline is None or pipeline.is_first
        if is_first and found.has_unknown:
            back_R = ops.fill_drafts_(self.chunks, state.tables, page_size=state.page_size)
        if not found.has_pending:
            return
        self.back_R = torch.empty_like(found.rows_R) if back_R is None else back_R
        if pipeline is None:
            return
        pipeline.pass_on(self.back_R)
        if not is_first:
            count = len(self.back_R)
            of_step = DraftTables(
                tokens_NK1=state.tables.tokens_NK1[:count], rejected_N=self.back_R
            )
            chunks = replace(self.chunks, rows_R=torch.arange(count, device=self.back_R.device))
            ops.fill_drafts_(chunks, of_step, page_size=state.page_size, fills_tokens=False)

    def draw(
        self,
        logits_SV: torch.Tensor,
        settings: SampleSettings,
        draw_rows: DrawRows,
        history_WV: torch.Tensor | None,
    ) -> Samples:
        """Sample all rows, and accept or reject the drafts.

        settings: on the host
        draw_rows: samples rows, and adds the sampled tokens to the history table
        """
        settings = self._settings = self._corrected(settings.to(logits_SV.device))
        state, found, accepted_D = self.state, self.found, None
        if self.rows.verifies and state.config.judges_by_row:
            verify = verify_of(found, self.batch)
            rows_D = found.rows_R[found.chunk_D]
            q_DKV = None if state.draft_probs is None else state.draft_probs[rows_D]
            samples, accepted_D = draw_verify(
                logits_SV, settings, history_WV, verify, q_DKV, judge_of(state.config)
            )
        else:
            samples = self._draw(logits_SV, settings, draw_rows)
        self._settled = settle_(
            state, self.chunks, self.rows.num_drafts, samples.tokens_S, settings, accepted_D
        )
        self._keep_results(self._settled, HostCopy(self._settled.for_host), len(samples.tokens_S))
        return samples

    def propose(self, outputs: StepOutputs) -> HostCopy | None:
        """Run the drafter. Returns the drafts [D, K] if the host needs them."""
        if self.state.drafter is None or not self.rows.runs_drafter:
            return None
        settled = self._settled
        if settled is None:  # within a prompt: no row samples
            settled = settle_(self.state, self.chunks, self.rows.num_drafts)
        drafts_DK = propose(
            self.state,
            self.found,
            self.batch,
            outputs,
            settled,
            self.rows.num_drafts,
            self._settings,
            self.media,
        )
        return HostCopy(drafts_DK) if self.rows.returns_drafts else None

    def _keep_results(self, settled: Settled, copy: HostCopy, num_sampled: int) -> None:
        """Keep the results for the host, without the padding after rows and chunks."""
        first = len(settled.for_host) - len(settled.last_rows_D)
        self.tokens = copy.part(0, num_sampled)
        if self.rows.verifies:
            self.num_emitted = copy.part(first, first + len(self.rows.chunk_D))

    def _corrected(self, settings: SampleSettings) -> SampleSettings:
        """Return the settings with corrected positions."""
        if self.back_R is None:
            return settings
        words_SP = settings.words_SP.clone()
        words_SP[:, POSITION] -= self.back_R[self.found.chunk_of_S[: len(words_SP)]]
        return replace(settings, words_SP=words_SP)

    def _draw(
        self, logits_SV: torch.Tensor, settings: SampleSettings, draw_rows: DrawRows
    ) -> Samples:
        """Sample all rows, each as if the drafts before it were accepted.

        Penalties depend on the tokens before. If there are any, the first rows of all chunks are
        sampled together, then the second rows, and so on. After a rejected draft, tokens of the
        chunk are no longer counted.
        """
        if not (self.rows.verifies and settings.any_history):
            return draw_rows(logits_SV, settings)
        drafts_S = verify_of(self.found, self.batch).drafts_S
        drawn: list[tuple[torch.Tensor, Samples]] = []
        alive_D = torch.ones(len(self.rows.count_D), dtype=torch.bool, device=drafts_S.device)
        for column in range(self.rows.max_sampled):
            (chosen,) = (self.rows.count_D > column).nonzero()
            index_D = to_device(chosen, drafts_S.device)
            row_D = self.found.first_D[index_D] + column
            words_DP = settings.words_SP[row_D]
            words_DP[:, HISTORY_ROW] = torch.where(alive_D[index_D], words_DP[:, HISTORY_ROW], -1)
            samples = draw_rows(logits_SV[row_D], replace(settings, words_SP=words_DP))
            alive_D[index_D] &= samples.tokens_S == drafts_S[row_D]
            drawn.append((row_D, samples))
        rows_S = torch.cat([row_D for row_D, _ in drawn])
        order_S = torch.empty_like(rows_S)
        order_S[rows_S] = torch.arange(len(rows_S), device=rows_S.device)
        columns = zip(*[samples for _, samples in drawn], strict=True)
        return Samples(*[None if c[0] is None else torch.cat(c)[order_S] for c in columns])


def starts(count: int, device: torch.device) -> torch.Tensor:
    """Return row offsets of `count` chunks with one row each, int32 [count + 1]."""
    return torch.arange(count + 1, dtype=torch.int32, device=device)


def verify_of(found: Rows, batch: Batch) -> Verify:
    # The last row of a chunk verifies no draft, so the token after it is ignored.
    behind_S = (found.logits_rows_S + 1).clamp(max=len(batch.token_ids_T) - 1)
    return Verify(
        first_D=found.first_D,
        count_D=found.count_D,
        drafts_S=batch.token_ids_T[behind_S],
        most=found.max_sampled,
    )


def settle_(
    state: State,
    chunks: DraftChunks,
    num_drafts: int,
    tokens_S: torch.Tensor | None = None,
    settings: SampleSettings | None = None,
    accepted_D: torch.Tensor | None = None,
) -> Settled:
    """Compare drafts with the sampled tokens, and store the results in the tables.

    tokens_S: None if no row samples. With `synthetic`, accepted drafts overwrite it
    accepted_D: numbers of accepted drafts, if known already
    """
    passes_DK = None
    num_judged = chunks.max_sampled - 1
    if num_judged and state.synthetic_rates_K is not None and tokens_S is not None:
        passes_DK = passes_by_chance(len(chunks.chunk_D), num_judged, state.synthetic_rates_K)
    return ops.settle_drafts_(
        tokens_S,
        None if settings is None else settings.words_SP,
        chunks,
        state.tables,
        num_drafts=state.num_draft_positions(num_drafts),
        page_size=state.page_size,
        max_model_len=state.max_model_len,
        passes_DK=passes_DK,
        accepted_D=accepted_D,
    )


def propose(
    state: State,
    found: Rows,
    batch: Batch,
    outputs: StepOutputs,
    settled: Settled,
    num_drafts: int,
    settings: SampleSettings | None,
    media: DraftMedia | None = None,
) -> torch.Tensor:
    """Run the drafter after a step. Returns the drafts [D, K], and stores them in the tables.

    `settings`: None if no row of the step sampled (within a prompt).
    """
    tables_DX = batch.block_tables_RX[: len(found.rows_R)]
    if len(found.chunk_D) < len(found.rows_R):
        tables_DX = tables_DX[found.chunk_D]
    longest = min(
        batch.max_context_len + state.num_draft_positions(num_drafts), state.max_model_len
    )
    step = DraftStep(
        batch=batch,
        hidden_TC=outputs.hidden_TC,
        aux_states=outputs.aux_states,
        next_tokens_T=settled.next_tokens_T,
        last_rows_D=settled.last_rows_D,
        tables_DX=tables_DX,
        starts_D1=found.starts_D1,
        draft_positions=settled.draft_positions,
        num_drafts=num_drafts,
        # keys without a slot in the pages are not written
        max_context_len=min(longest, tables_DX.shape[1] * state.page_size),
        caches=state.caches,
        draws=Draws(
            words_KDP=settled.words_KDP,
            any_random=settings is not None and settings.any_random,
            any_filter=settings is not None and settings.any_filter,
            is_greedy=state.config.draft_sample_method == "greedy",
            kept=None if state.draft_probs is None else [],
        ),
        media=media,
    )
    drafts_DK = state.drafter.propose(step)
    if num_drafts and settings is not None:
        state.tables.tokens_NK1[settled.rows_D, 1 : 1 + num_drafts] = drafts_DK
        for index, probs_DV in enumerate(step.draws.kept or ()):
            state.draft_probs[settled.rows_D, index] = probs_DV
    return drafts_DK
