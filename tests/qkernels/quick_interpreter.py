"""Triton's interpreter without work whose results it throws away, or that it repeats.

That is more than half of its time. What a kernel computes stays the same.
"""

import dataclasses
import sys
from functools import cache

import pytest
from triton import language
from triton.language import core
from triton.runtime import interpreter


def patch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace parts of the interpreter that its version has."""
    # Each sum of integers is followed by its test in int64, which asserts only in debug mode.
    builder = interpreter.interpreter_builder
    without_tests = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    monkeypatch.setattr(builder, "options", without_tests)
    if hasattr(interpreter, "_LangPatchScope"):
        _patch_language_once(monkeypatch)
    _keep_types(monkeypatch)


def _patch_language_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It replaces the functions of triton.language for a launch.

    And looks again through all of them at each call of a function that is not inlined.
    """
    patch_language = interpreter._patch_lang

    @cache
    def seen_in(module: str) -> list:
        values = list(vars(sys.modules[module]).values())
        return [lang for lang in (language, core) if any(v is lang for v in values)]

    def patch_where_needed(fn):
        if any(core.is_builtin(lang.load) for lang in seen_in(fn.__module__)):
            return patch_language(fn)
        return interpreter._LangPatchScope()

    monkeypatch.setattr(interpreter, "_patch_lang", patch_where_needed)


def _keep_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy's type of a type is looked up in a table that is made anew for each look."""
    numpy_type = interpreter._get_np_dtype
    of_scalar = cache(numpy_type)

    def numpy_type_of(dtype):
        scalar = dtype.scalar
        return numpy_type(scalar) if scalar.is_ptr() else of_scalar(scalar)

    monkeypatch.setattr(interpreter, "_get_np_dtype", numpy_type_of)
