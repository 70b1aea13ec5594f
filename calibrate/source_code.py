"""The code of a function of the user's own: its file, and the files beside it that it uses."""

import hashlib
import inspect
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType

INSTALLED = {"site-packages", "dist-packages"}  # told apart by their versions


def digest(functions: list[Callable | None]) -> str:
    """Changes where the code of one of them does."""
    found = hashlib.sha256()
    for function in functions:
        for part in _parts(function):
            found.update(hashlib.sha256(part).digest())
    return found.hexdigest()


def _parts(function: Callable | None) -> list[bytes]:
    """What its files hold; its code where there are none, as in a notebook."""
    if function is None:
        return [b"-"]
    if isinstance(function, partial):
        return _parts(function.func)
    if not inspect.isroutine(function):
        function = type(function).__call__
    try:
        file = Path(inspect.getsourcefile(function))
        return [file.read_bytes(), *(other.read_bytes() for other in _helpers(function, file))]
    except (TypeError, OSError):
        code = getattr(function, "__code__", None)
        return [repr(_said(code) if code else function).encode()]


def _said(code: CodeType) -> tuple:
    """What a function typed in says, without where it was typed."""
    consts = [_said(x) if isinstance(x, CodeType) else x for x in code.co_consts]
    return code.co_code, code.co_names, consts


def _helpers(function: Callable, file: Path) -> list[Path]:
    """Files of its package, or below its folder, that its module uses, and theirs, in order."""
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
    """The modules that its names are, or come from."""
    used = []
    for value in list(vars(module).values()) if module is not None else ():
        if not isinstance(value, ModuleType):
            name = getattr(value, "__module__", None)
            value = sys.modules.get(name) if isinstance(name, str) else None
        if value is not None:
            used.append(value)
    return used
