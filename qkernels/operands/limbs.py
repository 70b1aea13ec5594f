"""A linear's input as int8 limbs: 31-bit integers cut into four bytes, for int8 tensor cores.

In each row, every K step of 128 inputs is converted to 31-bit integers that share one power of two
as their scale. The conversion is exact if an input's last bit is above 2^-30 of the largest input
(multi-limb int8, cf. the Ozaki scheme). Each integer is split into four signed limbs, the lowest
first: x = scale * sum_d limb_d 256^d. Legend: M rows, K inputs, T tiles of 8 columns; a tile holds
the four limbs of two rows.
"""

from dataclasses import dataclass

import torch

from qkernels.gpu.config import ceil_div

LIMBS_MAX_ROWS = 4
LIMBS_OF_INPUT = 4  # limbs per input, 8 bits each
LIMBS_COLUMNS = 8  # columns of one tensor core product: a row takes LIMBS_OF_INPUT of them
K_STEP = 128
TILE_WORDS = K_STEP * LIMBS_COLUMNS // 4  # words of a tile in one K step, 4 limbs in a word


@dataclass(frozen=True, slots=True, kw_only=True)
class LimbForm:
    """Format of the limbs that a kernel takes."""

    bits: int  # bits of the weight's codes; words interleave inputs in the weight's k order
    with_sums: bool = False  # also the sums of limbs, which an asymmetric weight needs
    with_tensor: bool = False  # also x as a tensor, which LoRA adapters need

    def refuses(self, M: int, K: int) -> str | None:
        """Return what was expected instead of M rows of K inputs; None: they can be such limbs."""
        if K == 0 or K % K_STEP:
            return f"expected inputs divisible by {K_STEP}"
        if not 0 < M <= LIMBS_MAX_ROWS:
            return f"expected 1 to {LIMBS_MAX_ROWS} rows"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limbs:
    """x [M, K] as limbs. The contents of rows beyond M are unspecified.

    A word holds one limb of four inputs, which match four bytes of the prepacked weight
    (prepack.py). Word (i, w, t) of a K step has the inputs

        4 bits: k = 64 i + 32 (w / 2) + 8 (w % 2) + 2 t + {0, 16, 1, 17}
        8 bits: k = 64 (t % 2) + 16 w + 4 i + 2 (t / 2) + {0, 8, 1, 9}

    Limb d of row m is column (4 m + d) % 8 of tile m // 2:

        words   int32 [K/128, T, 2 i, 8 columns, 4 t, 4 w]
        scales  float32 [K/128, T, 8]: 256^d scale; NaN if the step has NaN or infinity
        sums    int32 [K/128, T, 8]: sum of the limbs in each column; None without sums
        tensor  x [M, K]; None without the tensor
    """

    form: LimbForm
    num_rows: int
    words: torch.Tensor
    scales: torch.Tensor
    sums: torch.Tensor | None
    tensor: torch.Tensor | None = None

    @property
    def in_features(self) -> int:
        return self.words.shape[0] * K_STEP


def limb_tiles(M: int) -> int:
    """Return the number of 8-column tiles that M rows take."""
    return ceil_div(M * LIMBS_OF_INPUT, LIMBS_COLUMNS)


def empty_limbs(
    form: LimbForm, M: int, K: int, device: torch.device, dtype: torch.dtype | None = None
) -> Limbs:
    """Allocate limbs for M rows of K inputs; K must be divisible by 128.

    `dtype` also allocates the tensor x [M, K] in this dtype, if the form includes the tensor.
    """
    with_tensor = form.with_tensor and dtype is not None
    steps, tiles = K // K_STEP, limb_tiles(M)
    of_words = (steps, tiles, 2, LIMBS_COLUMNS, 4, 4)
    of_columns = (steps, tiles, LIMBS_COLUMNS)
    # three allocations take less host time than one allocation with three views
    return Limbs(
        form=form,
        num_rows=M,
        words=torch.empty(of_words, dtype=torch.int32, device=device),
        scales=torch.empty(of_columns, dtype=torch.float32, device=device),
        sums=torch.empty(of_columns, dtype=torch.int32, device=device) if form.with_sums else None,
        tensor=torch.empty((M, K), dtype=dtype, device=device) if with_tensor else None,
    )
