"""The heap of the C library: bytes in use, and return of free memory to the system."""

import ctypes
import resource
from pathlib import Path


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of the C library."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def live_bytes() -> int:
    """Return the bytes allocated in the heap of this process's main thread."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:  # glibc before 2.33, or another C library
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    mallinfo.restype = _MallInfo
    info = mallinfo()
    return info.uordblks + info.hblkhd


def return_free_memory() -> None:
    """Return freed memory to the system, if the C library supports it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
