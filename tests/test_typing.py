"""Public types: programs of users pass mypy and pyright, and mistakes are reported.

Names of the packages load when first used, so only a type checker sees whether they have types.
"""

import ast
import importlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ROOT / "tests" / "typed"
MISTAKES = "vllm_mistakes.py"
PACKAGES = ("calibrate", "formats", "qkernels", "qserve")


@pytest.mark.parametrize("package", PACKAGES)
def test_lazy_exports_equal_type_stubs(package):
    module = importlib.import_module(package)
    tree = ast.parse((ROOT / package / "__init__.py").read_text())
    (block,) = (n for n in tree.body if isinstance(n, ast.If) and not n.orelse and imports(n))
    typed = {alias.name: node.module for node in imports(block) for alias in node.names}
    assert typed == module._MODULES
    assert sorted(module.__all__) == sorted({*typed} | ({*module.__all__} & {"__version__"}))
    assert {*module.__all__} <= {*dir(module)}
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'unknown'"):
        module.unknown  # noqa: B018


def imports(block):
    return [node for node in block.body if isinstance(node, ast.ImportFrom)]


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_say_that_they_are_typed(package):
    assert (ROOT / package / "py.typed").is_file()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "py.typed" in project["tool"]["setuptools"]["package-data"][package]


def mistakes():
    lines = (PROGRAMS / MISTAKES).read_text().splitlines()
    return {number for number, line in enumerate(lines, start=1) if line.endswith("# wrong")}


@pytest.mark.exhaustive
def test_mypy_strict(tmp_path):
    pytest.importorskip("mypy", reason="mypy is not installed")
    command = [
        *(sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent"),
        *("--cache-dir", str(tmp_path), "--output=json", str(PROGRAMS)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert not done.stderr and done.returncode == 1, done.stderr + done.stdout
    found = [json.loads(line) for line in done.stdout.splitlines()]
    errors = [each for each in found if each["severity"] == "error"]
    assert {Path(each["file"]).name for each in errors} == {MISTAKES}, errors
    assert {each["line"] for each in errors} == mistakes(), errors


@pytest.mark.exhaustive
def test_pyright(tmp_path):
    pytest.importorskip("basedpyright", reason="basedpyright is not installed")
    settings = tmp_path / "pyrightconfig.json"
    settings.write_text(
        json.dumps(
            {
                "include": [str(PROGRAMS)],
                "extraPaths": [str(ROOT)],
                "typeCheckingMode": "strict",
                # These are pyright's opinions on torch and on wrong lines, not on our types.
                "reportUnknownMemberType": False,
                "reportUnusedExpression": False,
            }
        )
    )
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--project", str(settings)]
    command += ["--pythonpath", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    found = json.loads(done.stdout)["generalDiagnostics"]
    errors = [each for each in found if each["severity"] == "error"]
    assert {Path(each["file"]).name for each in errors} == {MISTAKES}, errors
    assert {each["range"]["start"]["line"] + 1 for each in errors} == mistakes(), errors
