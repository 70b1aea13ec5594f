"""Launching Triton kernels in a fraction of the host time that Triton itself takes."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from qkernels.gpu.cache_keys import settle_cache_keys
from qkernels.gpu.device import INTERPRETED

# launch key -> the kernel, its compiled form, and the values of its last parameters
_COMPILED: dict[tuple, tuple[Any, Any, tuple]] = {}
# launch key -> its compile job, while launches are recorded; None: they are not
_RECORDED: dict[tuple, str] | None = None


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """kernel[grid](*arguments, **constants), in a fraction of the host time from the second call.

    For each launch Triton describes all arguments and options as text, to find the compiled kernel.
    Here a tuple finds it: the device, and everything that Triton specializes on. A launch that the
    tuple cannot describe (an address not divisible by 16, an integer beyond 32 bits, an unknown
    type) goes through Triton, as does the first of each kind. `arguments` are the kernel's first
    parameters, `constants` the others and Triton's options. Descriptors come from gpu/tma.py.
    """
    key = None if INTERPRETED else _launch_key(kernel, arguments, constants)
    if _RECORDED is not None:
        _record(key, kernel, arguments, constants)
    elif (found := _COMPILED.get(key)) is not None:
        _, compiled, rest = found
        compiled[(*grid, 1, 1)](*arguments, *rest)
    else:
        settle_cache_keys()
        compiled = kernel[grid](*arguments, **constants)
        if key is not None:
            parameters = list(kernel.signature.parameters.values())[len(arguments) :]
            rest = tuple(constants.get(each.name, each.default) for each in parameters)
            _COMPILED[key] = kernel, compiled, rest


@contextlib.contextmanager
def recorded_launches() -> Iterator[dict[tuple, str]]:
    """Within it nothing is launched: what would be is collected, as compile jobs by launch key.

    Results of kernels hold anything meanwhile. One thread at a time.
    """
    global _RECORDED
    _RECORDED = {}
    try:
        yield _RECORDED
    finally:
        _RECORDED = None


def launches_nothing() -> bool:
    """Whether launches are recorded: what reads their results gets anything."""
    return _RECORDED is not None


def _record(key: tuple | None, kernel: Any, arguments: tuple, constants: dict[str, Any]) -> None:
    if key is None or key in _RECORDED or key in _COMPILED:
        return
    from qkernels.gpu.compile_jobs import NotDescribable, describe_launch  # imports triton

    # Else it is compiled when it is launched.
    with contextlib.suppress(NotDescribable):
        _RECORDED[key] = describe_launch(kernel, arguments, constants)


def _launch_key(kernel: Any, arguments: tuple, constants: dict[str, Any]) -> tuple | None:
    """Everything that Triton specializes on; None: the launch goes through Triton."""
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
            # Triton compiles 1 in, and specializes on divisibility by 16
            kinds.append(-1 if argument == 1 else argument % 16 == 0)
        elif argument is None or kind is float:
            kinds.append(kind)
        elif hasattr(argument, "kind"):
            kinds.append(argument.kind)
        else:
            return None
    return None if addresses % 16 else (*kinds, *constants.items())


def on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """Makes the tensor's device current: Triton launches there, wherever its arguments are."""
    if tensor.device.type != "cuda" or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)
