"""StepInput: one step as plain numbers and arrays, the complete input of the workers.

A StepInput is sent to other processes unchanged. Letters in names:

    T: tokens of the step
    R: requests (chunks)
    S: sampled rows
    X: pages of the longest block table
    P: words of sampling parameters
    E: words of biases and token masks
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from qkernels.sampling.words import HISTORY_ROW, MASK_START, NUM_LOGPROBS, POSITION
from qserve.engine.kv_cache.host_tier import PageMoves
from qserve.engine.kv_cache.state_snapshots import StateMoves
from qserve.engine.request import Request, Status
from qserve.engine.scheduling.encoder_budget import MediaPlan
from qserve.engine.scheduling.plan import Chunk, Drafting, StepPlan
from qserve.engine.step.draft_rows import DraftRows
from qserve.engine.step.mask_jobs import mask_of, masks_along
from qserve.engine.step.masks import allowed, dead_end
from qserve.engine.step.media_rows import MediaRows, axis_positions, media_tokens
from qserve.engine.step.request_rows import RequestRows, table_width
from qserve.multimodal.media import MediaItem
from qserve.multimodal.positions import Axes, positions_of
from qserve.params.sampling_params import SamplingParams

FEW_DECODES = 8  # steps with up to so many plain decodes are built without numpy gathers


def step_masks(
    requests: list[Request],
    positions: np.ndarray,
    ahead_S: np.ndarray,
    has_mask_S: np.ndarray,
    words_SP: np.ndarray,
    first: int,
    late: Collection[Request] = (),
) -> np.ndarray:
    """Return the masks of a step's samples, int64 [E]. Sets their offsets in `words_SP`.

    `ahead_S`: number of the request's drafts before each row. `first`: offset of the first mask.
    Samples of `late` requests are dropped: they get no mask, and penalties do not count them. A row
    that allows no token gets no mask either; its request records the reason.
    """
    chosen = np.flatnonzero(has_mask_S)
    along = _masks_of_drafts([requests[index] for index in chosen[ahead_S[chosen] == 1]])
    found: list[np.ndarray] = []
    for index in chosen.tolist():
        request, ahead = requests[index], int(ahead_S[index])
        if request in late:
            words_SP[index, HISTORY_ROW] = -1
            continue
        if ahead and request.constraint is not None:
            mask = along[request].pop(0) if along[request] else None
        elif request.constraint is not None:
            mask = mask_of(request)
        else:
            token_ids = request.token_ids
            if ahead and request.token_filter.follows_output:
                token_ids = [*token_ids, *request.drafts[:ahead]]
            mask = allowed(request, int(positions[index]), token_ids, None)
        if mask is not None:
            words_SP[index, MASK_START] = first + len(found) * len(mask)
            found.append(mask)
        elif ahead == 0:
            request.dead_end = dead_end(request)
        elif request.max_emitted is None:  # if the drafts are accepted, the next step reports it
            request.max_emitted = ahead
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _masks_of_drafts(requests: list[Request]) -> dict[Request, list[np.ndarray | None]]:
    grammars = [request for request in requests if request.constraint is not None]
    if not grammars:
        return {}
    return dict(zip(grammars, masks_along(grammars), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryFill:
    """A row of the table of token counts that is set for a new request before the step samples."""

    row: int
    prompt_token_ids: np.ndarray  # int64
    output_token_ids: np.ndarray  # int64


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRows:
    """Rows of a step that report log probabilities of prompts (prompt_logprobs.py)."""

    rows: np.ndarray  # int64: indices into T
    targets: np.ndarray  # int64: the prompt token that follows each row
    num_alternatives: int  # maximum over all requests


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRows:
    """Rows of a step whose hidden states are pooled (pooling.py)."""

    rows: np.ndarray  # int64: indices into T; the rows of one vector are adjacent
    counts: np.ndarray  # int64: number of rows that each vector sums
    logit_rows: np.ndarray  # int64: indices into T of rows whose logits are requested
    logit_tokens: tuple[tuple[int, ...], ...]  # token ids per row; (): a classifier's labels


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """One step, on the host."""

    token_ids_T: np.ndarray  # int64; 0 if the host does not know the token yet
    positions_T: np.ndarray  # int64
    slots_T: np.ndarray  # int64: page * page size + offset, where the token's keys are written
    block_tables_RX: np.ndarray  # int32
    query_starts_R1: np.ndarray  # int32, cumulative, R + 1 entries
    context_lengths_R: np.ndarray  # int32: number of keys that the request's last row attends to
    logits_rows_S: np.ndarray  # int64: rows of T whose logits are needed
    state_slots_R: np.ndarray  # int32; -1: none
    max_query_len: int
    max_context_len: int
    # int64: indices into token_ids_T of pending tokens, which the in-flight step samples
    pending_index: np.ndarray
    pending_row: np.ndarray  # int64: rows of these tokens in the samples of that step
    # int64: sampling parameters of each of the S tokens (SampleSettings)
    sample_words_SP: np.ndarray
    sample_bias_E: np.ndarray  # int64: the biases and masks that these words refer to
    history_fills: tuple[HistoryFill, ...] = ()
    awaits_masks: bool = False  # True: `with_masks` adds masks before sampling
    page_moves: PageMoves | None = None  # copies of KV pages to make before the step
    state_moves: StateMoves | None = None  # copies of states to make before the step
    prompt_rows: PromptRows | None = None
    pool_rows: PoolRows | None = None
    adapter_slots_T: np.ndarray | None = None  # int32, -1: no adapter; None: no row has one
    draft_rows: DraftRows | None = None  # None: no speculation
    # int64: offset from `positions_T` to rotary positions on each axis; None: axes do not differ
    axis_offsets_AT: np.ndarray | None = None
    # int64, with drafts: offset from `positions_T` to rotary positions on all axes; None: 0
    rope_shifts_T: np.ndarray | None = None
    # int64: offset from position to rotary position for the request's later text; None: 0
    text_shifts_T: np.ndarray | None = None
    # bool: tokens for which the model has other experts (ERNIE); None: no such tokens
    is_media_T: np.ndarray | None = None
    media: MediaRows | None = None  # rows with media embeddings, and the items to encode

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_T)

    @property
    def num_requests(self) -> int:
        return len(self.context_lengths_R)

    @property
    def num_sampled(self) -> int:
        return len(self.logits_rows_S)

    @property
    def has_media(self) -> bool:
        """True if the step has media embeddings, axes with other positions, or tokens of media."""
        found = self.media, self.axis_offsets_AT, self.is_media_T
        return any(each is not None for each in found)

    @property
    def rows_each(self) -> int:
        """Number of rows per request if it is the same for all and all rows sample, else 0."""
        if self.max_query_len == 1:
            return 1
        same = self.num_tokens == self.num_requests * self.max_query_len == self.num_sampled
        return self.max_query_len if same else 0

    @property
    def num_logprobs(self) -> tuple[int, ...]:
        """Number of alternatives requested for each sampled row; -1: no log probabilities."""
        return tuple(self.sample_words_SP[:, NUM_LOGPROBS].tolist())

    @classmethod
    def build(
        cls, plan: StepPlan, *, page_size: int, rows: RequestRows, is_split: bool = False
    ) -> "StepInput":
        """Create the arrays of a plan, and update `rows` for the next step.

        `is_split`: True if grammar masks may be added after the launch of the forward pass.
        """
        if _is_few_decodes(plan, rows):
            return cls._of_few_decodes(plan, page_size=page_size, rows=rows)
        requests, starts, counts, num_sampled = map(list, zip(*plan.chunks, strict=True))
        rows_R = rows.rows_of(requests)
        starts_R, counts_R = np.array(starts, np.int64), np.array(counts, np.int64)
        ends_R = starts_R + counts_R
        query_starts = np.zeros(len(requests) + 1, np.int32)
        np.cumsum(counts_R, out=query_starts[1:])
        last_R = query_starts[1:] - 1  # last row of T of each chunk
        width = table_width(max([len(request.block_table) for request in requests]))
        block_tables = rows.tables_NX[rows_R, :width]
        if max(counts) == 1:
            positions, chunk_of_T = starts_R, np.arange(len(requests))
        else:
            positions = np.arange(query_starts[-1]) + np.repeat(
                starts_R - query_starts[:-1], counts_R
            )
            chunk_of_T = np.repeat(np.arange(len(requests)), counts_R)
        places = rows.replaced(rows_R[chunk_of_T], positions)
        pages = block_tables[chunk_of_T, places // page_size].astype(np.int64)
        slots_T = pages * page_size + places % page_size
        contexts_R = rows.num_keys(rows_R, ends_R)
        axes_AT = rope_shifts_T = text_shifts_T = None
        if rows.has_rope_shifts:
            text_shifts_T = rows.rope_shifts_N[rows_R][chunk_of_T]
            shifted = positions + text_shifts_T
            axes_AT = axis_positions(plan, shifted)
            if plan.drafting is None:
                positions = shifted
            else:  # the device corrects `positions`, and slots follow from them
                rope_shifts_T = shifted - positions
            axes_AT = None if axes_AT is None else axes_AT - positions
        token_ids, is_pending_R = _token_ids(plan.chunks)
        # Without drafts, at most one token of a request is in flight when a step is planned: its
        # last token. With drafts on the device there may be more, which DraftRows describes.
        pending_R = np.flatnonzero(is_pending_R if plan.drafting is None else ())
        sampled_R = np.array(num_sampled, np.int64)
        of_S = np.repeat(np.arange(len(requests)), sampled_R)  # the request of each sampled row
        back_S = np.cumsum(sampled_R)[of_S] - 1 - np.arange(len(of_S))
        rows_S = rows_R[of_S]
        words = rows.words_NP[rows_S]
        words[:, POSITION] = ends_R[of_S] - back_S
        bias = rows.biases(rows_S, words)
        has_mask_S = rows.has_mask_N[rows_S]
        # A mask after an in-flight token can be computed only when the host has that token.
        awaits_masks = bool(
            (rows.mask_follows_N[rows_S] & np.array(is_pending_R, bool)[of_S]).any()
            or (is_split and rows.has_grammar_N[rows_S].any())
        )
        if has_mask_S.any() and not awaits_masks:
            of_requests = [requests[i] for i in of_S]
            ahead_S = sampled_R[of_S] - 1 - back_S
            positions_S = words[:, POSITION]
            masks_E = step_masks(of_requests, positions_S, ahead_S, has_mask_S, words, len(bias))
            bias = np.concatenate([bias, masks_E])
        slots_R = rows.adapter_slots_N[rows_R]
        pending_row = rows.sampled_rows(rows_R[pending_R])
        rows.take_sampled(rows_S)
        fills = _history_fills(plan.chunks, rows, rows_R)
        if has_mask_S.any():
            rows.recount(requests)
        return cls(
            token_ids_T=token_ids,
            positions_T=positions,
            slots_T=slots_T,
            block_tables_RX=block_tables,
            query_starts_R1=query_starts,
            context_lengths_R=contexts_R.astype(np.int32),
            logits_rows_S=last_R[of_S] - back_S,
            state_slots_R=rows.state_slots_N[rows_R],
            max_query_len=max(counts),
            max_context_len=int(contexts_R.max()),
            pending_index=last_R[pending_R].astype(np.int64),
            pending_row=pending_row,
            sample_words_SP=words,
            sample_bias_E=bias,
            history_fills=fills,
            awaits_masks=awaits_masks,
            page_moves=plan.moves,
            state_moves=plan.state_moves,
            adapter_slots_T=slots_R[chunk_of_T] if slots_R.max() >= 0 else None,
            axis_offsets_AT=axes_AT,
            rope_shifts_T=rope_shifts_T,
            text_shifts_T=text_shifts_T,
            is_media_T=media_tokens(plan) if rows.has_media_tokens else None,
            media=plan.media and MediaRows.build(plan, plan.media),
            draft_rows=plan.drafting
            and DraftRows.build(
                plan,
                rows_R=rows_R,
                is_pending_R=np.array(is_pending_R),
                of_S=of_S,
                page_size=page_size,
            ),
        )

    @classmethod
    def _of_few_decodes(cls, plan: StepPlan, *, page_size: int, rows: RequestRows) -> "StepInput":
        """`build` for a few plain decodes, where Python numbers are faster than arrays."""
        token_ids, starts, slots, pending, indices = [], [], [], [], []
        for index, (request, start, _, _) in enumerate(plan.chunks):
            is_known = start < len(request.token_ids)
            token_ids.append(request.token_ids[start] if is_known else 0)
            if not is_known:
                pending.append(index)
            page, offset = divmod(start, page_size)
            slots.append(request.block_table[page] * page_size + offset)
            starts.append(start)
            indices.append(request.row)
        rows_R = np.array(indices, np.int64)
        positions, pending_R = np.array(starts, np.int64), np.array(pending, np.int64)
        width = table_width(max([len(chunk[0].block_table) for chunk in plan.chunks]))
        words = rows.words_NP[rows_R]
        words[:, POSITION] = positions + 1
        pending_row = rows.sampled_rows(rows_R[pending_R])
        rows.take_sampled(rows_R)
        count = len(starts)
        return cls(
            token_ids_T=np.array(token_ids, np.int64),
            positions_T=positions,
            slots_T=np.array(slots, np.int64),
            block_tables_RX=rows.tables_NX[rows_R, :width],
            query_starts_R1=np.arange(count + 1, dtype=np.int32),
            context_lengths_R=(positions + 1).astype(np.int32),
            logits_rows_S=np.arange(count),
            state_slots_R=rows.state_slots_N[rows_R],
            max_query_len=1,
            max_context_len=max(starts) + 1,
            pending_index=pending_R,
            pending_row=pending_row,
            sample_words_SP=words,
            sample_bias_E=np.zeros(0, np.int64),
            page_moves=plan.moves,
            state_moves=plan.state_moves,
        )

    def with_masks(
        self, plan: StepPlan, rows: RequestRows, late: Collection[Request] = ()
    ) -> "StepInput":
        """Return the step with its masks. The host must know all earlier tokens by now.

        The samples of requests in `late` will be dropped.
        """
        requests = [chunk.request for chunk in plan.chunks for _ in range(chunk.num_sampled)]
        words, bias = self.sample_words_SP.copy(), self.sample_bias_E
        # Requests that ended meanwhile get no mask, since their samples are not used.
        has_mask_S = rows.has_mask_N[[request.row for request in requests]]
        has_mask_S &= [request.status is not Status.FINISHED for request in requests]
        if has_mask_S.any():
            ahead_S = np.zeros(len(words), np.int64)
            positions = words[:, POSITION]
            masks_E = step_masks(requests, positions, ahead_S, has_mask_S, words, len(bias), late)
            bias = np.concatenate([bias, masks_E])
        return replace(self, awaits_masks=False, sample_words_SP=words, sample_bias_E=bias)

    @classmethod
    def of_sequence(
        cls,
        token_ids: list[int],
        block_table: list[int],
        *,
        page_size: int,
        params: SamplingParams,
        num_copies: int = 1,
        drafting: Drafting | None = None,
        media: tuple[MediaItem, ...] = (),
        axes: Axes | None = None,
        is_media_N: np.ndarray | None = None,
    ) -> "StepInput":
        """Return a step that computes a whole sequence and samples its next token.

        No scheduler is involved. `num_copies`: number of copies of the sequence in the step, which
        share their pages and only enlarge the step. `media`: all items are encoded by the step.
        `axes`: axes of positions of media tokens; None: one. `is_media_N`: see Request.
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
            media=media,
            is_media_N=is_media_N,
        )
        encoded = None
        if media:
            unique = {item.digest: item for item in media}
            encoded = MediaPlan(tuple(unique.values()), dropped=(), for_drafts=frozenset())
        if media and axes is not None:
            request.rope_positions, request.rope_shift = positions_of(media, axes)
        chunk = Chunk(request=request, start=0, count=len(token_ids), num_sampled=1)
        plan = StepPlan(chunks=(chunk,) * num_copies, drafting=drafting, media=encoded)
        return cls.build(plan, page_size=page_size, rows=RequestRows(1))

    @classmethod
    def padding(
        cls,
        *,
        num_requests: int,
        count: int,
        max_context_len: int,
        page_size: int,
        drafting: Drafting | None = None,
    ) -> "StepInput":
        """Return a step of `num_requests` requests with `count` tokens each, which writes no keys.

        The step launches the kernels of its shape. Its result is meaningless.
        """
        pages = [0] * -(-count // page_size)
        step = cls.of_sequence(
            [0] * count,
            pages,
            page_size=page_size,
            params=SamplingParams(),
            num_copies=num_requests,
            drafting=drafting,
        )
        width = table_width(-(-max_context_len // page_size))
        return replace(
            step,
            slots_T=np.full_like(step.slots_T, -1),
            block_tables_RX=np.zeros((num_requests, width), np.int32),
            max_context_len=max_context_len,
        )


def _is_few_decodes(plan: StepPlan, rows: RequestRows) -> bool:
    """Return True for a few decodes without drafts, media, masks, biases, penalties and adapters.

    Updates the rows of the requests.
    """
    chunks = plan.chunks
    if len(chunks) > FEW_DECODES or plan.drafting is not None or plan.media is not None:
        return False
    if rows.has_rope_shifts or rows.has_media_tokens or rows.output_window:
        return False
    if any(chunk[2] != 1 or chunk[3] != 1 for chunk in chunks):
        return False
    return rows.are_plain([chunk[0] for chunk in chunks])


def _token_ids(chunks: tuple[Chunk, ...]) -> tuple[np.ndarray, list[bool]]:
    """Return the step's tokens, and for each chunk True if it has a pending token.

    A pending token is not known to the host yet; it is 0 here. So are drafts on the device, which
    follow it.
    """
    pieces = [request.token_ids[start : start + count] for request, start, count, _ in chunks]
    is_short = [len(piece) < chunk[2] for piece, chunk in zip(pieces, chunks, strict=True)]
    is_pending = is_short
    if any(is_short):
        is_pending = is_short.copy()
        for index in np.flatnonzero(is_short):
            (request, _, count, num_sampled), piece = chunks[index], pieces[index]
            is_pending[index] = not piece or num_sampled == 1
            if num_sampled > 1 and piece:
                piece += request.drafts[: count - 1]
            piece += [0] * (count - len(piece))
    return np.array(list(chain.from_iterable(pieces)), np.int64), is_pending


def _history_fills(
    chunks: tuple[Chunk, ...], rows: RequestRows, rows_R: np.ndarray
) -> tuple[HistoryFill, ...]:
    """Return the token counts of requests with penalties that sample for the first time."""
    fills = []
    for index in np.flatnonzero(rows.needs_history_N[rows_R]):
        chunk, row = chunks[index], int(rows_R[index])
        request = chunk.request
        if not chunk.num_sampled:
            continue
        # Only this step's samples may be pending: other pending tokens would not be counted.
        assert request.num_pending <= chunk.num_sampled, request
        ids = np.array(request.token_ids, np.int64)
        prompt, output = np.split(ids, [request.num_prompt_tokens])
        fills.append(HistoryFill(row=row, prompt_token_ids=prompt, output_token_ids=output))
        rows.needs_history_N[row] = False
    return tuple(fills)
