"""Words copied by a kernel: either end may be pinned memory of the host, which kernels can address.

A copy engine does the same at a distance: on an H200 a stream waits 5 to 8 us before and after each
of its turns, and 2 us for this kernel.
"""

import torch
import triton
import triton.language as tl

from qkernels.gpu.config import ceil_div
from qkernels.gpu.launch import launch, on_device

BLOCK = 1024


def copy_words_(to: torch.Tensor, source: torch.Tensor) -> None:
    """Copy int64 words, as many as `source` has; both contiguous, one of them on the GPU."""
    count = source.numel()
    assert to.numel() >= count and to.dtype is source.dtype is torch.int64, (to, source)
    if not count:
        return
    with on_device(to if to.device.type == "cuda" else source):
        launch(_copy_words, (ceil_div(count, BLOCK),), to, source, count, BLOCK=BLOCK, num_warps=4)


@triton.jit(do_not_specialize=["count"])
def _copy_words(
    to_ptr,
    source_ptr,
    count,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(to_ptr + i, tl.load(source_ptr + i, mask=i < count), mask=i < count)
