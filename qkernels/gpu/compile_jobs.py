"""Compile jobs: a kernel launch as a line of JSON, from which another process compiles the kernel.

A job names the kernel and holds everything that Triton specializes on: the types of the arguments,
the values of integers, and all constants.
"""

import dataclasses
import enum
import hashlib
import importlib
import json
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.jit import MockTensor

from qkernels.gpu.cache_keys import settle_cache_keys

# Packages that a job may name modules and classes of; nothing else is imported by name.
TRUSTED = ("qkernels.", "triton.")
PLAIN = (bool, int, float, str)


class NotDescribable(ValueError):
    """Error for a launch that a compile job cannot hold."""


def describe_launch(kernel: Any, arguments: tuple, constants: dict[str, Any]) -> str:
    """Return the compile job of a launch.

    Raises NotDescribable if the job cannot hold an argument; that kernel compiles at its first
    launch.
    """
    job = {
        "module": kernel.fn.__module__,
        "kernel": kernel.fn.__qualname__,
        "arguments": [_encode(each) for each in arguments],
        "constants": {name: _encode(value) for name, value in constants.items()},
    }
    return json.dumps(job)


def compile_job(line: str) -> None:
    """Compile the kernel of a job for Triton's active driver, without launching it.

    The result goes to Triton's disk cache, where the process that described the launch finds it.
    """
    settle_cache_keys()
    job = json.loads(line)
    kernel = getattr(_trusted_module(job["module"]), job["kernel"])
    # Triton takes a torch.dtype as an argument for an aligned tensor of that type.
    arguments = [_decode(each) for each in job["arguments"]]
    constants = {name: _decode(value) for name, value in job["constants"].items()}
    compile_launcher(kernel.warmup(*arguments, grid=(1,), **constants))


def compile_launcher(compiled: Any) -> None:
    """Compile the host code that launches a kernel into Triton's cache, too.

    Triton 3.6 writes C code for each kind of launch and calls gcc, which takes 0.1 to 0.3 s. On 16
    cores this takes as long as the kernels. Later versions and other GPUs need no host code.
    """
    from triton.backends.nvidia import driver

    is_cuda = triton.runtime.driver.active.get_current_target().backend == "cuda"
    if is_cuda and hasattr(driver, "make_launcher"):
        driver.CudaLauncher(compiled.src, compiled.metadata)


def digest(line: str) -> str:
    """Return a short name for a job."""
    return hashlib.sha256(line.encode()).hexdigest()[:16]


class _Base:
    """Placeholder for a TMA descriptor's tensor: a dtype, and an address that passes the checks."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def data_ptr(self) -> int:
        return 0


def _encode(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in PLAIN:
        return value
    if hasattr(kind, "_fields") and _is_trusted(kind.__module__):
        name = f"{kind.__module__}:{kind.__qualname__}"
        return {"struct": name, "items": [_encode(each) for each in value]}
    if kind in (list, tuple, torch.Size):
        name = "list" if kind is list else "tuple"
        return {name: [_encode(each) for each in value]}
    if kind is torch.dtype:
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.Tensor):
        return {"torch": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, tl.dtype):
        return {"triton": value.name}
    if isinstance(value, tl.constexpr):
        return {"constexpr": _encode(value.value)}
    name = f"{kind.__module__}:{kind.__qualname__}"
    if isinstance(value, enum.Enum) and _is_trusted(kind.__module__):
        return {"enum": name, "value": value.name}
    if dataclasses.is_dataclass(value) and _is_trusted(kind.__module__):
        fields = {}
        for field in dataclasses.fields(value):
            found = getattr(value, field.name)
            if field.name == "base" and hasattr(found, "data_ptr"):
                fields[field.name] = {"base": _encode(found.dtype)}
            elif field.init:
                fields[field.name] = _encode(found)
        return {"class": name, "fields": fields}
    raise NotDescribable(f"a compile job cannot hold {name}")


def _decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "class" in value:
        fields = {name: _decode(each) for name, each in value["fields"].items()}
        return _trusted_class(value["class"])(**fields)
    if "struct" in value:
        items = [MockTensor.wrap_dtype(_decode(each)) for each in value["items"]]
        return _trusted_class(value["struct"])(*items)
    if "enum" in value:
        return _trusted_class(value["enum"])[value["value"]]
    ((kind, held),) = value.items()
    if kind in ("list", "tuple"):
        items = [_decode(each) for each in held]
        return items if kind == "list" else tuple(items)
    if kind == "torch":
        return getattr(torch, held)
    if kind == "triton":
        return tl.dtype(held)
    if kind == "constexpr":
        return tl.constexpr(_decode(held))
    return _Base(_decode(held))


def _is_trusted(module: str) -> bool:
    return f"{module}.".startswith(TRUSTED)


def _trusted_module(name: str) -> Any:
    if not _is_trusted(name):
        raise NotDescribable(f"a compile job may not name module {name}")
    return importlib.import_module(name)


def _trusted_class(name: str) -> Any:
    module, _, path = name.partition(":")
    found = _trusted_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def toolchain() -> str:
    """Return the versions that machine code depends on, apart from the job."""
    return f"triton {triton.__version__}"
