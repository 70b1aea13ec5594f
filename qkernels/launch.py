"""Launching Triton kernels, and what every launch needs to know of its device. Knows no kernel."""

import contextlib
import functools
import importlib.metadata
import os
from typing import Any

import torch

from qkernels import tile_table
from qkernels.tile_table import TileTable
from qkernels.tiles import LINEAR_COUNTERS, LINEAR_WORKSPACE_FLOATS

# Triton's own switch, read by it at import: its interpreter knows no inline assembly.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# The first triton whose Gluon has what the kernels for Hopper use.
GLUON_TRITON = (3, 6)

# In Triton's interpreter there are no SMs; any small number exercises the same choices.
INTERPRETER_SM_COUNT = 4
INTERPRETER_SHARED_BYTES = 227 * 1024


@functools.cache
def sm_count(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETER_SM_COUNT
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one block may have."""
    if device.type != "cuda":
        return INTERPRETER_SHARED_BYTES
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@functools.cache
def tile_table_of(device: torch.device) -> TileTable:
    """The tiles that were measured on this GPU, or none. Raises KernelError for a damaged file."""
    if device.type != "cuda":
        return TileTable(gpu=device.type)
    gpu = torch.cuda.get_device_name(device)
    return tile_table.read(tile_table.default_path(gpu), gpu)


@functools.cache
def has_dependent_launch(device: torch.device) -> bool:
    """Whether a kernel may start while the one before it ends: sm_90 and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def lacks_gluon(device: torch.device) -> str | None:
    """Why kernels in Gluon for Hopper cannot run on `device`; None: they can.

    Where torch sees no GPU, a "cuda" device is taken for a Hopper one: only `explain` asks there.
    """
    if INTERPRETED:
        return "triton's interpreter knows no Gluon"
    if device.type != "cuda":
        return f"runs on cuda, not on {device.type}"
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(device)
        if capability != (9, 0):
            return f"written for sm_90, not sm_{capability[0]}{capability[1]}"
    version = importlib.metadata.version("triton")
    if tuple(int(part) for part in version.split(".")[:2]) < GLUON_TRITON:
        return f"written for triton {GLUON_TRITON[0]}.{GLUON_TRITON[1]} and later, not {version}"
    return None


# what a launch's arguments ask of a compiled kernel -> the kernel, what was compiled of it, and the
# values of its last parameters
_COMPILED: dict[tuple, tuple[Any, Any, tuple]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """kernel[grid](*arguments, **constants), at a fraction of the host's time from the second on.

    Triton describes every argument and option anew, as text, to find what it has compiled. Here
    they are looked up as they are: by all that it compiles anew for, and by the device. What is not
    told apart here (an address that 16 does not divide, an integer beyond 32 bits, an unknown type)
    goes Triton's way, as does the first of its kind. `arguments` are the kernel's first
    parameters, `constants` the others and Triton's options. Descriptors come from descriptors.py.
    """
    key = None if INTERPRETED else _launch_key(kernel, arguments, constants)
    if key is None:
        kernel[grid](*arguments, **constants)
    elif (found := _COMPILED.get(key)) is not None:
        _, compiled, rest = found
        compiled[(*grid, 1, 1)](*arguments, *rest)
    else:
        compiled = kernel[grid](*arguments, **constants)
        parameters = list(kernel.signature.parameters.values())[len(arguments) :]
        rest = tuple(constants.get(each.name, each.default) for each in parameters)
        _COMPILED[key] = kernel, compiled, rest


def _launch_key(kernel: Any, arguments: tuple, constants: dict[str, Any]) -> tuple | None:
    """What decides what Triton compiles; None: left to it."""
    kinds = [id(kernel), torch.cuda.current_device()]
    addresses = 0
    for argument in arguments:
        kind = type(argument)
        if kind is torch.Tensor:
            kinds.append(argument.dtype)
            addresses |= argument.data_ptr()
        elif kind is int:
            if not -(2**31) <= argument < 2**31:
                return None
            # 1 is compiled in, multiples of 16 are known as such
            kinds.append(-1 if argument == 1 else argument % 16 == 0)
        elif argument is None or kind is float:
            kinds.append(kind)
        elif hasattr(argument, "kind"):
            kinds.append(argument.kind)
        else:
            return None
    return None if addresses % 16 else (*kinds, *constants.items())


def on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """Triton launches on the current device, whatever its arguments; make it the tensor's."""
    if tensor.device.type != "cuda" or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


@functools.cache
def workspace(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial sums and counters of split products, one pair for each device, kept for good.

    A fixed size and place, so that captured CUDA graphs stay valid. Products on one device must
    follow each other, on one stream. A kernel leaves every counter at zero.
    """
    partials = torch.empty(LINEAR_WORKSPACE_FLOATS, dtype=torch.float32, device=device)
    return partials, torch.zeros(LINEAR_COUNTERS, dtype=torch.int32, device=device)
