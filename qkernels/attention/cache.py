"""Inputs of attention besides queries: pages of keys and values, and the rows of one step.

Legend: see qkernels/ops.py.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch

INT4_PAGES = torch.uint8  # dtype of pages that hold 4-bit codes
INT4_HEAD_DIMS = (32, 64, 128, 256)  # powers of two, which the Hadamard rotation of keys needs


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedKv:
    """Keys and values in pages of one dtype: the queries', int8, float8_e4m3fn, or 4-bit codes.

    A slot is page * B + offset. Scales of 8-bit codes may have any strides: one scale for all slots
    is `scale.expand(P, B, J)`.

    4-bit codes are uint8 [P, B, J, D / 2], two per byte. For each slot and KV head there are
    float16 pairs of a scale and a zero: two pairs for the key, one for the value. Keys are rotated
    by a Hadamard matrix, and queries that attend to them must be, too. int4/codes.py defines the
    format.
    """

    k_pages: torch.Tensor  # [P, B, J, D]
    v_pages: torch.Tensor  # [P, B, J, D]
    # float32 [P, B, J]; with 4-bit codes float16 [P, B, J, 4] and [P, B, J, 2]
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None
    static_scales: bool = False  # True: writes use these scales; False: writes compute and store

    @classmethod
    def zeros(
        cls,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        static_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> "PagedKv":
        """Allocate pages of `shape` [P, B, J, D]; uint8 means 4-bit codes, two per byte.

        `static_scales` are the float32 scales of keys and of values, one number or one per KV head.
        Without them, 8-bit pages get scales that writes fill in.
        """
        stored = (*shape[:3], shape[3] // 2) if dtype == INT4_PAGES else shape
        keys, values = (torch.zeros(stored, dtype=dtype, device=device) for _ in range(2))
        if dtype.itemsize > 1:
            return cls(k_pages=keys, v_pages=values)
        P, B, J, _ = shape
        if dtype == INT4_PAGES:
            pairs = [
                torch.zeros(P, J, B, count, dtype=torch.float16, device=device).transpose(1, 2)
                for count in (4, 2)
            ]
            return cls(k_pages=keys, v_pages=values, k_scales=pairs[0], v_scales=pairs[1])
        if static_scales is not None:
            scales = [scale.expand(P, B, J) for scale in static_scales]
        else:  # a kernel reads the scales of one head together, so they are adjacent
            scales = [torch.zeros(P, J, B, device=device).transpose(1, 2) for _ in range(2)]
        return cls(
            k_pages=keys,
            v_pages=values,
            k_scales=scales[0],
            v_scales=scales[1],
            static_scales=static_scales is not None,
        )

    @property
    def page_tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors [P, ...] of the contents of pages. Static scales belong to no page."""
        pages = (self.k_pages, self.v_pages)
        # as bytes, because not every device has indexed copies of float8
        pages = tuple(each.view(torch.uint8) for each in pages)
        if self.k_scales is None or self.static_scales:
            return pages
        return (*pages, self.k_scales, self.v_scales)

    @property
    def slot_tensors(self) -> tuple[torch.Tensor, ...]:
        """Empty: keys and values have no state slots."""
        return ()

    @property
    def is_8bit(self) -> bool:
        return self.k_scales is not None and not self.is_4bit

    @property
    def is_4bit(self) -> bool:
        return self.k_pages.dtype == INT4_PAGES

    @property
    def page_size(self) -> int:
        return self.k_pages.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.k_pages.shape[2]

    @property
    def scale_strides(self) -> tuple[int, ...]:
        """Strides by page, slot and KV head of k_scales, then of v_scales; 0 without scales."""
        if self.k_scales is None:
            return (0,) * 6
        return (*self.k_scales.stride()[:3], *self.v_scales.stride()[:3])


class RequestArrays(NamedTuple):
    """The arrays of AttentionStep with an entry per request. Addresses are divisible by 16.

    Triton compiles other kernels for other addresses and launches them more slowly (gpu/launch.py).
    """

    block_tables_RX: torch.Tensor
    query_starts_R1: torch.Tensor
    context_lengths_R: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRows:
    """The first requests of a step, which have few rows each; the others are prompt chunks.

    Attention computes both parts separately, because a kernel for chunks computes a tile of many
    rows for each request. The maxima are upper bounds, as in AttentionStep.

    Either the host knows the number of decodes, or it is on the device (`bounds_8`), so that a CUDA
    graph computes steps with any number of decodes.
    """

    num_requests: int  # with bounds_8: an upper bound
    max_query_len: int
    max_context_len: int
    num_rows: int | None = None
    chunks: RequestArrays | None = None  # rows are counted after those of the decodes
    bounds_8: torch.Tensor | None = None  # `decode_bounds` as a tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStep:
    """The query rows of each request in one step, and the pages of its keys.

    The maxima are upper bounds known on the host, so that nothing is read back from the device. A
    CUDA graph keeps the values of its capture.
    """

    block_tables_RX: torch.Tensor  # int32: the pages of each request, in order
    query_starts_R1: torch.Tensor  # int32 [R + 1]: request r has rows starts[r] .. starts[r + 1]
    context_lengths_R: torch.Tensor  # int32: keys that a request's last row sees, including its own
    max_query_len: int
    max_context_len: int
    # int64 [T]: position of the last key that each row sees, at most the position of the request's
    # last row. None: each row sees keys up to its own. Only the reference and the fixed-order
    # kernels support this.
    last_keys_T: torch.Tensor | None = None
    decodes: DecodeRows | None = None  # None: all requests are computed together
    # int32 [2]: only the requests from the first number to before the second one are computed, and
    # only their rows are written; None: all requests
    bounds_2: torch.Tensor | None = None

    def bounds_on(self, device: torch.device) -> torch.Tensor:
        """Return `bounds_2`, or bounds that include every request."""
        return _all_requests(device) if self.bounds_2 is None else self.bounds_2

    def divided(self, decodes: DecodeRows) -> "tuple[AttentionStep, AttentionStep]":
        """Return the step of the decodes, and that of the chunks.

        With `bounds_8` both have the rows of this step. Otherwise the rows of the chunks' step
        follow those of the decodes.
        """
        R, bounds_8 = decodes.num_requests, decodes.bounds_8
        arrays = self.block_tables_RX, self.query_starts_R1, self.context_lengths_R
        tables_RX, starts_R1, lengths_R = decodes.chunks or arrays
        return (
            AttentionStep(
                block_tables_RX=self.block_tables_RX[:R],
                query_starts_R1=self.query_starts_R1[: R + 1],
                context_lengths_R=self.context_lengths_R[:R],
                max_query_len=decodes.max_query_len,
                max_context_len=decodes.max_context_len,
                bounds_2=None if bounds_8 is None else bounds_8[:2],
            ),
            AttentionStep(
                block_tables_RX=tables_RX,
                query_starts_R1=starts_R1,
                context_lengths_R=lengths_R,
                max_query_len=self.max_query_len,
                max_context_len=self.max_context_len,
                bounds_2=None if bounds_8 is None else bounds_8[4:6],
            ),
        )


ALL_REQUESTS = 2**31 - 1


def decode_bounds(num_decodes: int) -> tuple[int, ...]:
    """Return the bounds of the decodes and, 16 bytes later, those of the chunks."""
    return 0, num_decodes, 0, 0, num_decodes, ALL_REQUESTS, 0, 0


@functools.cache
def _all_requests(device: torch.device) -> torch.Tensor:
    return torch.tensor((0, ALL_REQUESTS), dtype=torch.int32, device=device)
