"""The wheel and the sdist hold every file of the product, and programs run from the wheel alone."""

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import qserve

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("formats", "qkernels", "calibrate", "qserve")
BUILD = """
from setuptools import build_meta
build_meta.build_sdist("dist")
build_meta.build_wheel("dist")
"""
# Data files that the code opens. -I: nothing but the wheel and installed libraries.
USE = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import qkernels, qserve.cli
from calibrate.texts import default_texts, documents
from qserve.server.page import routes
assert default_texts.__file__.startswith(sys.path[0])
assert len(documents.read_documents(str(default_texts.DEFAULT_TEXTS))) > 10
assert "<html" in routes._page("index.html").body.decode()
sys.exit(qserve.cli.main(sys.argv[1:]))
"""


def product_files() -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """Build the sdist and the wheel from a copy, since a build writes next to the sources."""
    source = tmp_path_factory.mktemp("release") / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for package in PACKAGES:
        without_bytecode = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, source / package, ignore=without_bytecode)
    done = subprocess.run([sys.executable, "-c", BUILD], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return source / "dist"


@pytest.mark.exhaustive
def test_wheel_is_complete_and_runs(built, tmp_path):
    (path,) = built.glob("*.whl")
    assert path.name == f"qserve_kit-{qserve.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        wheel.extractall(tmp_path)
    assert {name for name in names if ".dist-info/" not in name} == product_files()
    command = [sys.executable, "-I", "-c", USE, str(tmp_path), "--version"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == (f"{qserve.__version__}\n", 0), done.stderr


@pytest.mark.exhaustive
def test_sdist_has_wheel_sources(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert product_files() | {"pyproject.toml", "README.md", "LICENSE"} <= names


@pytest.mark.network
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_dependencies_are_compatible_with_vllm(request, tmp_path, python):
    """One environment can hold both: uv finds versions for all, without installing them."""
    if "network" not in request.config.getoption("-m"):
        pytest.skip("asks the package index: -m network")
    uv = pytest.importorskip("uv").find_uv_bin()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = tmp_path / "wanted.in"
    wanted.write_text("\n".join([*project["dependencies"], "vllm>=0.20"]))
    command = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    command += ["--system-certs", "--python-version", python, "--python-platform", "linux"]
    done = subprocess.run([*command, str(wanted)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = dict(line.split("==") for line in done.stdout.splitlines() if "==" in line)
    assert int(found["vllm"].split(".")[1]) >= 20
    assert "transformers" in found and "torch" in found
