"""Replay: runs one step's forward pass repeatedly, for measurements."""

import torch

from qserve.engine.runner.graphs.capture import capture
from qserve.engine.runner.model_runner import ModelRunner
from qserve.engine.step.step_input import StepInput


class Replay:
    """One step's forward pass, prepared to run repeatedly for measurements.

    A decode or a short chunk runs in the engine's CUDA graph with its padding, as in serving. A
    longer step runs in a graph that is captured for it, or without a graph if graphs are disabled.
    With several ranks, each rank has its own Replay.
    """

    @torch.inference_mode()
    def __init__(self, runner: ModelRunner, step: StepInput, *, captures: bool) -> None:
        """`captures`: True if a graph may be captured for the step."""
        key = runner.graph_key_for(step)
        if key is not None:
            runner.graphs.fill_(key, step)
            self.graph = "engine"  # or "captured", or "none"
            self._run = lambda: runner.graphs.replay(key)
            return
        step, batch = runner.own_batch(step)
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
        """Launch the forward pass `count` times, back to back."""
        for _ in range(count):
            self._run()
