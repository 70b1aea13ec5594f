"""Recorder: torch's profiler around an engine's steps, with names of steps and layers.

Kernels that run inside a CUDA graph keep their names; layers are named where steps are launched
kernel by kernel. On a GPU the ranges are NVTX ranges as well and the profiler's span is that of
cudaProfilerStart and cudaProfilerStop, so that `nsys profile --capture-range=cudaProfilerApi`
records the same steps (with kind "cuda", since two profilers cannot run together).
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from formats.errors import InputError
from qserve.engine.engine import Engine

KINDS = ("torch", "cuda")


class Recorder:
    """One recording of one engine at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._profiler: torch.profiler.profile | None = None
        self._stack = contextlib.ExitStack()
        self._path: Path | None = None
        self.is_recording = False

    def start(self, path: Path, *, with_stack: bool = False, kind: str = "torch") -> None:
        """Record until `stop`, into `path` (a name that ends in .gz is compressed)."""
        if self.is_recording:
            raise InputError("profiler", "is recording already", "stop it first")
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        on_gpu = self._engine.runner.device.type == "cuda"
        if kind == "cuda":
            if not on_gpu:
                raise InputError("profiler cuda", "expected a GPU, found none", "use torch")
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStart()
            self._stack.enter_context(torch.autograd.profiler.emit_nvtx())
        else:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if on_gpu:
                torch.cuda.synchronize()
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities, with_stack=with_stack)
            self._profiler.start()
        self._stack.enter_context(_named_layers(self._engine))
        ranges = self._engine.step_ranges
        ranges.recording, ranges.num_steps = True, 0
        self.is_recording = True

    def stop(self) -> Path | None:
        """End it. Returns the trace's file; None where nothing was recording, or nsys has it."""
        if not self.is_recording:
            return None
        self.is_recording = self._engine.step_ranges.recording = False
        on_gpu = self._engine.runner.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize()
        self._stack.close()
        if self._profiler is None:
            torch.cuda.cudart().cudaProfilerStop()
            return None
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        profiler.export_chrome_trace(str(self._path))
        return self._path

    @property
    def num_steps(self) -> int:
        return self._engine.step_ranges.num_steps


@contextlib.contextmanager
def recorded(engine: Engine, path: Path, *, with_stack: bool = False) -> Iterator[None]:
    """Record what the block does."""
    recorder = Recorder(engine)
    recorder.start(path, with_stack=with_stack)
    try:
        yield
    finally:
        recorder.stop()


@contextlib.contextmanager
def _named_layers(engine: Engine) -> Iterator[None]:
    """Each layer and its parts as a range of the trace."""
    open_ranges: list[torch.profiler.record_function] = []
    handles = []

    def add(module: torch.nn.Module, name: str) -> None:
        def enter(*_: object) -> None:
            open_ranges.append(torch.profiler.record_function(name))
            open_ranges[-1].__enter__()

        def leave(*_: object) -> None:
            open_ranges.pop().__exit__(None, None, None)

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave))

    for index, layer in enumerate(engine.runner.decoder.layers):
        add(layer, f"layer {index}")
        for part, module in layer.named_children():
            add(module, f"layer {index} {part}")
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
