"""StepBuffers: inputs of captured steps at fixed addresses, filled by one copy from the host.

Each graph has its own layout of the same memory, since steps run one after the other.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from qkernels.causal_conv.state import NO_SLOT
from qkernels.lora.weights import NO_ADAPTER
from qserve.engine.step.device_step import Batch
from qserve.engine.step.step_input import StepInput
from qserve.engine.step.transfer import PinnedCopies, on_host


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutputs:
    """Outputs of a step's forward pass, on the device.

    Legend: T tokens of the step, S rows that sample, C hidden size, V vocabulary.
    """

    logits_SV: torch.Tensor  # of the sampled rows
    hidden_TC: torch.Tensor | None  # after the last norm; None: not needed
    taps: tuple[torch.Tensor, ...] = ()  # auxiliary hidden states [T, C] for a drafter


PADDING_SLOT = -1
ALIGNMENT = 16  # bytes, as kernels require


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphKey:
    """Size of a graph: requests with equally many tokens, or tokens of any requests."""

    is_chunk: bool
    num_tokens: int
    num_requests: int
    has_adapters: bool = False  # needs other kernels; a step without adapters is faster
    has_media: bool = False  # begins with embeddings (media_buffers.py)

    @property
    def count(self) -> int:
        """Tokens of each request, for a decode graph."""
        return self.num_tokens // self.num_requests

    @property
    def is_verify(self) -> bool:
        return not self.is_chunk and self.count > 1


class _Field(NamedTuple):
    name: str
    dtype: type
    offset: int  # bytes
    size: int
    padding: int | None  # None: repeat the last value

    @property
    def end(self) -> int:
        return self.offset + self.size * np.dtype(self.dtype).itemsize


class StepBuffers:
    """Inputs of every graph in one allocation, and the block tables."""

    def __init__(
        self,
        keys: Collection[GraphKey],
        max_num_seqs: int,
        table_width: int,
        device: torch.device,
        with_states: bool = False,
        with_rope_shifts: bool = False,
    ) -> None:
        self._device, self._copies = device, PinnedCopies(device)
        self._fields = {key: _fields(key, with_states, with_rope_shifts) for key in keys}
        most = max(fields[-1].end for fields in self._fields.values())
        self._bytes = torch.zeros(_whole_words(most), dtype=torch.uint8, device=device)
        self._tables_RX = torch.zeros(max_num_seqs, table_width, dtype=torch.int32, device=device)
        self._sent_RX = np.empty((0, 0), np.int32)  # current contents of its top left corner
        self.holds: GraphKey | None = None  # the graph whose layout the bytes have
        # for requests with equally many tokens
        self._rows = torch.arange(max(key.num_tokens for key in keys) + 1, device=device)
        self._starts = self._rows.to(torch.int32)

    def batch(self, key: GraphKey, max_context_len: int) -> Batch:
        """Views of a graph's inputs."""
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
        """Fill the buffers with padding only."""
        empty = {field.name: np.zeros(0, field.dtype) for field in self._fields[key]}
        empty["query_starts_R1"] = np.zeros(1, np.int32)
        self._fill_(key, empty)

    def fill_(self, key: GraphKey, step: StepInput) -> None:
        """Copy a step into the buffers. Does not wait for the device."""
        arrays = {field.name: getattr(step, field.name) for field in self._fields[key]}
        if arrays.get("rope_shifts_T", 0) is None:  # no request had an image yet
            arrays["rope_shifts_T"] = np.zeros(0, np.int64)
        self._fill_(key, arrays)
        # Columns beyond a request's pages are never read, nor rows beyond the requests. Most steps
        # have the same block tables as the previous one.
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
            target = packed[field.offset : field.end].view(field.dtype)
            target[: len(array)] = array
            target[len(array) :] = array[-1] if field.padding is None else field.padding
        self._copies.send_(packed.view(np.int64), self._bytes.view(torch.int64))


def _whole_words(size: int) -> int:
    """Round up to a multiple of 8 bytes."""
    return -(-size // 8) * 8


def _fields(
    key: GraphKey, with_states: bool = False, with_rope_shifts: bool = False
) -> tuple[_Field, ...]:
    tokens, requests = key.num_tokens, key.num_requests
    specs = [
        ("token_ids_T", np.int64, tokens, 0),
        ("positions_T", np.int64, tokens, 0),
        ("slots_T", np.int64, tokens, PADDING_SLOT),
        # in a verify, a padding request has as many keys as rows: of any page
        ("context_lengths_R", np.int32, requests, key.count if key.is_verify else 0),
    ]
    if key.is_chunk:
        specs.append(("logits_rows_S", np.int64, requests, 0))
        specs.append(("query_starts_R1", np.int32, requests + 1, None))
    if key.has_adapters:
        specs.append(("adapter_slots_T", np.int32, tokens, NO_ADAPTER))
    if with_states:
        specs.append(("state_slots_R", np.int32, requests, NO_SLOT))
    if with_rope_shifts:
        specs.append(("rope_shifts_T", np.int64, tokens, 0))
    fields, offset = [], 0
    for name, dtype, size, padding in specs:
        fields.append(_Field(name, dtype, offset, size, padding))
        offset = -(-fields[-1].end // ALIGNMENT) * ALIGNMENT
    return tuple(fields)
