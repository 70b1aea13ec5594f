"""Worker: one rank's shard of the model on one device.

Every rank runs the same calls in the same order, because the ranks compute most calls together.
"""

import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from qkernels.gpu.launch import recorded_launches
from qserve.config import EngineConfig
from qserve.engine.distributed.expert_limits import (
    check_shared_experts,
    check_shared_residence,
)
from qserve.engine.distributed.rank_transfers import RankTransfers
from qserve.engine.fallback_limits import is_fallback
from qserve.engine.invariance_limits import check_dtype
from qserve.engine.runner.compiling.planned_kernels import PlannedKernels, are_planned
from qserve.engine.runner.devices import pick_dtype
from qserve.engine.runner.encoder import Encoder
from qserve.engine.runner.graphs.cuda_graphs import max_graph_tokens
from qserve.engine.runner.graphs.whole_steps import launch_rings
from qserve.engine.runner.memory import (
    GIB,
    LESS_MEMORY,
    Fit,
    num_pages_in,
    num_pages_on_gpu,
    weight_bytes,
)
from qserve.engine.runner.model_runner import ModelRunner
from qserve.engine.runner.out_of_memory import explain_out_of_memory
from qserve.engine.runner.rank_residence import RankResidence
from qserve.engine.runner.replay import Replay
from qserve.engine.runner.residence import Residence
from qserve.engine.runner.step_handle import StepHandle
from qserve.engine.runner.warm_up import warm_up_step, with_adapters
from qserve.engine.start_phases import phase
from qserve.engine.step.step_input import StepInput
from qserve.lora.base_factors import factors_for_adapters
from qserve.lora.layout import AdapterLayout
from qserve.lora.rank_adapters import RankAdapters
from qserve.lora.slot_memory import SlotMemory
from qserve.model.cache_spec import WarmUpShape
from qserve.model.expert_loads import ExpertLoads
from qserve.model.loading.dummy_source import DummySource
from qserve.model.loading.loader import load
from qserve.model.loading.rounding_source import open_source
from qserve.model.model_config import ModelConfig
from qserve.model.resident.update_source import UpdateSource
from qserve.model.tp_plan import place_experts
from qserve.parallel.ranks import ALONE, Ranks

logger = logging.getLogger(__name__)


class Worker:
    """One rank's loaded model. `prepare` makes it ready for steps."""

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
        self._model = model
        self._ranks = dataclasses.replace(ranks, experts=place_experts(model, config))
        self._loads: ExpertLoads | None = None  # set below with --record-expert-loads
        self._write_loads: Callable[[], object] | None = None
        # Steps in graphs have padding rows, which expert loads must not count.
        is_eager = config.enforce_eager or config.record_expert_loads is not None
        self._uses_graphs = not is_eager and ranks.exchange is None
        self._kernels: PlannedKernels | None = None
        self.adapters: RankAdapters | None = None  # set below with --enable-lora
        self.replay: Replay | None = None  # set by prepare_replay
        if are_planned(config, device) and not is_fallback(model):
            self._kernels = PlannedKernels(config, compiles=ranks.rank == 0)
        try:
            self.runner = self._load(config, model, device)
        except BaseException:
            if self._kernels is not None:
                self._kernels.close()
            raise
        self.transfers = RankTransfers(self.runner, model, self._ranks)

    def _load(self, config: EngineConfig, model: ModelConfig, device: torch.device) -> ModelRunner:
        with (
            phase("Loading the model"),
            explain_out_of_memory("loading the weights", "use a smaller or a quantized model"),
        ):
            dtype = pick_dtype(config.dtype, model, device)
            check_dtype(config, dtype, device)
            decoder = load(
                model,
                self._open_weights(config, model, device).source,
                device=device,
                dtype=dtype,
                max_model_len=self._max_model_len,
                progress=self._ranks.rank == 0,
                kernels=config.kernels,
                ranks=self._ranks,
            )
            if config.record_expert_loads is not None and self._ranks.rank == 0:
                self._loads = loads = ExpertLoads(decoder, device)
                # The finalizer also writes them if the process ends without closing the engine.
                file = config.record_expert_loads
                self._write_loads = weakref.finalize(self, loads.write, file, config.model)
            speculator = config.speculation and config.speculation.make_speculator(
                config, decoder, max_model_len=self._max_model_len, ranks=self._ranks
            )
            check_shared_experts(config, decoder, model)
            runner = ModelRunner(decoder, config, device, speculator, self._ranks)
            if model.vision is not None:
                runner.encoder = Encoder.load(model.vision, config, decoder)
            if self._uses_graphs and device.type == "cuda":
                self._check_graphs(runner)
            if config.enable_lora:
                runner.adapters = SlotMemory(
                    decoder,
                    AdapterLayout(
                        model,
                        decoder.parts,
                        decoder.layer_numbers,
                        decoder.local_experts if config.lora_experts else None,
                    ),
                    num_slots=config.max_loras,
                    max_rank=config.max_lora_rank,
                    fixed_order=config.batch_invariant,
                )
                self.adapters = RankAdapters(
                    runner.adapters, decoder.dtype, device, factors_for_adapters(config.model)
                )
                self._reader = ThreadPoolExecutor(1, "adapters")
                logger.info(
                    "Adapters: %d slots of rank %d, %.2f GiB",
                    config.max_loras,
                    config.max_lora_rank,
                    runner.adapters.num_bytes / GIB,
                )
            return runner

    def _check_graphs(self, runner: ModelRunner) -> None:
        """Raise InputError if the model's steps cannot run in CUDA graphs.

        For a model that runs through transformers, disable graphs and log a warning instead.
        """
        reason = runner.decoder.no_graphs
        try:
            runner.check_graphs()
        except InputError as error:
            if not is_fallback(self._model):
                raise
            reason = error.problem
        if reason:
            self._uses_graphs = False
            name = self._model.family.architecture
            logger.warning("%s runs without CUDA graphs: %s", name, reason)

    @staticmethod
    def _open_weights(
        config: EngineConfig, model: ModelConfig, device: torch.device
    ) -> UpdateSource:
        if config.load_format == "dummy":
            source = DummySource(model, device, config.seed)
        else:
            source = open_source(CheckpointReader(config.model), model, device)
        return UpdateSource(config=model, source=source)

    @functools.cached_property
    def residence(self) -> Residence:
        """Sleep, wake-up and weight updates of this rank. Raises InputError if not supported."""
        runner, model = self.runner, self._model
        check_shared_residence(runner.config)
        if is_fallback(model):
            raise InputError(
                "sleep and new weights",
                f"do not work with {model.family.architecture}, which runs through transformers",
                "restart the server with other weights",
            )
        return Residence(
            runner,
            model,
            max_model_len=self._max_model_len,
            open_weights=lambda: self._open_weights(runner.config, model, runner.device),
            capture_graphs=self._capture_graphs if self._uses_graphs else None,
            ranks=self._ranks,
        )

    @functools.cached_property
    def _rank_residence(self) -> RankResidence:
        return RankResidence(self.residence)

    def reside(self, name: str, *values: Any) -> Future:
        """Run a call of RankResidence for the leader. Returns a future that is already done."""
        done: Future = Future()
        try:
            done.set_result(self._rank_residence.call(name, *values))
        except Exception as error:
            done.set_exception(error)
        return done

    @property
    def computes_in_launch(self) -> bool:
        """True if `launch` returns only when the step is done, as on a CPU."""
        return self.runner.device.type == "cpu"

    def warm_up_shapes(self) -> list[WarmUpShape]:
        """Return warm-up shapes that launch every kernel of this rank (CUDA only)."""
        if self.runner.device.type != "cuda":
            return []
        with phase("Finding the shapes of warm-up steps"):
            return self.runner.warm_up_shapes(self._max_num_seqs, self._max_model_len)

    def known_shapes(self) -> list[WarmUpShape] | None:
        """Return the warm-up shapes of an earlier start; None if a kernel of it is not compiled."""
        if self._kernels is None:
            return None
        return self._kernels.known_shapes(self.runner, self._max_model_len)

    def compile_kernels(self, largest_step: StepInput, shapes: Sequence[WarmUpShape]) -> None:
        """Compile the kernels of steps up to the largest, in parallel (CUDA only).

        The steps run once with kernel launches recorded instead of made. `shapes`: warm-up shapes
        of all ranks, since every rank takes part in each step.
        """
        if self._kernels is None:
            return
        runner = self.runner
        with (
            phase("Planning the kernels"),
            explain_out_of_memory("planning them", LESS_MEMORY),
            torch.inference_mode(),
        ):
            steps = self._warm_up_steps(shapes)
            runner.allocate_pages(largest_step.block_tables_RX.shape[1])
            sample = runner.sample()
            with recorded_launches() as jobs:
                for step in [largest_step, *steps]:
                    sample.launch(step).result()
                if self._uses_graphs:
                    launch_rings(runner.device)
            runner.layer_caches.free()
        self._kernels.compile(tuple(jobs.values()))

    def num_pages_that_fit(self, largest_step: StepInput, max_pages: int) -> Fit:
        """Return the number of KV pages and of state snapshots that fit in memory.

        `max_pages`: maximum number of pages that can be in use. Raises InputError if none fits.
        """
        config = self.runner.config
        memory, flag = config.kv_cache_memory, "--kv-cache-memory"
        if memory is None and self.runner.device.type != "cuda":
            memory, flag = config.cpu_kv_cache_memory, "--cpu-kv-cache-memory"
        if memory is not None:
            return num_pages_in(memory, self.runner, flag, max_pages)
        graph_step = self._graph_step() if self._uses_graphs else None
        if self.runner.adapters is not None:  # such steps take more memory
            largest_step = with_adapters(largest_step)
            graph_step = graph_step and with_adapters(graph_step)
        with phase("Measuring a largest step"), explain_out_of_memory("measuring it", LESS_MEMORY):
            return num_pages_on_gpu(self.runner, largest_step, graph_step, max_pages)

    def _warm_up_steps(self, shapes: Sequence[WarmUpShape]) -> list[StepInput]:
        page_size, drafting = self.runner.config.block_size, self.runner.drafting
        steps = [warm_up_step(shape, page_size, drafting) for shape in shapes]
        if self.runner.adapters is not None:
            steps += [with_adapters(step) for step in steps]
        return steps

    def prepare(
        self,
        num_pages: int,
        num_snapshots: int,
        longest_step: int,
        shapes: Sequence[WarmUpShape],
    ) -> None:
        """Allocate KV pages, load the kernels of steps up to the longest, and capture graphs."""
        runner = self.runner
        runner.num_snapshots = num_snapshots
        with explain_out_of_memory(f"making {num_pages} KV pages", f"lower {self._flag_for_pages}"):
            runner.allocate_pages(num_pages)
        try:
            self._warm_up(longest_step, shapes)
        finally:
            if self._loads is not None:
                self._loads.reset()

    def _warm_up(self, longest_step: int, shapes: Sequence[WarmUpShape]) -> None:
        """Load the kernels of steps up to the longest, and capture graphs (CUDA only)."""
        runner = self.runner
        if runner.device.type != "cuda":
            return
        steps = self._warm_up_steps(shapes)
        with (
            phase("Warming up"),
            explain_out_of_memory(
                "running its steps", f"lower {self._flag_for_pages}, or {LESS_MEMORY}"
            ),
            torch.inference_mode(),
        ):
            sample = runner.sample()
            for step in steps:
                if step.num_tokens <= longest_step:
                    sample.launch(step).result()
        if self._uses_graphs:
            self._capture_graphs()
        if self._kernels is not None:
            self._kernels.launched(shapes)

    @property
    def _flag_for_pages(self) -> str:
        """The flag that determines the memory for KV pages, for error messages."""
        config = self.runner.config
        if config.num_gpu_blocks_override is not None:
            return "--num-gpu-blocks-override"
        if config.kv_cache_memory is not None:
            return "--kv-cache-memory"
        is_cuda = self.runner.device.type == "cuda"
        return "--gpu-memory-utilization" if is_cuda else "--cpu-kv-cache-memory"

    def prepare_replay(self, step: StepInput) -> None:
        """Prepare to run one step repeatedly."""
        captures = self._uses_graphs and self.runner.device.type == "cuda"
        self.replay = Replay(self.runner, step, captures=captures)

    def run_replay(self, count: int) -> None:
        """Launch the prepared step `count` times. Does not wait for the device."""
        self.replay.run(count)

    def overlap_sums(self, overlaps: bool) -> None:
        """Allow or forbid that products of many rows and their sums over ranks overlap."""
        if self._ranks.communicator is not None:
            self._ranks.communicator.overlaps = overlaps

    def free_unused(self) -> None:
        """Free unused device memory after an out-of-memory error."""
        if self.runner.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def can_capture_next(self) -> bool:
        """True if a CUDA graph is left to capture."""
        return self.runner.can_capture_next

    def capture_next(self) -> bool:
        """Capture one more CUDA graph while the engine is idle. Returns False if none is left."""
        return self.runner.capture_next()

    def _capture_graphs(self) -> None:
        runner = self.runner
        torch.cuda.empty_cache()  # otherwise memory freed before would distort the measurement
        free, _ = torch.cuda.mem_get_info(runner.device)
        with (
            phase("Capturing the first CUDA graphs"),
            explain_out_of_memory(
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

    def set_aux_layers(self, aux_layers: Sequence[int]) -> None:
        """Set the auxiliary hidden states to pass to the drafter, which the first stage has."""
        self.runner.aux_layers = tuple(aux_layers)

    def read_adapter(self, number: int, path: str) -> Future:
        """Read this rank's shard of an adapter in a thread. The future's result is its digest."""
        return self._reader.submit(self.adapters.read, number, path)

    def place_adapter(self, slot: int, number: int) -> None:
        """Copy an adapter to a slot of the device."""
        self.adapters.place(slot, number)

    def forget_adapter(self, number: int) -> None:
        """Drop this rank's shard of an adapter from host memory."""
        self.adapters.forget(number)

    def offload_pages(self, num_slots: int, num_states: int) -> None:
        """Allocate host memory for `num_slots` KV pages and `num_states` state snapshots."""
        with explain_out_of_memory(
            f"making room for {num_slots} KV pages on the host", "lower --kv-offload-gb"
        ):
            self.runner.layer_caches.offload(num_slots, num_states)

    def _graph_step(self) -> StepInput:
        """Return a step of padding about as large as the largest CUDA graph."""
        config, rows = self.runner.config, self._max_num_seqs
        sizes, decode_query_len = self.runner.chunk_sizes, self.runner.batch_form.decode_query_len
        tokens = max_graph_tokens(sizes, rows, config.max_num_batched_tokens, decode_query_len)
        count = min(max(1, tokens // rows), self._max_model_len)
        return StepInput.padding(
            num_requests=rows,
            count=count,
            max_context_len=count,
            page_size=config.block_size,
            drafting=self.runner.drafting,
        )

    def write_loads(self) -> None:
        """Write the counted expert loads, if they are recorded. Later calls do nothing."""
        if self._write_loads is not None:
            self._write_loads()

    def finish(self) -> None:
        """Wait for all work on the device, since other ranks may need this rank in a step."""
        if self.runner.device.type == "cuda":
            torch.cuda.synchronize(self.runner.device)

    def close(self) -> None:
        """Wait for the device and free all CUDA graphs. No step can run afterwards."""
        self.finish()
        self.transfers.close_peer()
        self.replay = None
        for each in (self.runner.graphs, self.runner.speculator):
            if each is not None:
                each.close()

    def facts(self) -> tuple[str, float, int, int, int, int, int]:
        """Return device, GiB of weights, layers, heads, KV heads, bytes per page and per state."""
        runner = self.runner
        model = runner.decoder.config
        return (
            str(runner.device),
            weight_bytes(runner.decoder) / GIB,
            len(runner.decoder.layers),
            model.num_heads,
            model.num_kv_heads,
            runner.bytes_per_page,
            runner.bytes_per_state,
        )

    def launch(self, step: StepInput) -> StepHandle:
        """Start a step. Returns without waiting for the result, except on a CPU."""
        self.check()
        return self.runner.launch(step)

    def check(self) -> None:
        """Raise an error if a kernel timed out waiting for another rank. Does not wait."""
        if self._ranks.communicator is not None:
            self._ranks.communicator.check()

    def logits(self, step: StepInput) -> torch.Tensor:
        """Return float32 logits [T, V] after every token of a step."""
        return self.runner.logits(step)
