"""A step's plan as tensors. Knows the plan's layout, not the model.

Legend: T tokens of the step, R requests (chunks), S rows that sample, X longest block table.
"""

from dataclasses import dataclass

import numpy as np
import torch

from qserve.engine.request import Request
from qserve.engine.scheduler import StepPlan
from qserve.engine.transfer import to_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Inputs of one step on the device."""

    token_ids_T: torch.Tensor  # int64
    positions_T: torch.Tensor  # int64
    slots_T: torch.Tensor  # int64: page * page size + offset, where this token's keys go
    block_tables_RX: torch.Tensor  # int32
    query_starts_R1: torch.Tensor  # int32, cumulative, R + 1 entries
    context_lengths_R: torch.Tensor  # int32: keys that the request's last row sees
    logits_rows_S: torch.Tensor  # int64: rows of T whose logits are wanted
    max_query_len: int
    max_context_len: int

    @property
    def num_tokens(self) -> int:
        return self.token_ids_T.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBatch:
    """The same on the host, and where tokens come from that the host does not know yet."""

    arrays: dict[str, np.ndarray]
    max_query_len: int
    max_context_len: int
    pending_index: np.ndarray  # places in token_ids_T that hold tokens of the step in flight
    pending_row: np.ndarray  # and the rows of that step's samples they come from

    def to(self, device: torch.device) -> Batch:
        """Copy to the device without waiting for it."""
        tensors = {name: to_device(array, device) for name, array in self.arrays.items()}
        return Batch(
            **tensors, max_query_len=self.max_query_len, max_context_len=self.max_context_len
        )


def build(plan: StepPlan, page_size: int, rows_in_flight: dict[Request, int]) -> HostBatch:
    """Lay a plan out. `rows_in_flight`: each request's row among the samples in flight."""
    chunks = plan.chunks
    num_tokens, num_requests = plan.num_tokens, len(chunks)
    token_ids = np.zeros(num_tokens, np.int64)
    positions = np.empty(num_tokens, np.int64)
    slots = np.empty(num_tokens, np.int64)
    width = max(len(chunk.request.block_table) for chunk in chunks)
    block_tables = np.zeros((num_requests, width), np.int32)
    query_starts = np.zeros(num_requests + 1, np.int32)
    pending_index, pending_row, logits_rows = [], [], []
    row = 0
    for i, chunk in enumerate(chunks):
        request, end = chunk.request, row + chunk.count
        pages = np.asarray(request.block_table, np.int32)
        block_tables[i, : len(pages)] = pages
        span = np.arange(chunk.start, chunk.end)
        positions[row:end] = span
        slots[row:end] = pages[span // page_size] * page_size + span % page_size
        known = request.token_ids[chunk.start : chunk.end]
        token_ids[row : row + len(known)] = known
        if len(known) < chunk.count:
            # At most one token of a request is in flight when a step is planned.
            pending_index.append(end - 1)
            pending_row.append(rows_in_flight[request])
        if chunk.samples:
            logits_rows.append(end - 1)
        query_starts[i + 1] = row = end
    return HostBatch(
        arrays={
            "token_ids_T": token_ids,
            "positions_T": positions,
            "slots_T": slots,
            "block_tables_RX": block_tables,
            "query_starts_R1": query_starts,
            "context_lengths_R": np.array([chunk.end for chunk in chunks], np.int32),
            "logits_rows_S": np.array(logits_rows, np.int64),
        },
        max_query_len=max(chunk.count for chunk in chunks),
        max_context_len=max(chunk.end for chunk in chunks),
        pending_index=np.array(pending_index, np.int64),
        pending_row=np.array(pending_row, np.int64),
    )
