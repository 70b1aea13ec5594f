"""What a kernel wrote of digits, to compare bit for bit."""

import torch


def written(digits):
    """All that belongs to the rows, as bits; to compare after the next use of the workspace."""
    M, form = digits.num_rows, digits.form
    if form.rows:
        facts = digits.scales[:, : 3 if form.with_sums else 1, :M]
        return [digits.words[:, :, :M].cpu(), facts.contiguous().view(torch.int32).cpu()]
    words = digits.words.transpose(2, 3).flatten(1, 2)[:, : 4 * M]
    scales = digits.scales.flatten(1)[:, : 4 * M].contiguous().view(torch.int32)
    sums = digits.sums.flatten(1)[:, : 4 * M] if form.with_sums else words[:0]
    return [words.cpu(), scales.cpu(), sums.cpu()]
