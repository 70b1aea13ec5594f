"""Warm-up shapes that a start leaves for the next one."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from qserve import LLM
from qserve.engine.runner.compiling import planned_kernels, start_record
from qserve.engine.runner.compiling.start_record import StartRecord, start_key

SHAPES = [(1, 1, 1), (1, 17, 17), (64, 1, 4096)]
SETTINGS = {"device": "cpu", "num_gpu_blocks_override": 8, "admission": "fits"}
PRINTS_KEY = """
import sys
from qserve import LLM
from qserve.engine.runner.compiling.start_record import start_key
llm = LLM(sys.argv[1], device="cpu", num_gpu_blocks_override=8, admission="fits")
print(start_key(llm.engine.runner, 512, "triton"))
"""


@pytest.fixture(scope="module")
def runner(quantized_5m):
    return LLM(quantized_5m, **SETTINGS).engine.runner


def test_recorded_shapes_are_valid_while_kernels_are_compiled(tmp_path):
    record = StartRecord(tmp_path / "new", "k")
    assert record.read({"a", "b"}) is None
    record.write(SHAPES, ["b", "a", "b"])
    assert record.read({"a", "b", "c"}) == SHAPES
    assert record.read({"a", "c"}) is None, "a kernel was not compiled"
    assert StartRecord(tmp_path / "new", "other").read({"a", "b"}) is None


def test_next_start_knows_the_shapes_after_all_kernels_were_launched(runner, tmp_path, monkeypatch):
    pytest.importorskip("triton")
    from qkernels.gpu.compile_pool import CompilePool

    def pool(config):
        found = object.__new__(CompilePool)  # without a GPU: only the index is used
        found.folder, found.version = tmp_path, "triton"
        found._index = tmp_path / "index.json"
        found._done, found._left = found._read_index(), set()
        found._num_workers, found._processes = 1, []
        return found

    monkeypatch.setattr(planned_kernels, "_compile_pool", pool)
    monkeypatch.setattr(planned_kernels, "hash_compiler", lambda: None)
    for _ in range(2):  # the second start finds no record, since the first ended too early
        kernels = planned_kernels.PlannedKernels(runner.config, compiles=True)
        assert kernels.known_shapes(runner, 512) is None
        kernels.compile(["a kernel"])
    kernels.launched(SHAPES)
    later = planned_kernels.PlannedKernels(runner.config, compiles=True)
    assert later.known_shapes(runner, 512) == SHAPES
    other_rank = planned_kernels.PlannedKernels(runner.config, compiles=False)
    assert other_rank.known_shapes(runner, 512) is None


@pytest.mark.parametrize(
    "text", ["", "[]", '{"shapes": [[1, 2]], "kernels": []}', '{"shapes": [[1, 1, "x"]]}']
)
def test_damaged_record_is_ignored(tmp_path, text):
    (tmp_path / "qserve-start-k.json").write_text(text)
    assert StartRecord(tmp_path, "k").read({"a"}) is None


def test_record_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    StartRecord(tmp_path / "file", "k").write(SHAPES, ["a"])
    assert "could not be written" in caplog.text


def test_key_is_the_same_in_another_process(runner, quantized_5m):
    """Whose hashes of strings, and so orders of sets, are others."""
    keys = [start_key(runner, 512, "triton")]
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", PRINTS_KEY, str(quantized_5m)],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        keys.append(done.stdout.split()[-1])
    assert len(set(keys)) == 1


def test_key_depends_on_everything_that_selects_kernels(runner, quantized_5m, docs_5m, monkeypatch):
    key = start_key(runner, 512, "triton")
    others = [start_key(runner, 513, "triton"), start_key(runner, 512, "another")]
    config = runner.config
    for change in ({"max_num_batched_tokens": 1024}, {"kv_cache_dtype": "int8"}):
        monkeypatch.setattr(runner, "config", replace(config, **change))
        others.append(start_key(runner, 512, "triton"))
    monkeypatch.setattr(runner, "config", replace(config, model="/elsewhere", seed=7))
    assert start_key(runner, 512, "triton") == key
    monkeypatch.setattr(runner, "config", config)
    float_runner = LLM(docs_5m, **SETTINGS).engine.runner
    others.append(start_key(float_runner, 512, "triton"))
    monkeypatch.setattr(start_record, "_sources", lambda: [("qserve/new.py", 1, 2)])
    others.append(start_key(runner, 512, "triton"))
    assert len({key, *others}) == 1 + len(others)
