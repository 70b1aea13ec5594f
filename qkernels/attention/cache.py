"""The pages of one layer's keys and values. Legend: P pages, B tokens of a page, J KV heads, D head
dim.
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
