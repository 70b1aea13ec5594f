"""Recorder: runs torch's profiler on an engine's steps, with ranges for steps and layers.

Kernels inside a CUDA graph keep their names, but layer ranges exist only for steps without a graph.

The kind "cuda" is for nsys, since two profilers cannot run together: it emits NVTX ranges and calls
cudaProfilerStart and cudaProfilerStop, so that `nsys profile --capture-range=cudaProfilerApi`
records the same steps.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch

from formats.errors import InputError


class ProfiledRunner(Protocol):
    """The attributes of ModelRunner that Recorder uses."""

    device: torch.device
    decoder: torch.nn.Module  # has `layers`


class Ranges(Protocol):
    """The attributes of StepRanges that Recorder uses: ranges of steps, on while recording."""

    recording: bool
    num_steps: int


class Recorder:
    """Records steps of one engine, one recording at a time."""

    def __init__(self, runner: ProfiledRunner, ranges: Ranges) -> None:
        self._runner, self._ranges = runner, ranges
        self._profiler: torch.profiler.profile | None = None
        self._stack = contextlib.ExitStack()
        self._path: Path | None = None
        self.is_recording = False

    def start(self, path: Path, *, with_stack: bool = False, kind: str = "torch") -> None:
        """Record until `stop`. The trace goes to `path`, compressed if the name ends in .gz."""
        if self.is_recording:
            raise InputError("profiler", "is already recording", "stop it first")
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        on_gpu = self._runner.device.type == "cuda"
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
        self._stack.enter_context(_named_layers(self._runner))
        self._ranges.recording, self._ranges.num_steps = True, 0
        self.is_recording = True

    def stop(self) -> Path | None:
        """Stop. Returns the trace's file; None if there was no recording, or if nsys records."""
        if not self.is_recording:
            return None
        self.is_recording = self._ranges.recording = False
        on_gpu = self._runner.device.type == "cuda"
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
        return self._ranges.num_steps


@contextlib.contextmanager
def recorded(recorder: Recorder, path: Path, *, with_stack: bool = False) -> Iterator[None]:
    """Record the steps inside the `with` block."""
    recorder.start(path, with_stack=with_stack)
    try:
        yield
    finally:
        recorder.stop()


@contextlib.contextmanager
def _named_layers(runner: ProfiledRunner) -> Iterator[None]:
    """Add a range to the trace for each layer and each of its submodules."""
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

    for index, layer in enumerate(runner.decoder.layers):
        add(layer, f"layer {index}")
        for part, module in layer.named_children():
            add(module, f"layer {index} {part}")
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
