"""A function's code is its file and the files beside it that it uses, wherever they are named."""

import importlib
import sys
from functools import partial

import pytest

from calibrate.source_code import digest

FILES = {
    "solver.py": "import helper\nfrom parts.first import start\ndef solve(): return start\n",
    "helper.py": "import torch\nVALUE = 1\n",
    "parts/__init__.py": "",
    "parts/first.py": "from parts import second\ndef start(): return second.VALUE\n",
    "parts/second.py": "VALUE = 2\n",
    "unused.py": "VALUE = 3\n",
    "site-packages/library.py": "VALUE = 4\n",
}


@pytest.fixture
def solver(tmp_path, monkeypatch):
    """solver(changed file -> its text) -> the function `solve`, freshly imported."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(**changes):
        texts = FILES | {name.replace("__", "/") + ".py": text for name, text in changes.items()}
        for name, text in texts.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        for name in ("solver", "helper", "parts", "parts.first", "parts.second", "library"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        return importlib.import_module("solver").solve

    return load


def test_equal_files_are_equal_code(solver):
    assert digest([solver()]) == digest([solver()]) == digest([partial(solver())])


@pytest.mark.parametrize("name", ["solver", "helper", "parts__first", "parts__second"])
def test_each_file_that_is_used_counts(solver, name):
    before = digest([solver()])
    text = FILES[name.replace("__", "/") + ".py"]
    assert digest([solver(**{name: text + "# mended\n"})]) != before


def test_what_is_not_used_or_is_installed_does_not_count(solver):
    before = digest([solver(helper="import library\n")])
    assert digest([solver(helper="import library\n", unused="VALUE = 5\n")]) == before
    (changed,) = [solver(helper="import library\n", **{"site-packages__library": "VALUE = 5\n"})]
    assert digest([changed]) == before
    assert sys.modules["library"].VALUE == 5


def test_functions_without_a_file_count_by_what_they_say():
    texts = ["lambda w: w + 0.5", "lambda w: w - 0.5", "lambda w: w + 0.25", "lambda w: w + w.half"]
    texts += [f"lambda w: [x * {number} for x in w]" for number in (2, 3)]
    texts += [f"lambda w: (lambda x: x * {number})" for number in (2, 3)]
    found = [digest([eval(text)]) for text in texts]
    assert found == [digest([eval(text)]) for text in texts]
    assert len({*found, digest([None])}) == len(texts) + 1


def test_order_and_number_of_functions_count(solver):
    solve = solver()
    assert len({digest(each) for each in ([solve], [solve, None], [None, solve], [])}) == 4
