"""BeamGroup: a beam search as rows of a step, one row per beam.

Each beam is a request in the scheduler. The rows decode together: each waits for the tokens of all
rows. Then the continuing beams are assigned to rows. The first beam that continues a row stays in
that row; the others take the rows of beams that ended. A row that gets another beam shares the
pages of that beam's row by reference. The last page, which is partly filled, is copied before the
row writes to it (`own_last_page`); a state is copied before the next step. Before the first token
there is one beam, and the other rows hold nothing.
"""

from dataclasses import replace

from formats.errors import InputError
from qserve.engine.kv_cache.block_pool import BlockPool
from qserve.engine.kv_cache.state_slots import StatePool
from qserve.engine.request import Request, Status
from qserve.engine.scheduling.beam_search import BeamSearch, Choice
from qserve.engine.scheduling.plan import Chunk
from qserve.engine.token_event import TokenEvent, TokenLogprobs
from qserve.params.beam_search_params import BeamSearchParams
from qserve.params.sampling_params import MAX_LOGPROBS


class BeamGroup:
    """The rows of one search. The first row represents the group as a request."""

    def __init__(
        self,
        request: Request,
        params: BeamSearchParams,
        vocab_size: int,
        *,
        has_states: bool = False,
    ) -> None:
        """Create the other rows; `request` becomes the first. Raises InputError.

        `has_states`: True if the model has recurrent states; after a preemption its rows then
        share no pages and recompute all their tokens.
        """
        self._has_states = has_states
        self.search = BeamSearch(
            params=params, max_tokens=request.max_tokens, end_tokens=request.eos_token_ids
        )
        most = self.search.num_candidates
        self._check(request, params, vocab_size)
        # The request may ask for more log probabilities than the search needs.
        most = max(most, params.logprobs or 0)
        request.params = replace(
            request.params, n=1, temperature=0.0, min_tokens=0, logprobs=min(most, vocab_size)
        )
        request.beams, request.follows_last = self, True
        empty = {"token_ids": [], "prompt_logprobs": None}
        self.rows = [request] + [
            replace(request, block_table=[], page_keys=[], **empty)
            for _ in range(params.beam_width - 1)
        ]
        self._logprobs: dict[Request, TokenLogprobs] = {}  # results of this round
        # After a preemption: rows that wait until the first row has computed the tokens that they
        # share, with the number of these tokens.
        self.resuming: list[tuple[Request, int]] = []

    @property
    def first(self) -> Request:
        return self.rows[0]

    @property
    def has_forked(self) -> bool:
        return bool(self.search.running)

    def take(
        self, row: Request, logprobs: TokenLogprobs, pool: BlockPool, states: StatePool
    ) -> TokenEvent | None:
        """Record one row's result. The last row's result advances the search.

        Returns the request's last event, or None if the search continues.
        """
        row.num_pending -= 1
        self._logprobs[row] = logprobs
        live = self.rows if self.has_forked else self.rows[:1]
        if len(self._logprobs) < len(live):
            return None
        chosen = self.search.advance([self._logprobs[each] for each in live])
        self.forget()
        if not chosen:
            return self._end()
        self._spread(chosen, pool, states)
        return None

    def forget(self) -> None:
        """Discard the recorded results of this round."""
        self._logprobs.clear()

    def num_shared_pages(self, row: Request, page_size: int) -> int:
        """Number of leading full pages of a row that have the same tokens as the first row's."""
        if self._has_states:  # without a state at their end the pages cannot be shared
            return 0
        ours, theirs, count = self.first.token_ids, row.token_ids, 0
        for start in range(0, len(theirs) - page_size, page_size):  # leave a token to compute
            if ours[start : start + page_size] != theirs[start : start + page_size]:
                break
            count += 1
        return count

    def num_other_pages(self, pool: BlockPool) -> int:
        """Number of pages that the other rows need, beyond the first row's, to resume."""
        if not self.has_forked:
            return 0
        return sum(
            pool.pages_for(row.num_tokens) - self.num_shared_pages(row, pool.page_size)
            for row in self.rows[1:]
        )

    def max_pages(self, pool: BlockPool, max_num_seqs: int) -> int:
        """Return an upper bound of the pages that the search needs.

        Raises InputError if the search has more rows than a step.
        """
        if len(self.rows) > max_num_seqs:
            raise InputError(
                f"request {self.first.request_id} beam_width",
                f"expected at most {max_num_seqs}, found {len(self.rows)}",
                "search with fewer beams, or raise --max-num-seqs",
            )
        first = self.first
        of_prompt = first.num_prompt_tokens // pool.page_size
        # The last token of a beam is never an input, so it needs no slot in a page.
        longest = pool.pages_for(first.num_prompt_tokens + first.max_tokens - 1)
        if self._has_states:
            return len(self.rows) * longest
        return of_prompt + len(self.rows) * (longest - of_prompt)

    def take_pages(self, pool: BlockPool) -> None:
        """Set all rows running and allocate their pages. The first row has its pages already."""
        self.forget()
        for row in self.rows:
            row.status, row.level = Status.RUNNING, self.first.level
            row.adapter_slot = self.first.adapter_slot
        self.resuming = []
        if not self.has_forked:
            return
        for row in self.rows[1:]:
            count = self.num_shared_pages(row, pool.page_size)
            pool.fork_(row.block_table, self.first.block_table[:count])
            pool.grow_(row.block_table, row.num_tokens)
            row.num_inserted = count
            self.resuming.append((row, count * pool.page_size))

    def resume(self) -> list[Request]:
        """Return the rows that can resume: their tokens shared with the first row are computed."""
        ready = [row for row, shared in self.resuming if self.first.num_computed >= shared]
        for row, shared in self.resuming:
            if row in ready:
                row.num_computed = shared
        self.resuming = [each for each in self.resuming if each[0] not in ready]
        return ready

    def leave_step(self, chunks: list[Chunk], pool: BlockPool) -> None:
        """Remove the rows from the step that is being planned, because they are preempted."""
        ours = [chunk for chunk in chunks if chunk.request.beams is self]
        chunks[:] = [chunk for chunk in chunks if chunk.request.beams is not self]
        for row, start, _, num_sampled in ours:
            first = start // pool.page_size
            pool.invalidate(row.block_table[first:])
            row.num_inserted = min(row.num_inserted, first)
            row.num_computed = start
            row.num_pending -= num_sampled

    def rows_to_own(self, pool: BlockPool) -> list[Request]:
        """Return the rows that are about to write to a shared page.

        Each of them gets a copy, until only one row is left that references the page.
        """
        return [row for row in self.rows if _writes_shared_page(row, pool)]

    def own_last_page(self, row: Request, pool: BlockPool) -> None:
        """Copy the page that a row writes next, if the page is shared."""
        if _writes_shared_page(row, pool):
            pool.own_(row.block_table, row.num_computed // pool.page_size)
            row.row = -1  # its row in the step arrays has the old page

    def _spread(self, chosen: list[Choice], pool: BlockPool, states: StatePool) -> None:
        """Assign a row to each continuing beam."""
        assigned: list[Choice | None] = [None] * len(self.rows)
        moved = []
        for choice in chosen:
            if assigned[choice.parent] is None:
                assigned[choice.parent] = choice
            else:
                moved.append(choice)
        free = [index for index, choice in enumerate(assigned) if choice is None]
        for index, choice in zip(free, moved, strict=True):
            assigned[index] = choice
            _copy_beam(self.rows[choice.parent], self.rows[index], pool)
            states.fork_(self.rows[choice.parent], self.rows[index])
        for row, choice in zip(self.rows, assigned, strict=True):
            row.token_ids.append(choice.last.token)
        self.search.running = assigned

    def _end(self) -> TokenEvent:
        best, first = self.search.best(), self.first
        prompt_logprobs = None
        if first.prompt_logprobs is not None:
            prompt_logprobs = (None, *first.prompt_logprobs)
        return TokenEvent(
            request_id=first.request_id,
            token_ids=best[0].token_ids,
            finish_reason=best[0].finish_reason,
            stop_token=best[0].stop_token,
            ended_by_token=best[0].ended_by_token,
            logprobs=best[0].logprobs,
            prompt_logprobs=prompt_logprobs,
            beams=best,
            facts=first.facts,
        )

    def _check(self, request: Request, params: BeamSearchParams, vocab_size: int) -> None:
        subject = f"request {request.request_id} beam_width"
        most, ends = self.search.num_candidates, len(self.search.all_ends)
        limit = min(MAX_LOGPROBS, vocab_size)
        if ends >= limit:
            raise InputError(
                f"request {request.request_id} beam search",
                f"expected fewer than {limit} tokens that end a beam, found {ends}",
                "give fewer stop_token_ids",
            )
        if most > limit:
            raise InputError(
                subject,
                f"expected at most {limit - ends} ({limit} less {ends} tokens that end a beam),"
                f" found {params.beam_width}",
                "search with fewer beams",
            )
        given = request.params
        fields = {
            "penalties": given.has_penalties,
            "logit_bias": bool(given.logit_bias),
            "allowed_token_ids or bad_words": given.has_filter,
            "structured_outputs": given.structured_outputs is not None,
        }
        for name, is_given in fields.items():
            if is_given:
                raise InputError(subject, f"beam search does not support {name}", f"remove {name}")


def _copy_beam(source: Request, target: Request, pool: BlockPool) -> None:
    pool.fork_(target.block_table, source.block_table)
    target.token_ids = source.token_ids.copy()
    target.page_keys = source.page_keys.copy()
    target.num_computed, target.num_inserted = source.num_computed, source.num_inserted
    target.row = -1


def _writes_shared_page(row: Request, pool: BlockPool) -> bool:
    index = row.num_computed // pool.page_size
    return (
        row.num_uncomputed == 1
        and not row.num_pending
        and index < len(row.block_table)
        and pool.is_shared(row.block_table[index])
    )
