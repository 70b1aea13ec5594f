"""Inputs of attention besides queries: pages of keys and values, and the rows of one step.

Legend: P pages, B tokens of a page, J KV heads, D head dim, R requests, X pages of a block table.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedKv:
    """Keys and values in pages of one dtype: the queries', or int8 or float8_e4m3fn with scales.

    A slot is page * B + offset. Scales have any strides: one scale for all slots is
    `scale.expand(P, B, J)`.
    """

    k_pages: torch.Tensor  # [P, B, J, D]
    v_pages: torch.Tensor  # [P, B, J, D]
    k_scales: torch.Tensor | None = None  # float32 [P, B, J], with 8-bit pages
    v_scales: torch.Tensor | None = None
    static_scales: bool = False  # writes round with the scales that are there, else find their own

    @classmethod
    def zeros(
        cls,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        static_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> "PagedKv":
        """Make pages of `shape` [P, B, J, D].

        `static_scales`: of keys and of values, float32, one number or one for each KV head.
        Without them 8-bit pages get scales that writes fill.
        """
        keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        if dtype.itemsize > 1:
            return cls(k_pages=keys, v_pages=values)
        P, B, J, _ = shape
        if static_scales is not None:
            scales = [scale.expand(P, B, J) for scale in static_scales]
        else:  # the scales of one head are adjacent: a kernel reads them at once
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
        """Tensors [P, ...] of what each page holds; static scales belong to no page."""
        pages = (self.k_pages, self.v_pages)
        # as bytes: float8 has no indexed copies everywhere
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
        return self.k_scales is not None

    @property
    def page_size(self) -> int:
        return self.k_pages.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.k_pages.shape[2]

    @property
    def scale_strides(self) -> tuple[int, ...]:
        """Strides of k_scales, then of v_scales; 0 where there are none."""
        if self.k_scales is None:
            return (0,) * 6
        return (*self.k_scales.stride(), *self.v_scales.stride())


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStep:
    """Which rows of q are whose, and where their keys are.

    The maxima are upper bounds that the host knows, so that nothing is read back from the device;
    in a CUDA graph they are frozen.
    """

    block_tables_RX: torch.Tensor  # int32: the pages of each request, in order
    query_starts_R1: torch.Tensor  # int32 [R + 1]: request r has rows starts[r] .. starts[r + 1]
    context_lengths_R: torch.Tensor  # int32: keys that a request's last row sees, itself included
    max_query_len: int
    max_context_len: int
    # int64 [T]: position of the last key that each row sees, at most that of the request's last
    # row; None: its own. Plain torch alone computes it.
    last_keys_T: torch.Tensor | None = None
