"""Makes the names of compiled kernels in Triton's cache the same in every process.

Triton 3.6 hashes the constants that a kernel's functions use, but those of a function alone that
another kernel has used before: so a kernel's key depends on what ran before it, and a process does
not find what a compile worker made. Triton 3.9 asks for the function's key first, as is done here.
"""

import functools
from typing import Any


@functools.cache
def settle_cache_keys() -> None:
    """Patch Triton before the first key is made; does nothing where Triton needs no patch."""
    from triton.runtime import jit

    finder = getattr(jit, "DependenciesFinder", None)
    update = getattr(finder, "_update_hash", None)
    if update is None:
        return

    def key_first(self: Any, function: Any) -> None:
        _ = function.cache_key  # finds what the function uses
        update(self, function)

    finder._update_hash = key_first


def hash_compiler() -> None:
    """Compute the part of cache keys that names the compiler, which Triton does once, 0.35 s.

    Its files are read and hashed without the GIL for the most part: for a thread of a start.
    """
    from triton.runtime import cache

    compute = getattr(cache, "triton_key", None)
    if compute is not None:  # else the first launch does it, whatever its name is
        compute()
