"""A step as values: all that the workers are told of it. Numbers and arrays, no requests.

It could cross a process boundary as it is.
Legend: T tokens of the step, R requests (chunks), S rows that sample, X longest block table.
"""

from dataclasses import dataclass, replace

import numpy as np

from qkernels.sampling.settings import SampleRow
from qserve.engine.request import Request
from qserve.engine.request_rows import RequestRows
from qserve.engine.scheduler import Chunk, StepPlan
from qserve.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryFill:
    """A row of the table of token counts that gets a new owner before the step samples."""

    row: int
    prompt_token_ids: np.ndarray  # int64
    output_token_ids: np.ndarray  # int64


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRows:
    """Rows of a step that tell log probabilities of prompts (prompt_logprobs.py)."""

    rows: np.ndarray  # int64, of T
    targets: np.ndarray  # int64: the token that follows each
    num_alternatives: int  # the most that any asks for


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """One step, on the host."""

    token_ids_T: np.ndarray  # int64; 0 where the host does not know the token yet
    positions_T: np.ndarray  # int64
    slots_T: np.ndarray  # int64: page * page size + offset, where this token's keys go
    block_tables_RX: np.ndarray  # int32
    query_starts_R1: np.ndarray  # int32, cumulative, R + 1 entries
    context_lengths_R: np.ndarray  # int32: keys that the request's last row sees
    logits_rows_S: np.ndarray  # int64: rows of T whose logits are wanted
    max_query_len: int
    max_context_len: int
    pending_index: np.ndarray  # int64: places in token_ids_T of tokens that the last step samples
    pending_row: np.ndarray  # int64: and the rows of its samples they come from
    sample_rows: tuple[SampleRow, ...]  # how to draw each of the S tokens
    history_fills: tuple[HistoryFill, ...] = ()
    prompt_rows: PromptRows | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_T)

    @property
    def num_requests(self) -> int:
        return len(self.context_lengths_R)

    @property
    def num_sampled(self) -> int:
        return len(self.logits_rows_S)

    @classmethod
    def build(cls, plan: StepPlan, *, page_size: int, rows: RequestRows) -> "StepInput":
        """Lay a plan out, and note in `rows` what the step after it has to know."""
        chunks = plan.chunks
        token_ids = np.zeros(plan.num_tokens, np.int64)
        positions = np.empty(plan.num_tokens, np.int64)
        slots = np.empty(plan.num_tokens, np.int64)
        width = table_width(max(len(chunk.request.block_table) for chunk in chunks))
        block_tables = np.zeros((len(chunks), width), np.int32)
        query_starts = np.zeros(len(chunks) + 1, np.int32)
        pending_index, pending_row, logits_rows = [], [], []
        sample_rows, fills, owners = [], [], []
        first = 0
        for i, chunk in enumerate(chunks):
            request, end = chunk.request, first + chunk.count
            pages = np.asarray(request.block_table, np.int32)
            # kernels read nothing of pages that were given back, but need a number
            block_tables[i, : len(pages)] = np.maximum(pages, 0)
            span = np.arange(chunk.start, chunk.end)
            positions[first:end] = span
            slots[first:end] = pages[span // page_size] * page_size + span % page_size
            known = request.token_ids[chunk.start : chunk.end]
            token_ids[first : first + len(known)] = known
            if len(known) < chunk.count:
                # At most one token of a request is in flight when a step is planned.
                pending_index.append(end - 1)
                pending_row.append(rows.sampled_row(request))
            if chunk.num_sampled:
                history_row = _history_row(chunk, rows, fills)
                for back in range(chunk.num_sampled - 1, -1, -1):
                    logits_rows.append(end - 1 - back)
                    sample_rows.append(_sample_row(request, chunk.end - back, history_row))
                    owners.append(request)
            query_starts[i + 1] = first = end
        rows.take_sampled(owners)
        return cls(
            token_ids_T=token_ids,
            positions_T=positions,
            slots_T=slots,
            block_tables_RX=block_tables,
            query_starts_R1=query_starts,
            context_lengths_R=np.array([chunk.end for chunk in chunks], np.int32),
            logits_rows_S=np.array(logits_rows, np.int64),
            max_query_len=max(chunk.count for chunk in chunks),
            max_context_len=max(chunk.end for chunk in chunks),
            pending_index=np.array(pending_index, np.int64),
            pending_row=np.array(pending_row, np.int64),
            sample_rows=tuple(sample_rows),
            history_fills=tuple(fills),
        )

    @classmethod
    def of_sequence(
        cls,
        token_ids: list[int],
        block_table: list[int],
        *,
        page_size: int,
        params: SamplingParams,
        num_copies: int = 1,
    ) -> "StepInput":
        """All of a sequence in one step, outside any schedule, and the token after it.

        The copies share their pages: they fill a step whose result nobody reads.
        """
        request = Request(
            request_id="unscheduled",
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            max_tokens=1,
            params=params,
            seed=0,
            stop_token_ids=frozenset(),
            eos_token_ids=frozenset(),
            block_table=block_table,
        )
        chunk = Chunk(request=request, start=0, count=len(token_ids), num_sampled=1)
        plan = StepPlan(chunks=(chunk,) * num_copies)
        return cls.build(plan, page_size=page_size, rows=RequestRows(1))

    @classmethod
    def padding(
        cls, *, num_requests: int, count: int, max_context_len: int, page_size: int
    ) -> "StepInput":
        """A step of so many requests with `count` tokens each, which are written nowhere.

        It launches the kernels of its shape; its result means nothing.
        """
        pages = [0] * -(-count // page_size)
        step = cls.of_sequence(
            [0] * count,
            pages,
            page_size=page_size,
            params=SamplingParams(),
            num_copies=num_requests,
        )
        width = table_width(-(-max_context_len // page_size))
        return replace(
            step,
            slots_T=np.full_like(step.slots_T, -1),
            block_tables_RX=np.zeros((num_requests, width), np.int32),
            max_context_len=max_context_len,
        )


def table_width(num_pages: int) -> int:
    """Columns of a block table. Multiples of 16: Triton compiles others for themselves."""
    return -(-num_pages // 16) * 16


def _history_row(chunk: Chunk, rows: RequestRows, fills: list[HistoryFill]) -> int:
    """The row of token counts of a chunk's request, -1 without; a new one is added to `fills`."""
    request = chunk.request
    if not request.params.has_penalties:
        return -1
    row, is_new = rows.history_row(request)
    if is_new:
        # What this step samples is pending. Anything else that is would miss from the counts.
        assert request.num_pending <= chunk.num_sampled, request
        ids = np.array(request.token_ids, np.int64)
        prompt, output = np.split(ids, [request.num_prompt_tokens])
        fills.append(HistoryFill(row=row, prompt_token_ids=prompt, output_token_ids=output))
    return row


def _sample_row(request: Request, position: int, history_row: int) -> SampleRow:
    """How to draw the token at a position."""
    params, bias = request.params, request.params.logit_bias
    if not request.may_end_after(position - request.num_prompt_tokens):
        ends = request.stop_token_ids | request.eos_token_ids
        bias += tuple((token, -np.inf) for token in sorted(ends))
    return SampleRow(
        temperature=params.temperature,
        top_p=params.top_p,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        top_k=max(params.top_k, 0),
        seed=request.seed,
        position=position,
        history_row=history_row,
        num_logprobs=-1 if params.logprobs is None else params.logprobs,
        bias=bias,
    )
