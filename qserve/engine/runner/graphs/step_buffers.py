"""StepBuffers: inputs of captured steps at fixed addresses, filled by one copy from the host.

All graphs use the same memory, each with its own layout, because steps run one after the other.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from qkernels.attention.cache import DecodeRows, decode_bounds
from qkernels.causal_conv.state import NO_SLOT
from qkernels.lora.weights import NO_ADAPTER
from qkernels.sampling.words import NUM_WORDS
from qserve.engine.step.decode_rows import num_decodes
from qserve.engine.step.device_step import Batch
from qserve.engine.step.step_input import StepInput
from qserve.engine.step.transfer import PinnedCopies, on_host


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutputs:
    """Outputs of a step's forward pass, on the device.

    T: tokens of the step. S: rows that sample. C: hidden size. V: vocabulary size.
    """

    logits_SV: torch.Tensor  # logits of the sampled rows
    hidden_TC: torch.Tensor | None  # hidden states after the last norm; None: not needed
    aux_states: tuple[torch.Tensor, ...] = ()  # auxiliary hidden states [T, C] for a drafter


PADDING_SLOT = -1
SAMPLE_WORDS = "sample_words_SP"
DECODE_BOUNDS = "decode_bounds_8"
ALIGNMENT = 16  # bytes, as kernels require


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphKey:
    """Kind and size of a graph."""

    is_chunk: bool  # True: tokens of any requests; False: the same number of tokens per request
    num_tokens: int
    num_requests: int
    has_adapters: bool = False  # uses other kernels; steps without adapters are faster
    has_media: bool = False  # starts from embeddings (media_buffers.py)
    is_whole: bool = False  # a decode with the copy of its inputs and sampling (whole_steps.py)
    # A request with at most so many rows is a decode, and attention computes decodes separately
    # from prompt chunks. 0: it computes all requests as chunks.
    decode_query_len: int = 0

    @property
    def count(self) -> int:
        """Number of tokens of each request in a decode graph."""
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
    """Inputs of all graphs in one allocation, and the block tables."""

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
        self._sent_RX = np.empty((0, 0), np.int32)  # current contents of _tables_RX, top left
        self.holds: GraphKey | None = None  # the graph whose layout the buffer has now
        # rows and query starts of decode graphs
        self._rows = torch.arange(max(key.num_tokens for key in keys) + 1, device=device)
        self._starts = self._rows.to(torch.int32)

    def batch(self, key: GraphKey, max_context_len: int) -> Batch:
        """Return views of a graph's inputs."""
        tensors = {"logits_rows_S": self._rows[: key.num_tokens]}
        tensors["query_starts_R1"] = self._starts[: key.num_tokens + 1 : key.count].contiguous()
        for field in self._fields[key]:
            if field.name != SAMPLE_WORDS:
                tensors[field.name] = self._view(field)
        decodes = None
        if key.decode_query_len:
            decodes = DecodeRows(
                num_requests=key.num_requests,
                max_query_len=key.decode_query_len,
                max_context_len=max_context_len,
                bounds_8=tensors.pop(DECODE_BOUNDS),
            )
        return Batch(
            **tensors,
            decodes=decodes,
            block_tables_RX=self._tables_RX[: key.num_requests],
            max_query_len=key.num_tokens if key.is_chunk else key.count,
            max_context_len=max_context_len,
        )

    def _view(self, field: _Field) -> torch.Tensor:
        dtype = torch.int64 if field.dtype is np.int64 else torch.int32
        return self._bytes[field.offset : field.end].view(dtype)

    def sample_words(self, key: GraphKey) -> torch.Tensor:
        """Return the view of a whole step's sampling parameters [S, P]."""
        field = next(each for each in self._fields[key] if each.name == SAMPLE_WORDS)
        return self._view(field).view(key.num_requests, NUM_WORDS)

    def words(self, key: GraphKey) -> torch.Tensor:
        """Return a view, as int64 words, of all inputs of a graph except the block tables."""
        return self._bytes.view(torch.int64)[: self.num_words(key)]

    def num_words(self, key: GraphKey) -> int:
        """Length of `words`."""
        return _whole_words(self._fields[key][-1].end) // 8

    def pad_entry_(self, key: GraphKey, entry: np.ndarray) -> None:
        """Fill an entry of the host's ring with padding."""
        self._pack_(key, _nothing(self._fields[key]), entry)
        self.holds = key

    def fill_entry_(
        self, key: GraphKey, step: StepInput, token_ids_T: np.ndarray, entry: np.ndarray
    ) -> None:
        """Fill an entry of the host's ring with a step. A whole graph copies it to the buffers.

        The block tables are copied to the device now.
        """
        arrays = {
            field.name: getattr(step, field.name)
            for field in self._fields[key]
            if field.name != SAMPLE_WORDS
        }
        arrays |= {"token_ids_T": token_ids_T, SAMPLE_WORDS: step.sample_words_SP.ravel()}
        self._pack_(key, arrays, entry)
        self.holds = key
        self._fill_tables_(step.block_tables_RX)

    def pad_(self, key: GraphKey) -> None:
        """Fill the buffers with padding."""
        self._fill_(key, _nothing(self._fields[key]))

    def fill_(self, key: GraphKey, step: StepInput) -> None:
        """Copy a step into the buffers. Does not wait for the device."""
        names = [field.name for field in self._fields[key] if field.name != DECODE_BOUNDS]
        arrays = {name: getattr(step, name) for name in names}
        if key.decode_query_len:
            bounds = decode_bounds(num_decodes(step, key.decode_query_len))
            arrays[DECODE_BOUNDS] = np.array(bounds, np.int32)
        if arrays.get("rope_shifts_T", 0) is None:  # no request had an image yet
            arrays["rope_shifts_T"] = np.zeros(0, np.int64)
        self._fill_(key, arrays)
        self._fill_tables_(step.block_tables_RX)

    def _fill_tables_(self, tables_RX: np.ndarray) -> None:
        # Columns beyond a request's pages and rows beyond the requests are never read. Most steps
        # have the same block tables as the previous step, so they are not copied again.
        if not np.array_equal(tables_RX, self._sent_RX):
            rows, columns = tables_RX.shape
            tables = on_host(tables_RX, self._device)
            self._tables_RX[:rows, :columns].copy_(tables, non_blocking=True)
            self._sent_RX = tables_RX

    def _fill_(self, key: GraphKey, arrays: dict[str, np.ndarray]) -> None:
        self.holds = key
        packed = np.zeros(self.num_words(key), np.int64)
        self._pack_(key, arrays, packed)
        self._copies.send_(packed, self._bytes.view(torch.int64))

    def _pack_(self, key: GraphKey, arrays: dict[str, np.ndarray], packed: np.ndarray) -> None:
        """Write a graph's inputs and padding into int64 words."""
        packed = packed.view(np.uint8)
        for field in self._fields[key]:
            array = arrays[field.name]
            target = packed[field.offset : field.end].view(field.dtype)
            target[: len(array)] = array
            target[len(array) :] = array[-1] if field.padding is None else field.padding


def _nothing(fields: Collection[_Field]) -> dict[str, np.ndarray]:
    """Return the input arrays of a step without tokens."""
    empty = {field.name: np.zeros(0, field.dtype) for field in fields}
    empty["query_starts_R1"] = np.zeros(1, np.int32)
    return empty


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
        # In a verify, a padding request has as many keys as rows; their page does not matter.
        ("context_lengths_R", np.int32, requests, key.count if key.is_verify else 0),
    ]
    if key.is_chunk:
        specs.append(("logits_rows_S", np.int64, requests, 0))
        specs.append(("query_starts_R1", np.int32, requests + 1, None))
    if key.decode_query_len:
        specs.append((DECODE_BOUNDS, np.int32, len(decode_bounds(0)), 0))
    if key.has_adapters:
        specs.append(("adapter_slots_T", np.int32, tokens, NO_ADAPTER))
    if with_states:
        specs.append(("state_slots_R", np.int32, requests, NO_SLOT))
    if with_rope_shifts:
        specs.append(("rope_shifts_T", np.int64, tokens, 0))
    if key.is_whole:
        # -1 in all words means greedy sampling, no log probabilities and no bias.
        specs.append((SAMPLE_WORDS, np.int64, requests * NUM_WORDS, -1))
    fields, offset = [], 0
    for name, dtype, size, padding in specs:
        fields.append(_Field(name, dtype, offset, size, padding))
        offset = -(-fields[-1].end // ALIGNMENT) * ALIGNMENT
    return tuple(fields)
