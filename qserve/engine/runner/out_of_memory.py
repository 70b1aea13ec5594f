"""Recognition of out-of-memory errors from torch and other libraries."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from formats.errors import InputError

# Messages of errors that are not an OutOfMemoryError: from the CPU allocator, pinned memory,
# kernel launches and cuBLAS.
OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


@contextmanager
def explain_out_of_memory(doing: str, remedy: str) -> Iterator[None]:
    """Context that converts an out-of-memory error to an InputError with the remedy."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        first = str(error).partition("\n")[0].partition(". ")[0]
        raise InputError("memory", f"ran out while {doing}: {first}", remedy) from error


def ran_out(error: RuntimeError | MemoryError) -> bool:
    """Return whether an error means that the device or the host is out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # Errors of this project, such as the death of a rank, are not out-of-memory errors of a step.
    return type(error).__module__.partition(".")[0] != "qserve" and any(
        text in str(error) for text in OUT_OF_MEMORY
    )
