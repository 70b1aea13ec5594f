"""Bits of the limbs that a kernel wrote, for comparison."""

import torch


def written(limbs):
    """All that belongs to the rows, as bits; to compare after the next use of the workspace."""
    M = limbs.num_rows
    words = limbs.words.transpose(2, 3).flatten(1, 2)[:, : 4 * M]
    scales = limbs.scales.flatten(1)[:, : 4 * M].contiguous().view(torch.int32)
    sums = limbs.sums.flatten(1)[:, : 4 * M] if limbs.form.with_sums else words[:0]
    return [words.cpu(), scales.cpu(), sums.cpu()]
