"""The errors that say that memory ran out: torch's own, and what other libraries make of it.

Knows nothing of what needed the memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from formats.errors import InputError

# What else than OutOfMemoryError says so: the CPU's allocator, pinned memory and launches, cuBLAS.
OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


@contextmanager
def out_of_memory_is_named(doing: str, remedy: str) -> Iterator[None]:
    """A device without memory for what the block does raises InputError with the remedy."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        first = str(error).partition("\n")[0].partition(". ")[0]
        raise InputError("memory", f"ran out while {doing}: {first}", remedy) from error


def ran_out(error: RuntimeError | MemoryError) -> bool:
    """Whether an error says that the device, or the host, has no memory for what was asked."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # That a rank has died is no step's failure, whatever it died of.
    return type(error).__module__.partition(".")[0] != "qserve" and any(
        text in str(error) for text in OUT_OF_MEMORY
    )
