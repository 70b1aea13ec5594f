"""The workers: everything that computes a step. Knows devices and steps, no requests.

One worker in this process today. Ranks of a model that is split over GPUs belong here: each gets
the same StepInput, and the engine above does not learn of them.
"""

import logging
import time

import torch

from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.engine.model_runner import (
    ModelRunner,
    StepHandle,
    num_pages_on_cpu,
    num_pages_on_gpu,
)
from qserve.engine.step_input import StepInput
from qserve.model.dummy_source import DummySource
from qserve.model.loader import load
from qserve.model.model_config import ModelConfig
from qserve.model.weight_source import WeightSource

logger = logging.getLogger(__name__)


class WorkerGroup:
    """A loaded model, ready for steps once it has pages."""

    def __init__(self, config: EngineConfig, model: ModelConfig, max_model_len: int) -> None:
        """Load the model. Raises InputError."""
        device = _pick_device(config.device)
        if device.type == "cpu" and config.cpu_threads is not None:
            torch.set_num_threads(config.cpu_threads)
        started = time.perf_counter()
        if config.load_format == "dummy":
            source = DummySource(model, device, config.seed)
        else:
            source = WeightSource(CheckpointReader(config.model), model)
        decoder = load(
            model,
            source,
            device=device,
            dtype=_pick_dtype(config.dtype, model, device),
            max_model_len=max_model_len,
            kernels=config.kernels,
        )
        logger.info("Loading the model took %.1f s", time.perf_counter() - started)
        self.runner = ModelRunner(decoder, config, device)

    @property
    def computes_in_launch(self) -> bool:
        """`launch` returns when the step is done: a CPU has no queue of work."""
        return self.runner.device.type == "cpu"

    def num_pages_that_fit(self, largest_step: StepInput) -> int:
        """KV pages that the memory holds. Raises InputError where it holds none."""
        if self.runner.device.type == "cuda":
            return num_pages_on_gpu(self.runner, largest_step)
        return num_pages_on_cpu(self.runner)

    def prepare(self, num_pages: int, longest_step: int, max_num_seqs: int, max_len: int) -> None:
        """Make the KV pages, compile kernels for steps up to the longest, and capture graphs."""
        self.runner.allocate_pages(num_pages)
        if self.runner.device.type == "cuda":
            self.runner.warm_up(longest_step, max_num_seqs, max_len)
            if not self.runner.config.enforce_eager:
                self.runner.capture_graphs(max_num_seqs, max_len)

    def launch(self, step: StepInput) -> StepHandle:
        """Start a step. Returns without waiting for it, where the device allows that."""
        return self.runner.launch(step)

    def logits(self, step: StepInput) -> torch.Tensor:
        """Logits [T, V] in float32 after every token of a step."""
        return self.runner.logits(step)


def _pick_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda", "torch finds no CUDA GPU", "use --device cpu")
    return torch.device(name)


def _pick_dtype(name: str, model: ModelConfig, device: torch.device) -> torch.dtype:
    if name != "auto":
        return getattr(torch, name)
    # A CPU computes float32 at least as fast, and exactly as the reference does.
    return torch.float32 if device.type == "cpu" else model.dtype
