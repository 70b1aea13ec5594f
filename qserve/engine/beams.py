"""BeamGroup: a beam search as rows of steps, one for each beam. Knows pages, no scheduler.

The beams are requests of the scheduler that decode together: each waits for the tokens of all.
Then the beams that go on are spread over them: the first that continues a row stays there, others
take the rows of those that do not go on. A row that changes its beam takes over the pages of the
other by reference; the last page, which is not full, becomes its own before it is written
(`own_last_page`). Before the first token there is one beam, and the other rows hold nothing.
"""

from dataclasses import replace

from formats.errors import InputError
from qserve.beam_search_params import BeamSearchParams
from qserve.engine.beam_search import BeamSearch, Choice
from qserve.engine.kv_pages import PagePool
from qserve.engine.request import Request, RequestEvent, Status, TokenLogprobs
from qserve.engine.step_plan import Chunk
from qserve.sampling_params import MAX_LOGPROBS


class BeamGroup:
    """The rows of one search; the first stands for all where a request is asked for."""

    def __init__(self, request: Request, params: BeamSearchParams, vocab_size: int) -> None:
        """Make the other rows. `request` becomes the first. Raises InputError."""
        self.search = BeamSearch(
            params=params, max_tokens=request.max_tokens, end_tokens=request.eos_token_ids
        )
        most = self.search.num_candidates
        self._check(request, params, vocab_size)
        # Of a row more may be wanted than the search needs.
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
        self._told: dict[Request, TokenLogprobs] = {}  # of this round
        # After they lost their pages: rows, and the tokens that they share with the first, which
        # computes them.
        self.resuming: list[tuple[Request, int]] = []

    @property
    def first(self) -> Request:
        return self.rows[0]

    @property
    def has_forked(self) -> bool:
        return bool(self.search.running)

    def take(self, row: Request, told: TokenLogprobs, pool: PagePool) -> RequestEvent | None:
        """Take what a step told of one row; with the last of all, go on. Returns the end."""
        row.num_pending -= 1
        self._told[row] = told
        live = self.rows if self.has_forked else self.rows[:1]
        if len(self._told) < len(live):
            return None
        chosen = self.search.advance([self._told[each] for each in live])
        self.forget()
        if not chosen:
            return self._end()
        self._spread(chosen, pool)
        return None

    def forget(self) -> None:
        """Drop what steps told in this round: the rows are computed again."""
        self._told.clear()

    def num_shared_pages(self, row: Request, page_size: int) -> int:
        """Full pages at the start of a row whose tokens are also the first row's."""
        ours, theirs, count = self.first.token_ids, row.token_ids, 0
        for start in range(0, len(theirs) - page_size, page_size):  # one token is computed
            if ours[start : start + page_size] != theirs[start : start + page_size]:
                break
            count += 1
        return count

    def num_other_pages(self, pool: PagePool) -> int:
        """Pages that the rows need beside those of the first, when all start to run again."""
        if not self.has_forked:
            return 0
        return sum(
            pool.pages_for(row.num_tokens) - self.num_shared_pages(row, pool.page_size)
            for row in self.rows[1:]
        )

    def most_pages(self, pool: PagePool, max_num_seqs: int) -> int:
        """Pages that the search may need at its end. Raises InputError for too many rows."""
        if len(self.rows) > max_num_seqs:
            raise InputError(
                f"request {self.first.request_id} beam_width",
                f"expected at most {max_num_seqs}, found {len(self.rows)}",
                "search with fewer beams, or raise --max-num-seqs",
            )
        first = self.first
        of_prompt = first.num_prompt_tokens // pool.page_size
        # The last token of a beam is never fed back.
        longest = pool.pages_for(first.num_prompt_tokens + first.max_tokens - 1)
        return of_prompt + len(self.rows) * (longest - of_prompt)

    def take_pages(self, pool: PagePool) -> None:
        """Let all rows run: give them their pages, when the first has its own."""
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
            row.num_published = count
            self.resuming.append((row, count * pool.page_size))

    def resume(self) -> list[Request]:
        """The rows that may be computed from now on: what they share with the first is there."""
        ready = [row for row, shared in self.resuming if self.first.num_computed >= shared]
        for row, shared in self.resuming:
            if row in ready:
                row.num_computed = shared
        self.resuming = [each for each in self.resuming if each[0] not in ready]
        return ready

    def withdraw(self, chunks: list[Chunk], pool: PagePool) -> None:
        """Take the rows out of a step that is being planned: they lose their pages."""
        ours = [chunk for chunk in chunks if chunk.request.beams is self]
        chunks[:] = [chunk for chunk in chunks if chunk.request.beams is not self]
        for row, start, _, num_sampled in ours:
            first = start // pool.page_size
            pool.withdraw(row.block_table[first:])
            row.num_published = min(row.num_published, first)
            row.num_computed = start
            row.num_pending -= num_sampled

    def rows_to_own(self, pool: PagePool) -> list[Request]:
        """Rows that are about to write to a page that another holds, too.

        Of those that share a page the last writes to it, when the others have their own.
        """
        return [row for row in self.rows if _writes_shared_page(row, pool)]

    def own_last_page(self, row: Request, pool: PagePool) -> None:
        """Give a row a copy of the page that it writes next, where it still shares that."""
        if _writes_shared_page(row, pool):
            pool.own_(row.block_table, row.num_computed // pool.page_size)
            row.row = -1  # its row of the step arrays has the old page

    def _spread(self, chosen: list[Choice], pool: PagePool) -> None:
        """Give each beam that goes on a row."""
        places: list[Choice | None] = [None] * len(self.rows)
        moved = []
        for choice in chosen:
            if places[choice.parent] is None:
                places[choice.parent] = choice
            else:
                moved.append(choice)
        free = [index for index, place in enumerate(places) if place is None]
        for index, choice in zip(free, moved, strict=True):
            places[index] = choice
            _copy_beam(self.rows[choice.parent], self.rows[index], pool)
        for row, choice in zip(self.rows, places, strict=True):
            row.token_ids.append(choice.last.token)
        self.search.running = places

    def _end(self) -> RequestEvent:
        best, first = self.search.best(), self.first
        prompt_logprobs = None
        if first.prompt_logprobs is not None:
            prompt_logprobs = (None, *first.prompt_logprobs)
        return RequestEvent(
            request_id=first.request_id,
            token_ids=best[0].token_ids,
            finish_reason=best[0].finish_reason,
            stop_token=best[0].stop_token,
            ended_by_token=best[0].ended_by_token,
            logprobs=best[0].logprobs,
            num_cached=first.num_cached,
            prompt_logprobs=prompt_logprobs,
            queue_seconds=first.queue_seconds,
            beams=best,
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
                f"expected at most {limit - ends}, {limit} less {ends} tokens that end a beam,"
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
                raise InputError(subject, f"a beam search has no {name}", f"leave out {name}")


def _copy_beam(source: Request, target: Request, pool: PagePool) -> None:
    pool.fork_(target.block_table, source.block_table)
    target.token_ids = source.token_ids.copy()
    target.page_keys = source.page_keys.copy()
    target.num_computed, target.num_published = source.num_computed, source.num_published
    target.row = -1


def _writes_shared_page(row: Request, pool: PagePool) -> bool:
    index = row.num_computed // pool.page_size
    return (
        row.num_uncomputed == 1
        and not row.num_pending
        and index < len(row.block_table)
        and pool.is_shared(row.block_table[index])
    )
