"""DraftRows: speculation inputs of a step, as numbers and arrays.

T: tokens of the step. R: requests (chunks). S: sampled rows. D: requests that sample.
"""

from dataclasses import dataclass

import numpy as np

from qserve.engine.scheduling.plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRows:
    """Describes the rows that verify drafts, and the drafts to propose after the step."""

    num_drafts: int  # number of drafts that a device drafter proposes per chunk that samples
    runs_drafter: bool
    max_sampled: int  # maximum number of sampled rows of one chunk
    rows_R: np.ndarray  # int64: each request's row in the device's tables
    chunk_of_S: np.ndarray  # int64: index into R of each sampled row
    # int64: number of leading tokens of the chunk that the host knows. 0: the host also does not
    # know how many of the last step's drafts were accepted; positions are too high by the number
    # of rejected drafts.
    known_R: np.ndarray
    place_R: np.ndarray  # int64: index into D; -1: the chunk does not sample
    chunk_D: np.ndarray  # int64: index into R
    first_D: np.ndarray  # int64: index into S of the first sampled row
    count_D: np.ndarray  # int64: number of sampled rows
    # int64: for a chunk that does not sample, the prompt token after it
    next_R: np.ndarray
    capacity_R: np.ndarray  # int64: number of positions that the request's pages hold
    returns_drafts: bool  # True: the host needs the proposed drafts
    is_uniform: bool  # True: all rows sample, equally many per request, with drafts on the device

    @property
    def verifies(self) -> bool:
        return self.max_sampled > 1

    @classmethod
    def build(
        cls,
        plan: StepPlan,
        *,
        rows_R: np.ndarray,
        is_pending_R: np.ndarray,
        of_S: np.ndarray,
        page_size: int,
    ) -> "DraftRows":
        """Create the DraftRows of a plan. The arguments are values of StepInput.build."""
        requests, starts, counts, num_sampled = zip(*plan.chunks, strict=True)
        counts_R, sampled_R = np.array(counts, np.int64), np.array(num_sampled, np.int64)
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        on_host_R = np.array([len(request.drafts) for request in requests], np.int64)
        has_drafts_R = sampled_R - 1 - on_host_R > 0
        chunk_D = np.flatnonzero(sampled_R)
        count_D = sampled_R[chunk_D]
        return cls(
            num_drafts=plan.drafting.num_drafts,
            runs_drafter=plan.drafting.runs_drafter,
            max_sampled=int(sampled_R.max()),
            rows_R=rows_R,
            chunk_of_S=of_S.astype(np.int64),
            # a pending token is never in a chunk with prompt tokens
            known_R=np.where(is_pending_R, 0, np.where(has_drafts_R, 1, counts_R)),
            place_R=np.where(sampled_R > 0, np.cumsum(sampled_R > 0) - 1, -1),
            chunk_D=chunk_D,
            first_D=np.cumsum(count_D) - count_D,
            count_D=count_D,
            next_R=np.array(
                [
                    0 if drawn else request.token_ids[end]
                    for request, end, drawn in zip(requests, ends, num_sampled, strict=True)
                ],
                np.int64,
            ),
            capacity_R=np.array([len(request.block_table) for request in requests], np.int64)
            * page_size,
            is_uniform=bool((counts_R == sampled_R).all() and (counts_R == counts_R[0]).all())
            and (counts_R[0] == 1 or bool((on_host_R == 0).all())),
            returns_drafts=any(request.follows_last for request in requests),
        )
