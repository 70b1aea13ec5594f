"""Replay: one step's model pass, prepared to run again and again, for who measures it.

A decode or a short chunk runs in the worker's own CUDA graph, with its padding, as serving does; a
longer one in a graph that is captured for it, or kernel by kernel where graphs are not wanted.
"""

import torch

from qserve.engine.capture import capture
from qserve.engine.model_runner import ModelRunner
from qserve.engine.step_input import StepInput


class Replay:
    """Of one worker; where there are other ranks, each makes its own of the same step."""

    @torch.inference_mode()
    def __init__(self, runner: ModelRunner, step: StepInput, *, captures: bool) -> None:
        """`captures`: whether a graph may be captured for it."""
        key = None if runner.graphs is None else runner.graphs.key_for(step)
        if key is not None:
            runner.graphs.fill_(key, step)
            self.graph = "engine"  # or "captured", or "none"
            self._run = lambda: runner.graphs.replay(key)
            return
        batch = runner.batch_of(step)
        self.graph, self._run = "none", lambda: runner.forward_logits(batch, step)
        if captures:
            self._run()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with capture(graph):
                self._run()
            self.graph, self._run = "captured", graph.replay

    @torch.inference_mode()
    def run(self, count: int) -> None:
        """Launch it so many times, back to back."""
        for _ in range(count):
            self._run()
