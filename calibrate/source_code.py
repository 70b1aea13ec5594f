"""Code of a user's function: its file, the files next to it that it uses, and bound values."""

import hashlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch

from calibrate.digest import tensor_digest

INSTALLED = {"site-packages", "dist-packages"}  # identified by their versions


def digest(functions: list[Callable | None]) -> str:
    """Hash that changes with the code of one of the functions, or with a value bound to it."""
    found = hashlib.sha256()
    for function in functions:
        for part in _parts(function):
            found.update(hashlib.sha256(part).digest())
    return found.hexdigest()


def _parts(function: Callable | None) -> list[bytes]:
    """Contents of its files; its code if there are none, as in a notebook."""
    if function is None:
        return [b"-"]
    if isinstance(function, partial):
        bound = [_said_of((function.args, function.keywords))]
        return _parts(function.func) + bound * bool(function.args or function.keywords)
    bound = []
    if not inspect.isroutine(function):
        bound = [_said_of(getattr(function, "__dict__", {}))]
        function = type(function).__call__
    try:
        file = Path(inspect.getsourcefile(function))
        helpers = [other.read_bytes() for other in _helpers(function, file)]
        return [function.__qualname__.encode(), *bound, file.read_bytes(), *helpers]
    except (TypeError, OSError):
        code = getattr(function, "__code__", None)
        return [repr(_said(code) if code else function).encode()]


def _said_of(value: Any) -> bytes:
    """A bound value, the same in every process; for an unknown object, its type."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value).encode()
    if isinstance(value, Mapping):
        value = sorted(value.items(), key=lambda item: str(item[0]))
    elif is_dataclass(value) and not isinstance(value, type):
        value = [(each.name, getattr(value, each.name)) for each in fields(value)]
    elif isinstance(value, torch.Tensor):
        return tensor_digest(value).encode()
    elif callable(value) and not isinstance(value, type):
        return b"".join(_parts(value))
    if isinstance(value, list | tuple):
        return b"(" + b",".join(_said_of(each) for each in value) + b")"
    return type(value).__qualname__.encode()


def _said(code: CodeType) -> tuple:
    """Contents of a function that was typed in, without its position."""
    consts = [_said(x) if isinstance(x, CodeType) else x for x in code.co_consts]
    return code.co_code, code.co_names, consts


def _helpers(function: Callable, file: Path) -> list[Path]:
    """Files in its package or below its folder that its module uses, recursively, in order."""
    root = file.parent
    while (root / "__init__.py").exists() and (root.parent / "__init__.py").exists():
        root = root.parent
    if root.name in INSTALLED:
        return []
    found, waiting = {file}, [inspect.getmodule(function)]
    while waiting:
        for other in _used_by(waiting.pop()):
            name = getattr(other, "__file__", None)
            path = Path(name) if name else None
            if path is None or path in found or path.suffix != ".py":
                continue
            if path.is_relative_to(root) and not INSTALLED & {*path.relative_to(root).parts}:
                found.add(path)
                waiting.append(other)
    return sorted(found - {file})


def _used_by(module: ModuleType | None) -> list[ModuleType]:
    """Modules that its names are, or come from."""
    used = []
    for value in list(vars(module).values()) if module is not None else ():
        if not isinstance(value, ModuleType):
            name = getattr(value, "__module__", None)
            value = sys.modules.get(name) if isinstance(name, str) else None
        if value is not None:
            used.append(value)
    return used
