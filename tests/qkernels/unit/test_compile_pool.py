"""The index of compiled kernels that engines share."""

import json
import threading

import pytest

pytest.importorskip("triton")

from qkernels.gpu.compile_pool import CompilePool


def pool_at(path, done):
    """A pool without a GPU, of which only the index is used."""
    pool = object.__new__(CompilePool)
    pool._index, pool._done = path, set(done)
    pool._num_workers, pool._processes, pool._left = 1, [], set()
    return pool


def test_compile_index_keeps_entries_of_other_engines(tmp_path):
    path = tmp_path / "index.json"
    first, second = pool_at(path, {"a"}), pool_at(path, {"b"})
    first._write_index()
    second._write_index()
    assert json.loads(path.read_text()) == ["a", "b"]
    assert second.done == {"a", "b"}


def test_concurrent_index_writes_lose_no_entries(tmp_path, monkeypatch):
    """The second engine begins to write after the first has read the index."""
    path = tmp_path / "index.json"
    first, second = pool_at(path, {"a"}), pool_at(path, {"b"})
    other = threading.Thread(target=second._write_index)
    read = first._read_index

    def read_then_let_the_other_write():
        found = read()
        other.start()
        other.join(0.2)  # without a lock it ends here
        return found

    monkeypatch.setattr(first, "_read_index", read_then_let_the_other_write)
    first._write_index()
    other.join()
    assert json.loads(path.read_text()) == ["a", "b"]


def test_deferred_jobs_are_compiled_after_first_launch(tmp_path):
    """An index written before would be wrong if the process ended in between."""
    path, jobs = tmp_path / "index.json", ["first", "second"]
    pool = pool_at(path, {"a"})
    assert pool.compile(jobs) == 0
    assert pool.missing(jobs) == 2 and not path.exists()
    pool.launched()
    assert pool.missing(jobs) == 0
    assert set(json.loads(path.read_text())) == {"a"} | CompilePool.digests(jobs)
