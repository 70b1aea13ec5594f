"""A linear's output as split-K partial sums, which the next operation adds when it loads them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from qkernels.errors import KernelError

# Operation that loads the partial sums and adds them: ops.norm (any output form) or
# ops.rope_write_kv_.
Consumer = Literal["norm", "rope"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitKPartials:
    """A tensor as partial sums, float32 [S, *shape].

    The tensor is the sum over S, added in order and rounded to `dtype`.
    """

    parts: torch.Tensor
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.parts.dtype != torch.float32 or self.parts.ndim < 2 or not self.parts.shape[0]:
            found = f"{self.parts.dtype} {list(self.parts.shape)}"
            raise KernelError(
                "partial sums",
                f"expected float32 [splits, ...], found {found}",
                "pass the sums as a product returns them",
            )
        if self.parts.numel() >= 2**31:  # kernels index the partial sums by 32-bit integers
            found = list(self.parts.shape)
            raise KernelError(
                "partial sums",
                f"expected less than 2^31 elements, found {found}",
                "call total() first",
            )

    @property
    def shape(self) -> torch.Size:
        return self.parts.shape[1:]

    @property
    def ndim(self) -> int:
        return self.parts.ndim - 1

    @property
    def device(self) -> torch.device:
        return self.parts.device

    def total(self) -> torch.Tensor:
        """Add the partial sums and return the tensor."""
        first, *others = self.parts.unbind(0)
        return sum(others, first).to(self.dtype)


LinearOutput = torch.Tensor | SplitKPartials


def reduced(x: LinearOutput) -> torch.Tensor:
    """Return x as a tensor; partial sums are added in plain torch."""
    return x.total() if isinstance(x, SplitKPartials) else x


def split_heads(x: LinearOutput, heads: Iterable[int], head_dim: int) -> tuple[LinearOutput, ...]:
    """Split x [T, sum(heads) D] into views [T, n, D], one for each n in `heads`."""
    if isinstance(x, SplitKPartials):
        return tuple(replace(x, parts=each) for each in split_heads(x.parts, heads, head_dim))
    return x.unflatten(-1, (-1, head_dim)).split(list(heads), dim=-2)
