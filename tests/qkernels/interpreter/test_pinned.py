"""Words copied by a kernel, to and from the host's pinned memory."""

import pytest
import torch

from qkernels.gpu.pinned import copy_words_

ON_GPU = torch.cuda.is_available()


@pytest.mark.parametrize("count", [0, 1, 1023, 2050])
def test_pinned_words_round_trip(device, count):
    words = torch.arange(count) * -(2**40)
    there = torch.full((count + 3,), 7, device=device)
    back = torch.empty(count, dtype=torch.int64, pin_memory=ON_GPU)
    copy_words_(there, words.pin_memory() if ON_GPU else words)
    assert there[count:].tolist() == [7] * 3
    copy_words_(back, there[:count])
    if ON_GPU:
        torch.cuda.synchronize()
    assert torch.equal(back, words)
