"""A kernel's key in Triton's cache does not depend on which kernels were used before."""

import pytest

pytest.importorskip("triton")

import triton.language as tl
from triton.runtime.jit import JITFunction

from qkernels.gpu.cache_keys import settle_cache_keys

LEAST = tl.constexpr(3)


def _helper(x):
    return x + LEAST


def _kernel(x_ptr):
    tl.store(x_ptr, helper(tl.load(x_ptr)))


helper = None  # a fresh one for each key: a function keeps the key that was made first


def key_of_kernel(*, after_helper: bool) -> str:
    global helper
    helper = JITFunction(_helper)
    if after_helper:
        assert helper.cache_key
    return JITFunction(_kernel).cache_key


def test_key_includes_constants_of_unused_functions():
    settle_cache_keys()
    assert key_of_kernel(after_helper=False) == key_of_kernel(after_helper=True)


def test_key_is_computed_once():
    from triton.runtime import jit

    settle_cache_keys()
    update = jit.DependenciesFinder._update_hash
    settle_cache_keys()
    assert jit.DependenciesFinder._update_hash is update


def test_compilers_part_of_the_key_is_cached_for_triton():
    """In a thread; Triton's own call then returns immediately."""
    from triton.runtime import cache

    from qkernels.gpu.cache_keys import hash_compiler

    hash_compiler()
    before = cache.triton_key.cache_info()
    assert cache.triton_key()
    assert cache.triton_key.cache_info().hits == before.hits + 1
    assert cache.triton_key.cache_info().misses == before.misses
