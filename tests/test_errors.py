"""Every error that a user, or a client of the server, can cause names its remedy."""

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("formats", "qkernels", "calibrate", "qserve")
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]

# FetchError's constructor adds a remedy if none is given.
OTHERS = ("FetchError",)
# Errors of the server and of the validators of its requests -> index of the argument `remedy`.
# `ApiError.relayed` is for messages that already end with a remedy.
REPLIES = {"ApiError": 2, "StoreError": 2, "field_error": 1}


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


def without_remedy(tree: ast.AST, places: Mapping[str, int]) -> list[int]:
    """Return the lines that construct one of these errors without a remedy.

    `places`: index of the argument `remedy`, by the name of the class or function.
    """
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [each for each in calls if isinstance(each.func, ast.Name) and each.func.id in places]
    return [
        each.lineno
        for each in named
        if len(each.args) <= places[each.func.id]
        and not any(isinstance(arg, ast.Starred) for arg in each.args)
        and "remedy" not in {keyword.arg for keyword in each.keywords}
    ]


def with_empty_remedy(tree: ast.AST, places: Mapping[str, int]) -> list[int]:
    """Return the lines whose remedy is the empty text."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [
        each.lineno
        for each in calls
        if isinstance(each.func, ast.Name)
        and each.func.id in places
        and len(each.args) > places[each.func.id]
        and ast.unparse(each.args[places[each.func.id]]) in ("''", "f''")
    ]


def parsed(word: str) -> dict[str, ast.AST]:
    """Return the files that contain a word; parsing all would take several times as long."""
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in FILES}
    return {name: ast.parse(text) for name, text in texts.items() if word in text}


def test_every_error_has_a_remedy():
    trees = parsed("Error")
    classes = error_classes(trees.values())
    assert {
        "CheckpointError",
        "KernelError",
        "SchemeError",
        "SolverError",
        "ParameterError",
        "TextError",
    } <= classes
    places = dict.fromkeys(classes, 2)
    found = {name: without_remedy(tree, places) for name, tree in trees.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_every_reply_of_the_server_has_a_remedy():
    trees = parsed("Error") | parsed("field_error")
    found = {
        name: without_remedy(tree, REPLIES) + with_empty_remedy(tree, REPLIES)
        for name, tree in trees.items()
    }
    assert {name: lines for name, lines in found.items() if lines} == {}
    # validators raise field_error, whose remedy becomes part of the reply
    makers = list(parsed("PydanticCustomError("))
    assert makers == ["qserve/server/requests/field_errors.py"]


def test_missing_remedies_are_found():
    code = (
        "class SomeError(InputError): pass\nclass OtherError(SomeError): pass\n"
        'raise InputError("a", "b")\nraise InputError("a", "b", "c")\nOtherError("a", "b")\n'
        'OtherError("a", "b", remedy="c")\nOtherError(*parts)\nValueError("a")\n'
    )
    tree = ast.parse(code)
    assert without_remedy(tree, dict.fromkeys(error_classes([tree]), 2)) == [3, 5]
    code = (
        'ApiError(400, "a.", "b.")\nApiError(400, "a.", param="x")\nApiError(400, "a.", "", "x")\n'
        'ApiError.relayed(400, "a (b)")\nfield_error("a")\nfield_error("a", "b")\n'
    )
    tree = ast.parse(code)
    assert without_remedy(tree, REPLIES) == [2, 5] and with_empty_remedy(tree, REPLIES) == [3]
