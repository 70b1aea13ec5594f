"""Files of ../gpu, which only a GPU runs, import what exists."""

import importlib
from pathlib import Path

import pytest

pytest.importorskip("triton")

FILES = sorted((Path(__file__).parent.parent / "gpu").glob("*.py"))


def test_gpu_files_import():
    assert FILES
    for path in FILES:
        try:
            importlib.import_module(f"tests.qkernels.gpu.{path.stem}")
        except pytest.skip.Exception:
            continue  # needs a newer triton
