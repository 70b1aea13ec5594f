"""The inputs of captured steps: tensors at fixed places, filled by one copy from the host.

Knows arrays, no requests. Each graph has its own layout of the same memory, since one step runs
after the other.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from qkernels.delta_net.state import NO_SLOT
from qkernels.lora.weights import NO_ADAPTER
from qserve.engine.batch import Batch
from qserve.engine.step_input import StepInput
from qserve.engine.transfer import PinnedCopies, on_host

PADDING_SLOT = -1
ALIGNMENT = 16  # bytes, as kernels want addresses


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphKey:
    """What one graph holds: so many requests with equally many tokens, or so many of any."""

    is_chunk: bool
    num_tokens: int
    num_requests: int
    has_adapters: bool = False  # its kernels are others, and a step without adapters is faster

    @property
    def count(self) -> int:
        """Tokens of each request, where that is not a chunk's."""
        return self.num_tokens // self.num_requests

    @property
    def is_verify(self) -> bool:
        return not self.is_chunk and self.count > 1


class _Field(NamedTuple):
    name: str
    dtype: type
    offset: int  # bytes
    size: int
    padding: int | None  # None: as the last

    @property
    def end(self) -> int:
        return self.offset + self.size * np.dtype(self.dtype).itemsize


class StepBuffers:
    """Inputs of every graph, in one piece of memory; block tables beside it."""

    def __init__(
        self,
        keys: Collection[GraphKey],
        max_num_seqs: int,
        table_width: int,
        device: torch.device,
        with_states: bool = False,
    ) -> None:
        self._device, self._copies = device, PinnedCopies(device)
        self._fields = {key: _fields(key, with_states) for key in keys}
        most = max(fields[-1].end for fields in self._fields.values())
        self._bytes = torch.zeros(_whole_words(most), dtype=torch.uint8, device=device)
        self._tables_RX = torch.zeros(max_num_seqs, table_width, dtype=torch.int32, device=device)
        self._sent_RX = np.empty((0, 0), np.int32)  # what stands in its corner
        self.holds: GraphKey | None = None  # whose layout the bytes have
        # of requests with equally many tokens
        self._rows = torch.arange(max(key.num_tokens for key in keys) + 1, device=device)
        self._starts = self._rows.to(torch.int32)

    def batch(self, key: GraphKey, max_context_len: int) -> Batch:
        """The places of a graph's inputs."""
        tensors = {"logits_rows_S": self._rows[: key.num_tokens]}
        tensors["query_starts_R1"] = self._starts[: key.num_tokens + 1 : key.count].contiguous()
        for field in self._fields[key]:
            dtype = torch.int64 if field.dtype is np.int64 else torch.int32
            tensors[field.name] = self._bytes[field.offset : field.end].view(dtype)
        return Batch(
            **tensors,
            block_tables_RX=self._tables_RX[: key.num_requests],
            max_query_len=key.num_tokens if key.is_chunk else key.count,
            max_context_len=max_context_len,
        )

    def pad_(self, key: GraphKey) -> None:
        """Fill with a step of nothing."""
        empty = {field.name: np.zeros(0, field.dtype) for field in self._fields[key]}
        empty["query_starts_R1"] = np.zeros(1, np.int32)
        self._fill_(key, empty)

    def fill_(self, key: GraphKey, step: StepInput) -> None:
        """Copy a step into its places. Does not wait for the device."""
        self._fill_(key, {field.name: getattr(step, field.name) for field in self._fields[key]})
        # Columns beyond a request's pages are never read, nor rows beyond the requests. Most steps
        # need no other pages than the one before.
        tables_RX = step.block_tables_RX
        if not np.array_equal(tables_RX, self._sent_RX):
            rows, columns = tables_RX.shape
            tables = on_host(tables_RX, self._device)
            self._tables_RX[:rows, :columns].copy_(tables, non_blocking=True)
            self._sent_RX = tables_RX

    def _fill_(self, key: GraphKey, arrays: dict[str, np.ndarray]) -> None:
        fields, self.holds = self._fields[key], key
        packed = np.zeros(_whole_words(fields[-1].end), np.uint8)
        for field in fields:
            array = arrays[field.name]
            place = packed[field.offset : field.end].view(field.dtype)
            place[: len(array)] = array
            place[len(array) :] = array[-1] if field.padding is None else field.padding
        self._copies.send_(packed.view(np.int64), self._bytes.view(torch.int64))


def _whole_words(size: int) -> int:
    """The next number of bytes that 8 divides."""
    return -(-size // 8) * 8


def _fields(key: GraphKey, with_states: bool = False) -> tuple[_Field, ...]:
    tokens, requests = key.num_tokens, key.num_requests
    wanted = [
        ("token_ids_T", np.int64, tokens, 0),
        ("positions_T", np.int64, tokens, 0),
        ("slots_T", np.int64, tokens, PADDING_SLOT),
        # where each has several rows one that is not there has as many keys: of any page
        ("context_lengths_R", np.int32, requests, key.count if key.is_verify else 0),
    ]
    if key.is_chunk:
        wanted.append(("logits_rows_S", np.int64, requests, 0))
        wanted.append(("query_starts_R1", np.int32, requests + 1, None))
    if key.has_adapters:
        wanted.append(("adapter_slots_T", np.int32, tokens, NO_ADAPTER))
    if with_states:
        wanted.append(("state_slots_R", np.int32, requests, NO_SLOT))
    fields, offset = [], 0
    for name, dtype, size, padding in wanted:
        fields.append(_Field(name, dtype, offset, size, padding))
        offset = -(-fields[-1].end // ALIGNMENT) * ALIGNMENT
    return tuple(fields)
