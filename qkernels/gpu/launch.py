"""Launch Triton kernels with a fraction of the host time that Triton itself takes."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from qkernels.gpu.cache_keys import settle_cache_keys
from qkernels.gpu.device import INTERPRETED

# launch key -> the kernel, the compiled kernel, and the values of its last parameters
_COMPILED: dict[tuple, tuple[Any, Any, tuple]] = {}
# launch key -> compile job, while launches are recorded; None: kernels run
_RECORDED: dict[tuple, str] | None = None
_PLAIN = False  # set by set_plain_launches


def set_plain_launches(plain: bool) -> None:
    """Launch every kernel of this process directly through Triton, as `kernel[grid](...)`.

    For finding out whether `launch` or a kernel is at fault: an error that also occurs with plain
    launches is not the launcher's. Each launch takes several times as much host time.
    """
    global _PLAIN
    _PLAIN = plain


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run kernel[grid](*arguments, **constants), with little host time from the second call on.

    At each launch, Triton builds a text of all arguments and options to look up the compiled
    kernel. Here the look-up key is a tuple: the device and everything that Triton specializes on.
    Three kinds of launches go through Triton itself:

    - the first launch of its kind;
    - one that the tuple cannot describe (an address not divisible by 16, an integer beyond 32 bits,
      an unknown type);
    - all launches after set_plain_launches(True).

    `arguments` are the kernel's first parameters; `constants` are the others and Triton's options.
    TMA descriptors must come from gpu/tma.py.
    """
    key = None if INTERPRETED or _PLAIN else _launch_key(kernel, arguments, constants)
    if _RECORDED is not None:
        _record(key, kernel, arguments, constants)
    elif (found := _COMPILED.get(key)) is not None:
        _, compiled, rest = found
        compiled[(*grid, 1, 1)](*arguments, *rest)
    elif _PLAIN:
        kernel[grid](*arguments, **constants)
    else:
        settle_cache_keys()
        compiled = kernel[grid](*arguments, **constants)
        if key is not None:
            parameters = list(kernel.signature.parameters.values())[len(arguments) :]
            rest = tuple(constants.get(each.name, each.default) for each in parameters)
            _COMPILED[key] = kernel, compiled, rest


@contextlib.contextmanager
def recorded_launches() -> Iterator[dict[tuple, str]]:
    """Record launches as compile jobs, by launch key, instead of running them.

    Results of kernels are undefined meanwhile. Only one thread may launch kernels.
    """
    global _RECORDED
    _RECORDED = {}
    try:
        yield _RECORDED
    finally:
        _RECORDED = None


def launches_nothing() -> bool:
    """Return True while launches are recorded, when the results of kernels are undefined."""
    return _RECORDED is not None


def _record(key: tuple | None, kernel: Any, arguments: tuple, constants: dict[str, Any]) -> None:
    if key is None or key in _RECORDED or key in _COMPILED:
        return
    from qkernels.gpu.compile_jobs import NotDescribable, describe_launch  # imports triton

    # a kernel whose launch cannot be described compiles at its first launch
    with contextlib.suppress(NotDescribable):
        _RECORDED[key] = describe_launch(kernel, arguments, constants)


def _launch_key(kernel: Any, arguments: tuple, constants: dict[str, Any]) -> tuple | None:
    """Return everything that Triton specializes on; None: the launch must go through Triton."""
    kinds = [id(kernel), torch.cuda.current_device()]
    addresses = 0
    for argument in _flat(arguments):
        kind = type(argument)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            kinds.append(argument.dtype)
            addresses |= argument.data_ptr()
        elif kind is int:
            if not -(2**31) <= argument < 2**31:
                return None
            # Triton compiles 1 in, and specializes on divisibility by 16
            kinds.append(-1 if argument == 1 else argument % 16 == 0)
        elif kind is type:  # the class of a struct, whose fields follow
            kinds.append(argument)
        elif argument is None or kind is float:
            kinds.append(kind)
        elif hasattr(argument, "kind"):
            kinds.append(argument.kind)
        else:
            return None
    return None if addresses % 16 else (*kinds, *constants.items())


def _flat(arguments: tuple) -> list:
    """Return the arguments, with each named tuple replaced by its class and its fields."""
    flat = []
    for argument in arguments:
        if isinstance(argument, tuple):
            flat += (type(argument), *argument)
        else:
            flat.append(argument)
    return flat


def on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """Make the tensor's device current: Triton ignores the arguments' device."""
    if tensor.device.type != "cuda" or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)
