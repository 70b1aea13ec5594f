"""Launching Triton kernels at a fraction of Triton's own host time. Knows no operation."""

import contextlib
from typing import Any

import torch

from qkernels.gpu.device import INTERPRETED

# what a launch's arguments ask of a compiled kernel -> the kernel, what was compiled of it, and the
# values of its last parameters
_COMPILED: dict[tuple, tuple[Any, Any, tuple]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """kernel[grid](*arguments, **constants), at a fraction of the host's time from the second on.

    Triton describes every argument and option anew, as text, to find what it has compiled. Here
    they are looked up as they are: by all that it compiles anew for, and by the device. What is not
    told apart here (an address that 16 does not divide, an integer beyond 32 bits, an unknown type)
    goes Triton's way, as does the first of its kind. `arguments` are the kernel's first
    parameters, `constants` the others and Triton's options. Descriptors come from gpu/tma.py.
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
