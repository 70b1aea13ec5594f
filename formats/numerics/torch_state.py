"""Torch's own defaults around this project's code, in programs that changed them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def torch_defaults(*, dtype: bool = True) -> Iterator[None]:
    """Make the CPU the default device and float32 the default dtype, and disable autocast.

    The caller's settings return at the end. The default dtype belongs to the whole process; the
    others belong to the thread. `dtype` False leaves the default dtype as it is, for calls that run
    while other threads run.
    """
    before = torch.get_default_dtype()
    with ExitStack() as changed:
        if torch.get_default_device().type != "cpu":
            changed.enter_context(torch.device("cpu"))
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                changed.enter_context(torch.autocast(kind, enabled=False))
        if dtype and before != torch.float32:
            torch.set_default_dtype(torch.float32)
            changed.callback(torch.set_default_dtype, before)
        yield
