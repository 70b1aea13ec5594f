"""The clients of examples/clients against a real server; each skipped without its library."""

import runpy
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.tiny_vision import write_tiny_vision

FOLDER = ROOT / "examples" / "clients"
SCRIPTS = {
    "langchain_tools": "langchain_openai",
    "pydantic_ai_agent": "pydantic_ai",
    "instructor_object": "instructor",
}
WITH_IMAGES = {"langchain_images": "langchain_openai", "litellm_images": "litellm"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_client_example_runs(start_server, docs_5m, name):
    pytest.importorskip(SCRIPTS[name])
    server = start_server(docs_5m, "--served-model-name", "docs", "--max-model-len", "1024")
    command = [sys.executable, FOLDER / f"{name}.py", f"{server.url}/v1", "--model", "docs"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_client_example_sends_images(start_server, tmp_path, name):
    pytest.importorskip(WITH_IMAGES[name])
    folder = write_tiny_vision(tmp_path / "qwen3_vl", "qwen3_vl")
    server = start_server(folder, "--served-model-name", "tiny", "--dtype", "float32")
    command = [sys.executable, FOLDER / f"{name}.py", f"{server.url}/v1", "--model", "tiny"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("name", "library"), {**SCRIPTS, **WITH_IMAGES}.items())
def test_client_example_names_its_packages(monkeypatch, name, library):
    for module in (library, "langchain_core"):
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(SystemExit, match="this example requires: pip install .*"):
        runpy.run_path(str(FOLDER / f"{name}.py"))


def test_every_client_example_is_tested():
    assert {path.stem for path in FOLDER.glob("*.py")} == {*SCRIPTS, *WITH_IMAGES}
