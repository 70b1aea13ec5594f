"""WorkerGroup: the worker or workers that compute a step.

A sharded model has several ranks. Rank 0, the leader, runs in this process, and its engine plans
every step. The other ranks get the same calls with the same StepInput in the same order, and sample
the same tokens. WorkerGroup hides the number of ranks from the engine.
"""

import contextlib
import dataclasses
import functools
import logging
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import torch

from formats.errors import InputError
from qkernels.collective.channels import PeerLostError
from qserve.config import EngineConfig
from qserve.engine.distributed.executors import ProcessExecutor, WaitingRanks
from qserve.engine.distributed.joining import join_ranks
from qserve.engine.distributed.rank_channel import RankDiedError
from qserve.engine.distributed.rank_group import RankGroup
from qserve.engine.distributed.shared_residence import SharedResidence
from qserve.engine.runner.devices import pick_device, use_device
from qserve.engine.runner.memory import Fit
from qserve.engine.runner.model_runner import ModelRunner
from qserve.engine.runner.out_of_memory import ran_out
from qserve.engine.runner.residence import Residence
from qserve.engine.runner.step_handle import StepHandle
from qserve.engine.runner.worker import Worker
from qserve.engine.start_phases import phase
from qserve.engine.step.step_input import StepInput
from qserve.engine.uninterrupted import uninterrupted
from qserve.kv_transfer.peer.shared_pages import SharedPeerPages
from qserve.kv_transfer.shared_pages import SharedPages
from qserve.lora.shared_adapters import SharedAdapters
from qserve.model.cache_spec import WarmUpShape
from qserve.model.model_config import ModelConfig
from qserve.model.resident.checksum import checksum
from qserve.parallel.expert_exchange import ExpertExchange, join_experts, leave
from qserve.parallel.ranks import ALONE

logger = logging.getLogger(__name__)


class WorkerGroup:
    """A loaded model on all its ranks. `prepare` makes it ready for steps."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        max_model_len: int,
        waiting: WaitingRanks | None = None,
    ) -> None:
        """Load the model. Raises InputError, which names the rank if there are several.

        `waiting`: processes of the other ranks, if they are already running.
        """
        self._config = config
        self._ours: Worker | None = None  # the leader's worker; set below
        self._rank_group: RankGroup | None = None  # None: one rank
        self._page_bytes: tuple[int, ...] = ()  # bytes of a KV page on each rank; set below
        self._state_bytes: tuple[int, ...] = ()  # bytes of a state slot on each rank; set below
        self._exchange: ExpertExchange | None = None  # None: no other engine shares the experts
        self._checksum = ""  # checksum over all engines that share the experts
        self._shapes: list[WarmUpShape] = []  # set by compile_kernels, used by prepare
        if config.num_ranks == 1:
            device = pick_device(config)
            use_device(device, config)
            ranks = ALONE
            if config.shares_experts:
                self._exchange = self._join_experts(device)
                ranks = dataclasses.replace(ALONE, exchange=self._exchange)
            self._ours = Worker(config, model, max_model_len, device, ranks)
            if self._exchange is not None:
                self._checksum = self._exchange.digest_of_all(checksum(self.runner.decoder))
            self._page_bytes = (self.runner.bytes_per_page,)
            self._state_bytes = (self.runner.bytes_per_state,)
            return
        try:
            self._start_ranks(config, model, max_model_len, waiting)
        except BaseException:
            self.close()
            raise

    def _join_experts(self, device: torch.device) -> ExpertExchange:
        config = self._config
        with phase(f"Connecting the {config.data_parallel_size} engines that share experts"):
            return join_experts(
                config.data_parallel_address,
                config.data_parallel_rank,
                config.data_parallel_size,
                device,
            )

    @property
    def shares_experts(self) -> bool:
        """True if other engines take part in each step."""
        return self._exchange is not None

    def checksum(self) -> str:
        """Checksum of the leader's weights, or of all engines' weights if they share experts."""
        return self._checksum or checksum(self.runner.decoder)

    @property
    def is_wanted(self) -> bool:
        """True if another engine that shares the experts runs a step and needs this engine."""
        return self._exchange is not None and self._exchange.is_wanted

    def compute_for_others(self) -> None:
        """Take part in a step in which this engine has no tokens."""
        self.runner.compute_for_others()

    def _start_ranks(
        self,
        config: EngineConfig,
        model: ModelConfig,
        max_model_len: int,
        waiting: WaitingRanks | None,
    ) -> None:
        executor = _executor(config, max_model_len, waiting)
        device = pick_device(config, executor.leader_index, executor.num_here)
        use_device(device, config)
        self._rank_group = RankGroup(executor.start)
        self._rank_group.at_end(executor.end)
        with phase(f"Starting {config.num_ranks} ranks"):
            self._rank_group.replies()
            self._rank_group.send("load")
            with self._in_step():
                check = self._rank_group.check
                ranks = join_ranks(config, model, executor.address, 0, device, check)
        self._rank_group.at_leave(ranks.leave)
        self._rank_group.at_end(ranks.close)
        self._rank_group.watch(abort=ranks.abort)
        with self._in_step(waits=False):
            self._ours = worker = Worker(config, model, max_model_len, device, ranks)

        def leave() -> None:
            worker.close()
            ranks.leave()

        self._rank_group.at_leave(leave)
        facts = [self._ours.facts(), *(reply[0] for reply in self._rank_group.replies())]
        if self._ours.runner.aux_layers:
            self._rank_group.send("set_aux_layers", self._ours.runner.aux_layers)
        self._page_bytes = tuple(page_bytes for *_, page_bytes, _ in facts)
        self._state_bytes = tuple(state_bytes for *_, state_bytes in facts)
        for rank, (name, size, layers, heads, kv_heads, *_) in enumerate(facts):
            logger.info(
                "Rank %d on %s: weights %.2f GiB, %d layers of %d heads and %d KV heads",
                *(rank, name, size, layers, heads, kv_heads),
            )

    @property
    def runner(self) -> ModelRunner:
        """The leader's model runner."""
        return self._ours.runner

    @functools.cached_property
    def adapters(self) -> SharedAdapters | None:
        """Access to the adapters of all ranks; None without --enable-lora."""
        ours = self._ours.adapters
        return None if ours is None else SharedAdapters(ours, self._rank_group)

    @functools.cached_property
    def residence(self) -> Residence | SharedResidence:
        """Weights and KV pages of all ranks. Raises InputError if they cannot leave the devices."""
        if self._rank_group is None:
            return self._ours.residence
        return SharedResidence(
            self._ours.residence,
            self._rank_group,
            self._in_step,
            shares_memory=self._config.distributed_executor_backend == "mp",
        )

    @property
    def computes_in_launch(self) -> bool:
        """True if `launch` returns only when the step is done, as on a CPU."""
        return self._ours.computes_in_launch

    @property
    def bytes_per_page(self) -> int:
        """Bytes of a KV page, summed over all ranks."""
        return sum(self._page_bytes)

    @property
    def bytes_per_state(self) -> int:
        """Bytes of a state slot, summed over all ranks."""
        return sum(self._state_bytes)

    @property
    def num_ranks(self) -> int:
        return self._config.num_ranks

    def watch(self, on_death: Callable[[Exception], None]) -> None:
        """Call `on_death` from another thread if a rank died and no call here raised the error."""
        if self._rank_group is not None:
            self._rank_group.watch(on_stuck=on_death)

    def compile_kernels(self, largest_step: StepInput) -> None:
        """Compile the kernels of all steps up to the largest, in parallel (CUDA only)."""
        if self._rank_group is None:
            known = self._ours.known_shapes()
            if known is not None:
                self._shapes = known
                return
        shapes = self._ours.warm_up_shapes()
        if self._rank_group is not None:
            self._rank_group.send("warm_up_shapes")
            # Ranks with unequal shards launch different kernels, but all ranks run each step.
            theirs = [shape for reply in self._rank_group.replies() for shape in reply[0]]
            shapes = list(dict.fromkeys([*shapes, *theirs]))
        self._shapes = shapes
        with self._together("compile_kernels", largest_step, shapes):
            self._ours.compile_kernels(largest_step, shapes)

    def num_pages_that_fit(self, largest_step: StepInput, max_pages: int) -> Fit:
        """Return the number of KV pages and of state snapshots that fit on every rank.

        `max_pages`: maximum number of pages that can be in use. Raises InputError if no page fits
        on one of the ranks.
        """
        with self._together("num_pages_that_fit", largest_step, max_pages):
            ours = self._ours.num_pages_that_fit(largest_step, max_pages)
        if self._rank_group is None:
            return ours
        fits = [ours, *(Fit(*reply[0]) for reply in self._rank_group.replies())]
        counts = ", ".join(str(fit.num_pages) for fit in fits)
        logger.info("KV pages that fit on ranks 0, 1, ...: %s", counts)
        return Fit(*map(min, zip(*fits, strict=True)))

    def prepare(self, fit: Fit, longest_step: int) -> None:
        """Allocate KV pages, load the kernels of steps up to the longest, and capture graphs."""
        shapes, self._shapes = self._shapes, []
        with self._together("prepare", *fit, longest_step, shapes):
            self._ours.prepare(*fit, longest_step, shapes)
        if self._rank_group is not None:
            self._rank_group.replies()

    def offload_pages(self, num_slots: int, num_states: int) -> None:
        """Allocate host memory for KV pages and state snapshots on all ranks."""
        with self._together("offload_pages", num_slots, num_states):
            self._ours.offload_pages(num_slots, num_states)

    def open_pages(self) -> tuple[SharedPages, SharedPages | None]:
        """Open each rank's connector for KV pages and, if the model has states, for snapshots.

        Raises InputError.
        """
        with self._together("open_pages"):
            sizes = [self._ours.transfers.open_pages()]
        if self._rank_group is not None:
            sizes += [reply[0] for reply in self._rank_group.replies()]
        page_bytes, state_bytes = zip(*sizes, strict=True)
        pages = SharedPages(self._ours.transfers.pages, self._rank_group, page_bytes)
        if self._ours.transfers.states is None:
            return pages, None
        states = SharedPages(self._ours.transfers.states, self._rank_group, state_bytes, "states")
        return pages, states

    def open_peer(self, digest: str, form: str) -> tuple[SharedPeerPages, SharedPeerPages | None]:
        """Open each rank's `peer` connector for KV pages and, if the model has them, for states.

        Raises InputError.

        `digest`, `form` (JSON): facts that the contents of KV pages depend on; they do not include
        the number of ranks.
        """
        engine = secrets.token_hex(8)
        with self._together("open_peer", engine, digest, form):
            self._ours.transfers.open_peer(engine, digest, form)
        if self._rank_group is not None:
            self._rank_group.replies()
        pages = SharedPeerPages(self._ours.transfers.peer, self._rank_group)
        if self._ours.transfers.peer_states is None:
            return pages, None
        return pages, SharedPeerPages(self._ours.transfers.peer_states, self._rank_group, "states")

    def free_unused(self) -> None:
        """Free unused device memory after an out-of-memory error."""
        self._ours.free_unused()

    def capture_next(self) -> bool:
        """Capture one more CUDA graph while the engine is idle. Returns False if none is left."""
        if not self._ours.can_capture_next:
            return False
        with self._together("capture_next"):
            return self._ours.capture_next()

    def launch(self, step: StepInput) -> StepHandle:
        """Start a step. Returns without waiting for the result, except on a CPU."""
        if self._rank_group is None:
            return self._ours.launch(step)
        with self._together("launch", step):
            return self._ours.launch(step)

    def launch_forward(self, step: StepInput) -> None:
        """Start the forward pass of a step whose masks are pending. Call `launch_sampling` next."""
        self.runner.launch_forward(step)

    def is_computing(self) -> bool:
        """True while the device runs the forward pass that `launch_forward` started."""
        return self.runner.is_computing

    def launch_sampling(self, step: StepInput) -> StepHandle:
        """Start sampling for the step of `launch_forward`. `step`: the same step with its masks."""
        return self.runner.launch_sampling(step)

    def prepare_replay(self, step: StepInput) -> str:
        """Prepare to run one step repeatedly. Returns the kind of CUDA graph (worker.py)."""
        with self._together("prepare_replay", step):
            self._ours.prepare_replay(step)
        return self._ours.replay.graph

    def run_replay(self, count: int) -> None:
        """Launch the prepared step `count` times, without waiting for the device."""
        with self._together("run_replay", count):
            self._ours.run_replay(count)

    def overlap_sums(self, overlaps: bool) -> None:
        """Allow (default) or forbid that products and their sums over ranks overlap.

        For measurements, between steps.
        """
        with self._together("overlap_sums", overlaps):
            self._ours.overlap_sums(overlaps)

    def logits(self, step: StepInput) -> torch.Tensor:
        """Return float32 logits [T, V] after every token of a step."""
        with self._together("logits", step):
            return self._ours.logits(step)

    def check(self) -> None:
        """Raise RankDiedError if a rank died or did not take part in an all-reduce."""
        if self._rank_group is not None:
            self._rank_group.check()
            self._ours.check()

    def close(self) -> None:
        """End the other ranks. No step can run afterwards."""
        try:
            if self._ours is not None:
                self._ours.write_loads()
                if self._rank_group is None:
                    self._ours.transfers.close_peer()
                leave(self._exchange)
        finally:
            if self._rank_group is not None:
                self._rank_group.close()

    @contextlib.contextmanager
    def _together(self, name: str, *values: object) -> Iterator[None]:
        """Context for a call that all ranks run."""
        if self._rank_group is None:
            yield
            return
        with uninterrupted(), self._in_step():
            self._rank_group.send(name, *values)
            yield

    @contextlib.contextmanager
    def _in_step(self, waits: bool = True) -> Iterator[None]:
        """Context for work of all ranks. An error that another rank caused is raised as its error.

        `waits`: True if the work waits for other ranks.
        """
        rank_group = self._rank_group
        rank_group.is_waiting = waits
        try:
            yield
        except PeerLostError as error:
            rank_group.explain(error)
            raise
        except InputError as error:
            raise InputError(f"rank 0: {error.subject}", error.problem, error.remedy) from error
        except Exception as error:
            if isinstance(error, RuntimeError | MemoryError) and ran_out(error):
                first = str(error).partition("\n")[0]
                raise RankDiedError(f"rank 0 ran out of memory in a step: {first}") from error
            rank_group.explain(error)
            raise
        except BaseException:  # a second Ctrl-C: the other ranks wait for this one in the step
            rank_group.forbid_steps(
                "it was interrupted in a step; close the model and load it again"
            )
            raise
        finally:
            rank_group.is_waiting = False


def _executor(config: EngineConfig, max_model_len: int, waiting: WaitingRanks | None) -> Any:
    """Return the executor that starts the other ranks."""
    if config.distributed_executor_backend == "ray":
        from qserve.engine.distributed.ray_executor import RayExecutor  # an extra

        return RayExecutor(config, max_model_len)
    return ProcessExecutor(config, max_model_len, waiting)
