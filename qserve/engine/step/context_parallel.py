"""Division of a step's long prompts over ranks (context parallelism).

For n ranks, a chunk of a prompt is divided into 2 n pieces of equal length and a rest of at least
one token. Rank r computes the pieces r and 2 n - 1 - r. Early tokens attend to few keys and late
tokens to many, so this gives all ranks equal work. Every rank computes the rest, and thus the
chunk's last token, from which the next token is sampled. Every rank also computes all other
requests of the step.

T: tokens of the step. R: requests (chunks).
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from qserve.engine.step.step_input import StepInput
from qserve.engine.step.transfer import to_device
from qserve.parallel.communicator import Communicator
from qserve.parallel.kv_exchange import KvExchange


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedStep:
    """One rank's tokens of a step. Each piece of a request is a separate request of `step`."""

    step: StepInput
    own_slots: np.ndarray  # int64: KV slots of the tokens that only this rank computes
    all_slots: np.ndarray  # int64: KV slots of all tokens that only one rank computes, by rank

    def exchange(self, communicator: Communicator, device: torch.device) -> KvExchange:
        """Return the exchange of keys and values after each layer's write."""
        own_T, all_nT = (to_device(slots, device) for slots in (self.own_slots, self.all_slots))
        return KvExchange(communicator=communicator, own_slots_T=own_T, all_slots_nT=all_nT)


def is_divided(step: StepInput, size: int, min_tokens: int) -> bool:
    """Return True if `divide` divides the step."""
    return bool(_long_requests(step, size, min_tokens).any()) and not _needs_all_rows(step)


def divide(step: StepInput, rank: int, size: int, min_tokens: int) -> DividedStep | None:
    """Divide a step's requests of at least `min_tokens` tokens.

    Returns None if all ranks compute the whole step.
    """
    if not is_divided(step, size, min_tokens):
        return None
    starts_R, ends_R = step.query_starts_R1[:-1], step.query_starts_R1[1:]
    is_long_R = _long_requests(step, size, min_tokens)
    requests: list[int] = []
    begins: list[int] = []
    stops: list[int] = []
    given: list[list[np.ndarray]] = [[] for _ in range(size)]
    for request, is_long in enumerate(is_long_R.tolist()):
        begin, end = int(starts_R[request]), int(ends_R[request])
        piece = (end - begin - 1) // (2 * size) if is_long else 0
        for other in range(size if piece else 0):
            for number in (other, 2 * size - 1 - other):
                first = begin + number * piece
                given[other].append(np.arange(first, first + piece))
                if other == rank:
                    requests.append(request)
                    begins.append(first)
                    stops.append(first + piece)
        requests.append(request)
        begins.append(begin + 2 * size * piece)
        stops.append(end)
    begins_X, stops_X = np.array(begins, np.int64), np.array(stops, np.int64)
    counts_X = stops_X - begins_X
    kept = np.concatenate([np.arange(*each) for each in zip(begins, stops, strict=True)])
    place_T = np.full(step.num_tokens, -1, np.int64)
    place_T[kept] = np.arange(len(kept))
    query_starts = np.zeros(len(requests) + 1, np.int32)
    np.cumsum(counts_X, out=query_starts[1:])
    contexts_X = step.context_lengths_R[requests] - (ends_R[requests] - stops_X)
    adapters_T = step.adapter_slots_T
    part = replace(
        step,
        token_ids_T=step.token_ids_T[kept],
        positions_T=step.positions_T[kept],
        slots_T=step.slots_T[kept],
        block_tables_RX=step.block_tables_RX[requests],
        query_starts_R1=query_starts,
        context_lengths_R=contexts_X.astype(np.int32),
        logits_rows_S=place_T[step.logits_rows_S],
        state_slots_R=step.state_slots_R[requests],
        max_query_len=int(counts_X.max()),
        pending_index=place_T[step.pending_index],
        adapter_slots_T=None if adapters_T is None else adapters_T[kept],
    )
    rows = [np.concatenate(each) for each in given]
    return DividedStep(
        step=part, own_slots=step.slots_T[rows[rank]], all_slots=step.slots_T[np.concatenate(rows)]
    )


def _long_requests(step: StepInput, size: int, min_tokens: int) -> np.ndarray:
    """Return bool [R]: which requests are long enough to be divided."""
    return np.diff(step.query_starts_R1) >= max(min_tokens, 2 * size + 1)


def _needs_all_rows(step: StepInput) -> bool:
    """Return True if the step needs all rows on each rank: prompt outputs, media, or a warm-up."""
    optional = (
        *(step.prompt_rows, step.pool_rows, step.media, step.draft_rows),
        *(step.axis_offsets_AT, step.rope_shifts_T, step.text_shifts_T, step.is_media_T),
    )
    return any(each is not None for each in optional) or int(step.slots_T.min()) < 0
