"""A linear's input as 8-bit limbs: which body wants them where. Knows no kernel.

The 128 inputs of a row and step become integers of 31 bits with one power of two as their scale:
exact where an input has its last bit above 2^-30 of the largest. Each integer is four signed
limbs, the lowest first: x = scale * sum over d of digit_d 256^d.

Legend: M rows, K inputs, T tiles of 8 columns, each of two rows with four limbs.
"""

from dataclasses import dataclass

import torch

from qkernels.gpu.config import ceil_div
from qkernels.gpu.workspace import WORKSPACE_FLOATS, workspace

LIMBS_MAX_ROWS = 4
LIMBS_OF_INPUT = 4  # of one input, 8 bits each
LIMBS_COLUMNS = 8  # of one product of the tensor core: a row takes LIMBS_OF_INPUT of them
K_STEP = 128
TILE_WORDS = K_STEP * LIMBS_COLUMNS // 4  # a step's tile, 4 limbs in a word


@dataclass(frozen=True, slots=True, kw_only=True)
class LimbForm:
    """How a body takes its input as limbs: what the operations of ops.py are asked for."""

    bits: int  # of the weight's codes: words have the inputs that a word of codes meets
    with_sums: bool = False  # for an asymmetric weight

    def refuses(self, M: int, K: int) -> str | None:
        """Why M rows of K inputs cannot be such limbs, as what was expected; None: they can."""
        if K == 0 or K % K_STEP:
            return f"expected inputs divisible by {K_STEP}"
        if not 0 < M <= LIMBS_MAX_ROWS:
            return f"expected 1 to {LIMBS_MAX_ROWS} rows"
        if not limbs_fit(M, K):
            return f"expected limbs that fit into {WORKSPACE_FLOATS} words"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limbs:
    """x [M, K] as limbs, in the device's workspace until its next use. Beyond M rows: anything.

    A word has limbs of four inputs, those that four bytes of the weight's words (gemm.py) meet.
    Word (i, w, t) of a step has inputs

        4 bits: k = 64 i + 32 (w / 2) + 8 (w % 2) + 2 t + {0, 16, 1, 17}
        8 bits: k = 64 (t % 2) + 16 w + 4 i + 2 (t / 2) + {0, 8, 1, 9}

    Digit d of row m is column (4 m + d) % 8 of tile m // 2:

        words   int32 [K/128, T, 2 i, 8 columns, 4 t, 4 w]
        scales  float32 [K/128, T, 8]: 256^d scale; NaN where x has one, or an inf
        sums    int32 [K/128, T, 8]: of a column's limbs; None without sums
    """

    form: LimbForm
    num_rows: int
    words: torch.Tensor
    scales: torch.Tensor
    sums: torch.Tensor | None

    @property
    def in_features(self) -> int:
        return self.words.shape[0] * K_STEP


def empty_limbs(form: LimbForm, M: int, K: int, device: torch.device) -> Limbs:
    """A place for M rows of K inputs, divisible by 128.

    The caller has asked tiles.limbs_fit.
    """
    steps = K // K_STEP
    free, _ = workspace(device)

    def take(*shape: int) -> torch.Tensor:
        nonlocal free
        size = torch.Size(shape).numel()
        taken, free = free[:size].view(shape), free[size:]
        return taken

    tiles = ceil_div(M * LIMBS_OF_INPUT, LIMBS_COLUMNS)
    words = take(steps, tiles, 2, LIMBS_COLUMNS, 4, 4).view(torch.int32)
    scales = take(steps, tiles, LIMBS_COLUMNS)
    sums = take(*scales.shape).view(torch.int32) if form.with_sums else None
    return Limbs(form=form, num_rows=M, words=words, scales=scales, sums=sums)


def limbs_fit(M: int, K: int) -> bool:
    """Whether the limbs of M rows, their scales and sums fit into the workspace."""
    columns = ceil_div(M * LIMBS_OF_INPUT, LIMBS_COLUMNS) * LIMBS_COLUMNS
    return K // K_STEP * columns * (K_STEP // 4 + 2) <= (WORKSPACE_FLOATS)
