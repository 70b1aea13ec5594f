"""A worker: one rank's part of the model, on one device. Knows steps, no requests.

Every rank makes the same calls in the same order, since most of them compute a step together.
"""

import contextlib
import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from formats.checkpoint import CheckpointReader
from qkernels.gpu.device import INTERPRETED
from qkernels.gpu.launch import recorded_launches
from qserve.config import EngineConfig
from qserve.engine.cuda_graphs import CHUNK_SIZES
from qserve.engine.devices import pick_dtype
from qserve.engine.memory import (
    GIB,
    LESS_MEMORY,
    num_pages_in,
    num_pages_on_gpu,
    weight_bytes,
)
from qserve.engine.model_runner import ModelRunner, StepHandle
from qserve.engine.out_of_memory import out_of_memory_is_named
from qserve.engine.replay import Replay
from qserve.engine.start_phases import phase
from qserve.engine.step_input import StepInput
from qserve.engine.warm_up import WarmUpShape, warm_up_step, with_adapters
from qserve.kv_transfer.connector import make_connector
from qserve.kv_transfer.rank_pages import RankPages
from qserve.lora.layout import AdapterLayout
from qserve.lora.rank_adapters import RankAdapters
from qserve.lora.slot_memory import SlotMemory
from qserve.model.decoder import Decoder
from qserve.model.dummy_source import DummySource
from qserve.model.kv_format import refuse_attention_without_kernel
from qserve.model.loader import load
from qserve.model.model_config import ModelConfig
from qserve.model.weight_source import WeightSource
from qserve.parallel.ranks import ALONE, Ranks
from qserve.speculation.drafter import BuildContext, build_device_drafter
from qserve.speculation.speculator import Speculator

logger = logging.getLogger(__name__)


class Worker:
    """A loaded model, or a rank's part of one, ready for steps once it has pages."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        max_model_len: int,
        device: torch.device,
        ranks: Ranks = ALONE,
    ) -> None:
        """Load the model. Raises InputError."""
        self._max_model_len = max_model_len
        self._max_num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._ranks = ranks
        self._uses_graphs = not config.enforce_eager and ranks.pipeline is None
        self._plans_kernels = _plans_kernels(config, device)
        # Where no kernel was compiled yet, its processes start while the model is loaded. One rank
        # compiles; the others find the result on disk.
        self._compile_pool = None
        self.adapters: RankAdapters | None = None  # filled below where they are wanted
        self.pages: RankPages | None = None  # open_pages fills it
        self.replay: Replay | None = None  # prepare_replay fills it
        if self._plans_kernels and ranks.rank == 0:
            self._compile_pool = _compile_pool(config)
        try:
            self.runner = self._load(config, model, device)
        except BaseException:
            if self._compile_pool is not None:
                self._compile_pool.close()
            raise

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
                dtype=pick_dtype(config.dtype, model, device),
                max_model_len=self._max_model_len,
                progress=self._ranks.rank == 0,
                kernels=config.kernels,
                ranks=self._ranks,
            )
            speculator = self._speculator(config, decoder, device)
            runner = ModelRunner(decoder, config, device, speculator, self._ranks)
            if self._uses_graphs and device.type == "cuda":
                refuse_attention_without_kernel(
                    decoder, runner.kv_format, config.block_size, device.type
                )
            if config.enable_lora:
                runner.adapters = SlotMemory(
                    decoder,
                    AdapterLayout(model, decoder.parts, decoder.layer_numbers),
                    num_slots=config.max_loras,
                    max_rank=config.max_lora_rank,
                )
                self.adapters = RankAdapters(runner.adapters, decoder.dtype, device)
                self._reader = ThreadPoolExecutor(1, "adapters")
                logger.info(
                    "Adapters: %d slots of rank %d, %.2f GiB",
                    config.max_loras,
                    config.max_lora_rank,
                    runner.adapters.num_bytes / GIB,
                )
            return runner

    def _speculator(
        self, config: EngineConfig, target: Decoder, device: torch.device
    ) -> Speculator | None:
        """What drafts: each rank that draws tokens has all of a drafter, but of `mtp` its share."""
        if config.speculation is None:
            return None
        context = BuildContext(
            config=config.speculation,
            target=target,
            target_folder=config.model,
            device=device,
            dtype=target.dtype,
            max_model_len=self._max_model_len,
            block_size=config.block_size,
            kernels=config.kernels,
            ranks=self._ranks,
            dummy_seed=config.seed if config.load_format == "dummy" else None,
        )
        drafter = build_device_drafter(context) if target.head is not None else None
        return Speculator(
            config.speculation,
            drafter,
            vocab_size=target.config.vocab_size,
            max_num_seqs=config.max_num_seqs,
            max_model_len=self._max_model_len,
            page_size=config.block_size,
            device=device,
        )

    @property
    def computes_in_launch(self) -> bool:
        """`launch` returns when the step is done: a CPU has no queue of work."""
        return self.runner.device.type == "cpu"

    def warm_up_shapes(self) -> list[WarmUpShape]:
        """Of steps that launch all kernels of our part of the model. On a GPU alone."""
        if self.runner.device.type != "cuda":
            return []
        return self.runner.warm_up_shapes(self._max_num_seqs, self._max_model_len)

    def compile_kernels(self, largest_step: StepInput, shapes: Sequence[WarmUpShape]) -> None:
        """Compile in parallel what steps up to the largest will launch. On a GPU alone.

        They run once with nothing launched, which tells what to compile. `shapes`: those of all
        ranks, since a step needs them all.
        """
        if not self._plans_kernels:
            return
        runner = self.runner
        with (
            phase("Planning the kernels"),
            out_of_memory_is_named("planning them", LESS_MEMORY),
            torch.inference_mode(),
        ):
            steps = self._warm_up_steps(shapes)
            runner.allocate_pages(largest_step.block_tables_RX.shape[1])
            sample = runner.sample()
            with recorded_launches() as jobs:
                for step in [largest_step, *steps]:
                    sample.launch(step).result()
            runner.free_pages()
        if self._compile_pool is None:
            return
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
        graph_step = self._graph_step() if self._uses_graphs else None
        with phase("Measuring a largest step"), out_of_memory_is_named("measuring it", LESS_MEMORY):
            return num_pages_on_gpu(self.runner, largest_step, graph_step)

    def _warm_up_steps(self, shapes: Sequence[WarmUpShape]) -> list[StepInput]:
        page_size, drafting = self.runner.config.block_size, self.runner.drafting
        steps = [warm_up_step(shape, page_size, drafting) for shape in shapes]
        if self.runner.adapters is not None:
            steps += [with_adapters(step) for step in steps]
        return steps

    def prepare(self, num_pages: int, longest_step: int, shapes: Sequence[WarmUpShape]) -> None:
        """Make the KV pages, load the kernels of steps up to the longest, and capture graphs."""
        runner = self.runner
        with out_of_memory_is_named(f"making {num_pages} KV pages", f"lower {self._knob_of_pages}"):
            runner.allocate_pages(num_pages)
        if runner.device.type != "cuda":
            return
        steps = self._warm_up_steps(shapes)
        with (
            phase("Warming up"),
            out_of_memory_is_named(
                "running its steps", f"lower {self._knob_of_pages}, or {LESS_MEMORY}"
            ),
            torch.inference_mode(),
        ):
            sample = runner.sample()
            for step in steps:
                if step.num_tokens <= longest_step:
                    sample.launch(step).result()
        if self._uses_graphs:
            self._capture_graphs()

    @property
    def _knob_of_pages(self) -> str:
        """The flag that says how much memory KV pages take."""
        config = self.runner.config
        if config.num_gpu_blocks_override is not None:
            return "--num-gpu-blocks-override"
        if config.kv_cache_memory is not None:
            return "--kv-cache-memory"
        is_cuda = self.runner.device.type == "cuda"
        return "--gpu-memory-utilization" if is_cuda else "--cpu-kv-cache-memory"

    def prepare_replay(self, step: StepInput) -> None:
        """Be ready to run a step again and again."""
        captures = self._uses_graphs and self.runner.device.type == "cuda"
        self.replay = Replay(self.runner, step, captures=captures)

    def run_replay(self, count: int) -> None:
        """Launch it so many times. Does not wait for the device."""
        self.replay.run(count)

    def free_unused(self) -> None:
        """Give back the device's memory that nothing uses, after it ran out."""
        if self.runner.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def can_capture_next(self) -> bool:
        """Whether a CUDA graph is left to capture."""
        return self.runner.can_capture_next

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

    def tap(self, taps: Sequence[int]) -> None:
        """Read these states of the decoder, for the drafter of the first stage."""
        self.runner.taps = tuple(taps)

    def read_adapter(self, number: int, path: str) -> Future:
        """Let a thread read our part of an adapter's folder, and tell its digest."""
        return self._reader.submit(self.adapters.read, number, path)

    def place_adapter(self, slot: int, number: int) -> None:
        """Fill a slot of the device."""
        self.adapters.place(slot, number)

    def forget_adapter(self, number: int) -> None:
        """Drop our part of an adapter from the host."""
        self.adapters.forget(number)

    def offload_pages(self, num_slots: int) -> None:
        """Have room for so many KV pages in the host's memory."""
        with out_of_memory_is_named(
            f"making room for {num_slots} KV pages on the host", "lower --kv-offload-gb"
        ):
            self.runner.offload_pages(num_slots)

    def open_pages(self) -> int:
        """Begin to exchange KV pages with a connector of our own. Returns the bytes of a page.

        Raises InputError.
        """
        copies = self.runner.page_copies
        connector = make_connector(self.runner.config.kv_transfer, copies.page_bytes)
        self.pages = RankPages(connector, copies, rank=self._ranks.rank, size=self._ranks.size)
        return self.pages.page_bytes

    def match_pages(self, keys_NB: np.ndarray) -> Future:
        """How many of these our connector has, up to the first that it has not."""
        return self.pages.match(keys_NB)

    def load_pages(self, keys_NB: np.ndarray, slots: Sequence[int]) -> Future:
        """Fill slots of the host."""
        return self.pages.load(keys_NB, slots)

    def save_pages(self, keys_NB: np.ndarray, pages: Sequence[int]) -> Future:
        """Keep pages of the device."""
        return self.pages.save(keys_NB, pages)

    def _graph_step(self) -> StepInput:
        """About as large as the largest step that a graph holds."""
        config, rows = self.runner.config, self._max_num_seqs
        tokens = min(CHUNK_SIZES[-1], config.max_num_batched_tokens)
        count = min(max(1, tokens // rows), self._max_model_len)
        return StepInput.padding(
            num_requests=rows,
            count=count,
            max_context_len=count,
            page_size=config.block_size,
            drafting=self.runner.drafting,
        )

    def finish(self) -> None:
        """Wait until the device has done what it was told to: other ranks may need its part."""
        if self.runner.device.type == "cuda":
            torch.cuda.synchronize(self.runner.device)

    def close(self) -> None:
        """Let go of graphs: what they captured of other ranks would be waited for."""
        self.runner.graphs = None

    def facts(self) -> tuple[str, float, int, int, int, int]:
        """Device, GiB of weights, layers, heads, KV heads, bytes of a KV page."""
        runner = self.runner
        model = runner.decoder.config
        return (
            str(runner.device),
            weight_bytes(runner.decoder) / GIB,
            len(runner.decoder.layers),
            model.num_heads,
            model.num_kv_heads,
            runner.bytes_per_page,
        )

    def launch(self, step: StepInput) -> StepHandle:
        """Start a step. Returns without waiting for it, where the device allows that."""
        self.check()
        return self.runner.launch(step)

    def check(self) -> None:
        """Raise where a kernel waited in vain for another rank. Does not wait for running ones."""
        if self._ranks.communicator is not None:
            self._ranks.communicator.check()

    def logits(self, step: StepInput) -> torch.Tensor:
        """Logits [T, V] in float32 after every token of a step."""
        return self.runner.logits(step)


def _plans_kernels(config: EngineConfig, device: torch.device) -> bool:
    """Whether kernels are compiled before they are launched."""
    return device.type == "cuda" and not INTERPRETED and config.compile_processes != 0


def _compile_pool(config: EngineConfig) -> Any:
    from qkernels.gpu.compile_pool import CompilePool  # loads triton, which a CPU may lack

    return CompilePool(config.compile_processes)
