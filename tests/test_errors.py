"""Every error that a user can cause names its remedy."""

import ast
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("formats", "qkernels", "calibrate", "qserve")
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]

# KernelError states which arguments an operation takes: no user of a command can cause it.
# FetchError's constructor adds a remedy if none is given.
OTHERS = ("KernelError", "FetchError")


def error_classes(trees: Iterable[ast.AST]) -> set[str]:
    """Return InputError and the classes derived from it, except OTHERS."""
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    classes = [each for each in classes if each.name not in OTHERS]
    found, last = {"InputError"}, set[str]()
    while found != last:
        last = set(found)
        found |= {
            each.name
            for each in classes
            if any(isinstance(base, ast.Name) and base.id in last for base in each.bases)
        }
    return found


def without_remedy(tree: ast.AST, classes: set[str]) -> list[int]:
    """Return the lines that construct one of these errors without a remedy."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [each for each in calls if isinstance(each.func, ast.Name) and each.func.id in classes]
    return [
        each.lineno
        for each in named
        if len(each.args) < 3
        and not any(isinstance(arg, ast.Starred) for arg in each.args)
        and "remedy" not in {keyword.arg for keyword in each.keywords}
    ]


def test_every_error_has_a_remedy():
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in FILES}
    # parsing all files would take several times as long
    trees = {name: ast.parse(text) for name, text in texts.items() if "Error" in text}
    classes = error_classes(trees.values())
    assert {
        "CheckpointError",
        "SchemeError",
        "SolverError",
        "ParameterError",
        "TextError",
    } <= classes
    found = {name: without_remedy(tree, classes) for name, tree in trees.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_missing_remedies_are_found():
    code = (
        "class SomeError(InputError): pass\nclass OtherError(SomeError): pass\n"
        'raise InputError("a", "b")\nraise InputError("a", "b", "c")\nOtherError("a", "b")\n'
        'OtherError("a", "b", remedy="c")\nOtherError(*parts)\nValueError("a")\n'
    )
    tree = ast.parse(code)
    assert without_remedy(tree, error_classes([tree])) == [3, 5]
