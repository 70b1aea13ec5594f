"""PlannedKernels: the kernels of one rank that are compiled before their first launch."""

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm

from qkernels.gpu.cache_keys import hash_compiler
from qkernels.gpu.device import INTERPRETED
from qserve.config import EngineConfig
from qserve.engine.runner.compiling.start_record import StartRecord, start_key
from qserve.engine.runner.model_runner import ModelRunner
from qserve.engine.start_phases import phase
from qserve.model.cache_spec import WarmUpShape


def are_planned(config: EngineConfig, device: torch.device) -> bool:
    """Return True if kernels are compiled before their first launch."""
    if device.type != "cuda" or INTERPRETED or config.plain_kernel_launch:
        return False
    return config.compile_processes != 0


class PlannedKernels:
    """Compiles a rank's kernels in parallel, and records them for the next start."""

    def __init__(self, config: EngineConfig, *, compiles: bool) -> None:
        """`compiles`: True for rank 0; the other ranks find the result on disk.

        If no kernel is compiled yet, the compile processes start now, while the model loads.
        """
        threading.Thread(target=hash_compiler, name="compiler", daemon=True).start()
        self._pool = _compile_pool(config) if compiles else None
        self._record: StartRecord | None = None  # set by known_shapes
        self._jobs: Sequence[str] = ()  # set by compile

    def close(self) -> None:
        """End the compile processes."""
        if self._pool is not None:
            self._pool.close()

    def known_shapes(self, runner: ModelRunner, max_model_len: int) -> list[WarmUpShape] | None:
        """Return the warm-up shapes of an earlier start; None if a kernel of it is not compiled.

        `launched` writes the record that the next start reads here.
        """
        if self._pool is None:
            return None
        key = start_key(runner, max_model_len, self._pool.version)
        self._record = StartRecord(self._pool.folder, key)
        shapes = self._record.read(self._pool.done)
        if shapes is not None:
            self._pool.close()
        return shapes

    def compile(self, jobs: Sequence[str]) -> None:
        """Compile the kernels of some compile jobs, unless they are compiled."""
        self._jobs = jobs
        if self._pool is None:
            return
        missing = self._pool.missing(jobs)
        with (
            phase(f"Compiling {missing} of {len(jobs)} kernels")
            if missing
            else contextlib.nullcontext(),
            tqdm(total=missing, desc="Compiling kernels", disable=None if missing else True) as bar,
        ):
            self._pool.compile(jobs, on_done=bar.update)

    def launched(self, shapes: Sequence[WarmUpShape]) -> None:
        """Record that steps of these shapes have launched all kernels of `compile`."""
        if self._pool is None or not self._jobs:
            return
        self._pool.launched()
        if self._record is not None and not self._pool.missing(self._jobs):
            self._record.write(shapes, self._pool.digests(self._jobs))


def _compile_pool(config: EngineConfig) -> Any:
    from qkernels.gpu.compile_pool import CompilePool  # loads triton, which a CPU may lack

    return CompilePool(config.compile_processes)
