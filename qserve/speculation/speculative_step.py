"""SpeculativeStep: what goes with the model's pass of one step: fill, draw, settle, propose.

Legend: T tokens of the step, R its requests, S rows that sample, D requests that sample, M tokens
that the device knows alone, N rows of the tables, K drafts, V vocabulary, P words of sampling.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from qkernels.attention.cache import PagedKv
from qkernels.sampling.settings import Samples, SampleSettings
from qkernels.sampling.words import HISTORY_ROW, POSITION
from qserve.engine.batch import Batch
from qserve.engine.draft_rows import DraftRows
from qserve.engine.step_outputs import StepOutputs
from qserve.engine.transfer import HostCopy, to_device
from qserve.parallel.pipeline import Pipeline
from qserve.speculation.acceptance import ACCEPT, Verify
from qserve.speculation.config import SpeculativeConfig
from qserve.speculation.draft_step import DraftStep
from qserve.speculation.drafter import DeviceDrafter
from qserve.speculation.draws import Draws
from qserve.speculation.rejection import draw_verify, judge_of

DrawRows = Callable[[torch.Tensor, SampleSettings], Samples]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What lasts from step to step."""

    config: SpeculativeConfig
    drafter: DeviceDrafter | None
    tokens_NK1: torch.Tensor  # int64: each request's newest token, and its drafts
    refused_N: torch.Tensor  # int64: drafts of its last verify that came to nothing
    max_model_len: int
    page_size: int
    caches: list[PagedKv] = field(default_factory=list)  # of the drafter's layers
    # float32 [N, K, V], with `rejection`: what each draft was drawn from; None: point masses
    draft_shares: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """DraftRows on the device."""

    ARRAYS: ClassVar[tuple[str, ...]] = (
        *("rows_R", "chunk_of_T", "chunk_of_S", "is_pending_R", "place_M", "chunk_M", "column_M"),
        *("chunk_D", "first_D", "count_D", "next_R", "capacity_R"),
    )
    rows_R: torch.Tensor
    chunk_of_T: torch.Tensor
    chunk_of_S: torch.Tensor
    is_pending_R: torch.Tensor
    place_M: torch.Tensor
    chunk_M: torch.Tensor
    column_M: torch.Tensor
    chunk_D: torch.Tensor
    first_D: torch.Tensor
    count_D: torch.Tensor
    next_R: torch.Tensor
    capacity_R: torch.Tensor
    logits_rows_S: torch.Tensor
    most_sampled: int
    has_pending: bool
    are_all: bool = False  # M are all rows: of those that are not pending the first is known

    @property
    def rows_D(self) -> torch.Tensor:
        return self.rows_R[self.chunk_D]


class SpeculativeStep:
    """One step's. First `fill_`, then the model runs, then `draw`, then `propose`."""

    def __init__(self, state: State, found: Rows, rows: DraftRows, batch: Batch) -> None:
        self.state, self.found, self.rows, self.batch = state, found, rows, batch
        self.back_R: torch.Tensor | None = None  # how much too high positions were; None: not
        self._settings: SampleSettings | None = None
        self._tokens_S: torch.Tensor | None = None
        self._accepted_D: torch.Tensor | None = None
        self.num_emitted: HostCopy | None = None  # of each chunk that samples; None: all

    def fill_(self, pipeline: Pipeline | None = None) -> None:
        """Put tokens that the device knows alone into their places, and correct positions.

        Of a model in stages the first alone knows what became of drafts, and tells the others.
        """
        if pipeline is None:
            self.back_R = fill_(self.state, self.found, self.batch)
            return
        if pipeline.is_first:
            self.back_R = fill_(self.state, self.found, self.batch)
        elif self.found.has_pending:
            self.back_R = torch.empty_like(self.found.rows_R)
        if self.back_R is not None:
            pipeline.pass_on(self.back_R)
            if not pipeline.is_first:
                move_back_(self.state, self.found, self.batch, self.back_R)

    def draw(
        self,
        logits_SV: torch.Tensor,
        settings: SampleSettings,
        draw_rows: DrawRows,
        history_WV: torch.Tensor | None,
    ) -> Samples:
        """Draw all rows, and judge the drafts.

        `draw_rows` draws with the history table, to which it adds what it draws.
        """
        settings = self._settings = self._corrected(settings)
        state, found, accepted_D = self.state, self.found, None
        if self.rows.verifies and state.config.judges_by_row:
            verify = verify_of(found, self.batch)
            q_DKV = None if state.draft_shares is None else state.draft_shares[found.rows_D]
            samples, accepted_D = draw_verify(
                logits_SV, settings, history_WV, verify, q_DKV, judge_of(state.config)
            )
        else:
            samples = self._draw(logits_SV, settings, draw_rows)
        self._tokens_S = samples.tokens_S
        self._accepted_D = settle_(state, found, self.batch, samples.tokens_S, accepted_D)
        if self.rows.verifies:
            self.num_emitted = HostCopy(self._accepted_D + 1)
        return samples

    def propose(self, outputs: StepOutputs) -> HostCopy | None:
        """Run the drafter. Returns its drafts [D, K] where the host asks for them."""
        if self.state.drafter is None or not self.rows.runs_drafter:
            return None
        drafts_DK = propose(
            *(self.state, self.found, self.batch, outputs, self.rows.num_drafts),
            *(self._tokens_S, self._accepted_D, self._settings),
        )
        return HostCopy(drafts_DK) if self.rows.tells_drafts else None

    def _corrected(self, settings: SampleSettings) -> SampleSettings:
        """With the positions that the tokens have."""
        if self.back_R is None:
            return settings
        words_SP = settings.words_SP.clone()
        words_SP[:, POSITION] -= self.back_R[self.found.chunk_of_S[: len(words_SP)]]
        return replace(settings, words_SP=words_SP)

    def _draw(
        self, logits_SV: torch.Tensor, settings: SampleSettings, draw_rows: DrawRows
    ) -> Samples:
        """The tokens of all rows, each drawn as if the drafts before it had come true.

        Penalties follow from what was drawn before: with them the first rows of all chunks are
        drawn, then the second, and so on. A chunk whose draft was refused counts no more tokens.
        """
        if not (self.rows.verifies and settings.any_history):
            return draw_rows(logits_SV, settings)
        drafts_S = verify_of(self.found, self.batch).drafts_S
        drawn: list[tuple[torch.Tensor, Samples]] = []
        alive_D = torch.ones(len(self.rows.count_D), dtype=torch.bool, device=drafts_S.device)
        for column in range(self.rows.most_sampled):
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


def fill_(state: State, found: Rows, batch: Batch) -> torch.Tensor | None:
    """Write tokens and positions. Returns how much too high each request's were; None: not."""
    if len(found.place_M):
        tokens_M = state.tokens_NK1[found.rows_R[found.chunk_M], found.column_M]
        if found.are_all:
            is_known_M = (found.column_M == 0) & (found.is_pending_R[found.chunk_M] == 0)
            tokens_M = torch.where(is_known_M, batch.token_ids_T[found.place_M], tokens_M)
        batch.token_ids_T[found.place_M] = tokens_M
    if not found.has_pending:
        return None
    back_R = state.refused_N[found.rows_R] * found.is_pending_R
    move_back_(state, found, batch, back_R)
    return back_R


def move_back_(state: State, found: Rows, batch: Batch, back_R: torch.Tensor) -> None:
    """Lower the positions of each request by so many."""
    chunk_T = found.chunk_of_T
    positions_T, slots_T = batch.positions_T[: len(chunk_T)], batch.slots_T[: len(chunk_T)]
    positions_T -= back_R[chunk_T]
    pages_T = batch.block_tables_RX[chunk_T, positions_T // state.page_size].long()
    new_T = pages_T * state.page_size + positions_T % state.page_size
    slots_T.copy_(torch.where(slots_T < 0, slots_T, new_T))
    batch.context_lengths_R[: len(back_R)] -= back_R.to(torch.int32)


def verify_of(found: Rows, batch: Batch) -> Verify:
    # The last row of a chunk judges no draft: what stands behind it does not matter.
    behind_S = (found.logits_rows_S + 1).clamp(max=len(batch.token_ids_T) - 1)
    return Verify(
        first_D=found.first_D,
        count_D=found.count_D,
        drafts_S=batch.token_ids_T[behind_S],
        most=found.most_sampled,
    )


def settle_(
    state: State,
    found: Rows,
    batch: Batch,
    tokens_S: torch.Tensor,
    accepted_D: torch.Tensor | None = None,
) -> torch.Tensor:
    """Judge drafts by what was drawn, and keep what follows. Returns how many came true, [D].

    `accepted_D`: that, where they were judged already.

    Of the acceptances one writes to `tokens_S`: `synthetic`, in whose drafts nobody believes.
    """
    if accepted_D is not None:
        pass
    elif found.most_sampled > 1:
        accept = ACCEPT[state.config.acceptance]
        accepted_D = accept(tokens_S, verify_of(found, batch), state.config)
    else:
        accepted_D = torch.zeros_like(found.first_D)
    rows_D = found.rows_D
    state.tokens_NK1[rows_D, 0] = tokens_S[found.first_D + accepted_D].clamp(min=0)
    state.refused_N[rows_D] = found.count_D - 1 - accepted_D
    return accepted_D


def propose(
    state: State,
    found: Rows,
    batch: Batch,
    outputs: StepOutputs,
    num_drafts: int,
    tokens_S: torch.Tensor | None,
    accepted_D: torch.Tensor | None,
    settings: SampleSettings | None,
) -> torch.Tensor:
    """Run the drafter behind a step; its drafts [D, K] are kept, too.

    Without `tokens_S` no row of the step sampled, amid a prompt.
    """
    next_T = torch.roll(batch.token_ids_T, -1)
    ends_R = batch.query_starts_R1[1 : len(found.rows_R) + 1].long()
    next_T[ends_R - 1] = found.next_R
    last_D, words_DP = found.first_D, None
    if tokens_S is not None:
        next_T[found.logits_rows_S] = tokens_S.clamp(min=0)
        row_D = found.first_D + accepted_D
        last_D, words_DP = found.logits_rows_S[row_D], settings.words_SP[row_D]
    step = DraftStep(
        batch=batch,
        hidden_TC=outputs.hidden_TC,
        taps=outputs.taps,
        next_tokens_T=next_T,
        last_rows_D=last_D,
        requests_D=found.chunk_D,
        capacity_D=found.capacity_R[found.chunk_D],
        num_drafts=num_drafts,
        max_model_len=state.max_model_len,
        max_context_len=min(batch.max_context_len + num_drafts, state.max_model_len),
        page_size=state.page_size,
        caches=state.caches,
        draws=Draws(
            words_DP=words_DP,
            any_random=settings is not None and settings.any_random,
            any_filter=settings is not None and settings.any_filter,
            is_greedy=state.config.draft_sample_method == "greedy",
            kept=None if state.draft_shares is None else [],
        ),
    )
    drafts_DK = state.drafter.propose(step)
    if num_drafts and tokens_S is not None:
        state.tokens_NK1[found.rows_D, 1 : 1 + num_drafts] = drafts_DK
        for index, shares_DV in enumerate(step.draws.kept or ()):
            state.draft_shares[found.rows_D, index] = shares_DV
    return drafts_DK
