"""What a kernel wrote of digits, to compare bit for bit."""

import torch


def written(digits):
    """All that belongs to the rows, as bits; to compare after the next use of the workspace."""
    M = digits.num_rows
    words = digits.words.transpose(2, 3).flatten(1, 2)[:, : 4 * M]
    scales = digits.scales.flatten(1)[:, : 4 * M].contiguous().view(torch.int32)
    sums = digits.sums.flatten(1)[:, : 4 * M] if digits.form.with_sums else words[:0]
    return [words.cpu(), scales.cpu(), sums.cpu()]
