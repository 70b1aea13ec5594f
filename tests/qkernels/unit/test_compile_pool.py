"""The index of compiled kernels that engines share."""

import json

import pytest

pytest.importorskip("triton")

from qkernels.gpu.compile_pool import CompilePool


def pool_at(path, done):
    """A pool without a GPU, of which only the index is used."""
    pool = object.__new__(CompilePool)
    pool._index, pool._done = path, set(done)
    return pool


def test_engines_keep_what_others_compiled(tmp_path):
    path = tmp_path / "index.json"
    first, second = pool_at(path, {"a"}), pool_at(path, {"b"})
    first._write_index()
    second._write_index()
    assert json.loads(path.read_text()) == ["a", "b"]
    assert second.done == {"a", "b"}
