"""Patch Triton so that a compiled kernel has the same cache key in every process.

A kernel's key includes the constants that its device functions use. Triton 3.6 hashes them only for
functions that another kernel has already used. So the key depends on what ran before, and a process
may not find the kernel that a compile worker made. Triton 3.9 computes the functions' keys first;
this patch does the same.
"""

import functools
from typing import Any


@functools.cache
def settle_cache_keys() -> None:
    """Patch Triton, if its version needs it. Call this before the first key is made."""
    from triton.runtime import jit

    finder = getattr(jit, "DependenciesFinder", None)
    update = getattr(finder, "_update_hash", None)
    if update is None:
        return

    def key_first(self: Any, function: Any) -> None:
        _ = function.cache_key  # computing it finds the constants that the function uses
        update(self, function)

    finder._update_hash = key_first


def hash_compiler() -> None:
    """Compute the compiler's part of the cache keys early; Triton computes it once, in 0.35 s.

    Triton reads and hashes its own files, mostly without the GIL, so a start can call this in a
    thread.
    """
    from triton.runtime import cache

    compute = getattr(cache, "triton_key", None)
    if compute is not None:  # in other versions of Triton the first launch computes it
        compute()
