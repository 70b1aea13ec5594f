"""The workers: everything that computes a step. Knows devices and steps, no requests.

One worker in this process today. Ranks of a model that is split over GPUs belong here: each gets
the same StepInput, and the engine above does not learn of them.
"""

import contextlib
import logging
from typing import Any

import torch
from tqdm import tqdm

from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from qkernels.gpu.device import INTERPRETED
from qkernels.gpu.launch import recorded_launches
from qserve.config import EngineConfig
from qserve.engine.cuda_graphs import CHUNK_SIZES
from qserve.engine.memory import (
    GIB,
    LESS_MEMORY,
    num_pages_in,
    num_pages_on_gpu,
    out_of_memory_is_named,
)
from qserve.engine.model_runner import ModelRunner, StepHandle
from qserve.engine.start_phases import phase
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
        self._max_model_len = max_model_len
        self._max_num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        device = _pick_device(config.device)
        if device.type == "cpu" and config.cpu_threads is not None:
            torch.set_num_threads(config.cpu_threads)
        # Where no kernel was compiled yet, its processes start while the model is loaded.
        self._compile_pool = _compile_pool(config, device)
        try:
            self.runner = self._load(config, model, device)
        except BaseException:
            if self._compile_pool is not None:
                self._compile_pool.close()
            raise
        self._warm_up: list[StepInput] = []  # filled by compile_kernels

    def _load(self, config: EngineConfig, model: ModelConfig, device: torch.device) -> ModelRunner:
        with (
            phase("Loading the model"),
            out_of_memory_is_named("loading the weights", "use a smaller or a quantized model"),
        ):
            if config.load_format == "dummy":
                source = DummySource(model, device, config.seed)
            else:
                source = WeightSource(CheckpointReader(config.model), model, device)
            decoder = load(
                model,
                source,
                device=device,
                dtype=_pick_dtype(config.dtype, model, device),
                max_model_len=self._max_model_len,
                kernels=config.kernels,
            )
            return ModelRunner(decoder, config, device)

    @property
    def computes_in_launch(self) -> bool:
        """`launch` returns when the step is done: a CPU has no queue of work."""
        return self.runner.device.type == "cpu"

    def compile_kernels(self, largest_step: StepInput) -> None:
        """Compile in parallel what steps up to the largest will launch. On a GPU alone.

        They run once with nothing launched, which tells what to compile.
        """
        if self._compile_pool is None:
            return
        runner = self.runner
        with phase("Planning the kernels"), torch.inference_mode():
            self._warm_up = runner.warm_up_steps(self._max_num_seqs, self._max_model_len)
            runner.allocate_pages(largest_step.block_tables_RX.shape[1])
            sample = runner.sample()
            with recorded_launches() as jobs:
                for step in [largest_step, *self._warm_up]:
                    sample.launch(step).result()
            runner.caches = []
        missing = self._compile_pool.missing(jobs.values())
        with (
            phase(f"Compiling {missing} of {len(jobs)} kernels")
            if missing
            else contextlib.nullcontext(),
            tqdm(total=missing, desc="Compiling kernels", disable=not missing) as bar,
        ):
            self._compile_pool.compile(jobs.values(), on_done=bar.update)

    def num_pages_that_fit(self, largest_step: StepInput) -> int:
        """KV pages that the memory holds. Raises InputError where it holds none."""
        config = self.runner.config
        if config.kv_cache_memory is not None:
            return num_pages_in(config.kv_cache_memory, self.runner, "--kv-cache-memory")
        if self.runner.device.type != "cuda":
            return num_pages_in(config.cpu_kv_cache_memory, self.runner, "--cpu-kv-cache-memory")
        graph_step = None if config.enforce_eager else self._graph_step()
        with phase("Measuring a largest step"), out_of_memory_is_named("measuring it", LESS_MEMORY):
            return num_pages_on_gpu(self.runner, largest_step, graph_step)

    def prepare(self, num_pages: int, longest_step: int) -> None:
        """Make the KV pages, load the kernels of steps up to the longest, and capture graphs."""
        runner = self.runner
        with out_of_memory_is_named(
            "making the KV pages", "lower --gpu-memory-utilization or --kv-cache-memory"
        ):
            runner.allocate_pages(num_pages)
        if runner.device.type != "cuda":
            return
        steps = self._warm_up or runner.warm_up_steps(self._max_num_seqs, self._max_model_len)
        with phase("Warming up"), torch.inference_mode():
            sample = runner.sample()
            for step in steps:
                if step.num_tokens <= longest_step:
                    sample.launch(step).result()
        self._warm_up = []
        if not runner.config.enforce_eager:
            self._capture_graphs()

    def free_unused(self) -> None:
        """Give back the device's memory that nothing uses, after it ran out."""
        if self.runner.device.type == "cuda":
            torch.cuda.empty_cache()

    def capture_next(self) -> bool:
        """Capture one more CUDA graph, in an idle moment. Returns False where none is left."""
        return self.runner.capture_next()

    def _capture_graphs(self) -> None:
        runner = self.runner
        torch.cuda.empty_cache()  # or what others gave back would count as the graphs' gain
        free, _ = torch.cuda.mem_get_info(runner.device)
        with (
            phase("Capturing the first CUDA graphs"),
            out_of_memory_is_named(
                "capturing CUDA graphs", "lower --gpu-memory-utilization, or use --enforce-eager"
            ),
        ):
            runner.capture_graphs(self._max_num_seqs, self._max_model_len)
        torch.cuda.empty_cache()
        left, _ = torch.cuda.mem_get_info(runner.device)
        graphs = runner.graphs
        logger.info(
            "CUDA graphs: %d of %d captured, %.2f GiB; the others follow when the engine is idle",
            graphs.num_captured,
            graphs.num_keys,
            (free - left) / GIB,
        )

    def _graph_step(self) -> StepInput:
        """As large as the largest step that a graph holds."""
        config, rows = self.runner.config, self._max_num_seqs
        tokens = min(CHUNK_SIZES[-1], config.max_num_batched_tokens)
        count = min(max(1, tokens // rows), self._max_model_len)
        return StepInput.padding(
            num_requests=rows, count=count, max_context_len=count, page_size=config.block_size
        )

    def launch(self, step: StepInput) -> StepHandle:
        """Start a step. Returns without waiting for it, where the device allows that."""
        return self.runner.launch(step)

    def logits(self, step: StepInput) -> torch.Tensor:
        """Logits [T, V] in float32 after every token of a step."""
        return self.runner.logits(step)


def _compile_pool(config: EngineConfig, device: torch.device) -> Any:
    """The CompilePool for a GPU; None: kernels are compiled where they are launched."""
    if device.type != "cuda" or INTERPRETED or config.compile_processes == 0:
        return None
    from qkernels.gpu.compile_pool import CompilePool  # loads triton, which a CPU may lack

    return CompilePool(config.compile_processes)


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
