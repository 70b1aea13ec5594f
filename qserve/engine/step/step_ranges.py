"""StepRanges: named profiler ranges of steps."""

from contextlib import AbstractContextManager, nullcontext

import torch

from qserve.engine.scheduling.plan import StepPlan

_NOTHING = nullcontext()


class StepRanges:
    """Off until `recording` is set; when off, a step costs one comparison."""

    def __init__(self) -> None:
        self.recording = False
        self.num_steps = 0  # since recording began

    def around(self, plan: StepPlan) -> AbstractContextManager:
        """The range in which a step is launched; its name describes the work."""
        if not self.recording:
            return _NOTHING
        decodes = sum([chunk.count == chunk.num_sampled for chunk in plan.chunks])
        prompts = sum([chunk.count for chunk in plan.chunks if chunk.count > chunk.num_sampled])
        return self.named(f"decode={decodes} chunk={prompts}")

    def named(self, what: str) -> AbstractContextManager:
        """The range of the next step."""
        name = f"step {self.num_steps} {what}"
        self.num_steps += 1
        return torch.profiler.record_function(name)
