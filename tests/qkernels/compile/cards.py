"""Simulated GPU: kernels that are launched on it are compiled and kept, but not run.

Imported first by a process of its own (compile_cases.py): it replaces what qkernels asks its GPU,
before the kernels' modules take these functions by name.
"""

from dataclasses import dataclass, replace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from formats.in_memory.packed import PackedWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Properties of a GPU that the host code reads."""

    capability: tuple[int, int]
    sm_count: int
    shared_kb: int  # of one block

    @property
    def arch(self) -> int:
        major, minor = self.capability
        return 10 * major + minor


CARDS = {
    "sm_80": Card(capability=(8, 0), sm_count=108, shared_kb=163),  # A100
    "sm_89": Card(capability=(8, 9), sm_count=128, shared_kb=99),  # RTX 4090
    "sm_90": Card(capability=(9, 0), sm_count=132, shared_kb=227),  # H100, H200
    "sm_100": Card(capability=(10, 0), sm_count=148, shared_kb=227),  # B200
    "sm_120": Card(capability=(12, 0), sm_count=170, shared_kb=99),  # RTX 5090
}
# what was launched, in order: the kernel's name and what it was compiled to
compiled: list[tuple[str, object]] = []


class _Driver:
    """Methods of a driver that Triton calls to compile."""

    def __init__(self, card: Card) -> None:
        self.target = GPUTarget("cuda", card.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


def pretend(card: Card) -> None:
    """From now on, treat tensors on the CPU as tensors on such a card."""
    from qkernels import problem
    from qkernels.gpu import device, launch

    here = f"sm_{card.arch}"
    device.sm_count = lambda of: card.sm_count
    device.shared_bytes = lambda of: card.shared_kb * 1024
    device.arch = lambda of: here
    device.has_pdl = lambda of: card.capability >= (9, 0)
    device.has_tma = lambda of: card.capability >= (9, 0)
    device.lacks_arch = lambda of, wanted: None if wanted == here else f"for {wanted}, not {here}"
    problem.has_float8_products = lambda: card.capability >= (8, 9)
    launch.INTERPRETED = True  # every launch goes to Triton, whatever was compiled before
    triton.runtime.driver.set_active(_Driver(card))
    JITFunction.__getitem__ = _compile_only
    from qkernels import dispatch

    choose = dispatch.choose
    dispatch.choose = lambda op, problem: choose(op, replace(problem, device="cuda"))
    _order_no_codes()


def _order_no_codes() -> None:
    """Give prepacked weights only their shapes: ordering codes takes longer than compiling."""
    from qkernels.wna16 import prepack

    PackedWeight.codes = lambda packed: torch.empty(
        packed.out_features, packed.in_features, dtype=torch.uint8
    )
    prepack.fragment_order = lambda codes_NK: _words(codes_NK, 8)
    prepack.byte_order = lambda codes_NK: _words(codes_NK, 4)


def _words(codes_NK: torch.Tensor, codes_of_word: int) -> torch.Tensor:
    N, K = codes_NK.shape
    return torch.empty(N, K // codes_of_word, dtype=torch.int32)


def _compile_only(kernel: JITFunction, grid: tuple[int, ...]):
    def launch(*arguments, **constants) -> None:
        made = kernel.run(*arguments, grid=grid, warmup=True, **constants)
        module = kernel.fn.__module__.removeprefix("qkernels.")
        compiled.append((f"{module}.{kernel.fn.__name__}", made))

    return launch


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return an uninitialised tensor, since no kernel reads its values."""
    return torch.empty(shape, dtype=dtype)
