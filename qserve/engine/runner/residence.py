"""Residence: moves a model's weights and KV pages off the device and back, for sleep.

Sleep level 1 keeps the weights in pinned host memory, level 2 drops them. Both free the KV pages
and the CUDA graphs. On waking, tensors are the same objects with new addresses, so graphs are
captured again; compiled kernels stay.
"""

import logging
from collections.abc import Callable
from functools import partial

import torch

from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from qserve.engine.control.shared_tensors import NamedTensors
from qserve.engine.runner.memory import GIB
from qserve.engine.runner.model_runner import ModelRunner
from qserve.engine.runner.out_of_memory import explain_out_of_memory
from qserve.engine.start_phases import phase
from qserve.model.model_config import ModelConfig
from qserve.model.resident.host_memory import HostMemory
from qserve.model.resident.leaves import tensors
from qserve.model.resident.memory import SleepingMemory
from qserve.model.resident.staged import StagedWeights, stage
from qserve.model.resident.update_source import UpdateSource
from qserve.parallel.ranks import ALONE, Ranks

OTHERS = "another program holds the GPU's memory; wake the model again when it is free"

logger = logging.getLogger(__name__)


class Residence:
    """Weights and KV pages of one worker. Each is awake (on the device) or asleep."""

    def __init__(
        self,
        runner: ModelRunner,
        model: ModelConfig,
        *,
        max_model_len: int,
        open_weights: Callable[[], UpdateSource],
        capture_graphs: Callable[[], None] | None,
        ranks: Ranks = ALONE,
    ) -> None:
        """`model`: the whole model; the runner may hold a shard of it.

        `open_weights`: opens the weights again after a sleep of level 2. `capture_graphs`: captures
        the first CUDA graphs again; None: no graphs. `ranks`: this rank among all, which determines
        its shard of new weights.
        """
        self._runner, self._model = runner, model
        self._max_model_len, self._ranks = max_model_len, ranks
        self._open_weights, self._capture_graphs = open_weights, capture_graphs
        self._pages: SleepingMemory | None = None  # None: awake
        self._weights: SleepingMemory | None = None
        self.host = HostMemory(pinned=runner.device.type == "cuda")  # for weights off the device

    @property
    def is_asleep(self) -> bool:
        """True if pages or weights are not on the device."""
        return self._pages is not None or self._weights is not None

    @property
    def has_weights(self) -> bool:
        return self._weights is None

    @property
    def lost_weights(self) -> bool:
        """True if the weights were dropped, and are neither on the device nor on the host."""
        return self._weights is not None and not self._weights.keeps

    def sleep(self, level: int) -> None:
        """Free device memory. No step may be in flight. On InputError nothing is freed."""
        runner, is_cuda = self._runner, self._runner.device.type == "cuda"
        if is_cuda:
            torch.cuda.synchronize(runner.device)
        if self._weights is None:
            what = "Keeping the weights on the host" if level == 1 else "Dropping the weights"
            with phase(what), explain_out_of_memory(what.lower(), "sleep at level 2"):
                self.host.reset()
                self._weights = SleepingMemory(
                    tensors(runner.decoder), keeps=level == 1, host=self.host
                )
        runner.close_graphs()  # only now, so that a failed sleep changes nothing
        if self._pages is None:
            self._pages = SleepingMemory(runner.layer_caches.tensors(), keeps=False)
        if is_cuda:
            torch.cuda.empty_cache()
        freed = self._pages.num_bytes + self._weights.num_bytes
        logger.info("Sleeping at level %d: freed %.2f GiB", level, freed / GIB)

    def wake_weights(self) -> None:
        """Bring the weights back from the host, or read them again. Raises InputError."""
        if self._weights is None:
            return
        if self.lost_weights:
            self.fill(self.stage_folder(None))
            return
        with (
            phase("Waking up the weights"),
            explain_out_of_memory("waking up the weights", OTHERS),
        ):
            self._weights.restore()
        self._weights = None

    def wake_pages(self) -> None:
        """Allocate empty KV pages and capture the first CUDA graphs. Raises InputError."""
        if self._pages is None:
            return
        if self._weights is not None:
            raise InputError(
                "wake_up",
                "KV pages cannot wake up before the weights",
                "wake up the weights first",
            )
        with (
            phase("Waking up the KV pages"),
            explain_out_of_memory("waking up the KV pages", OTHERS),
        ):
            self._pages.restore()
        self._pages = None
        if self._capture_graphs is not None and self._runner.device.type == "cuda":
            self._capture_graphs()

    def stage_folder(self, folder: str | None, *, digests: bool = False) -> StagedWeights:
        """Read and check new weights, without using them yet. Raises InputError.

        `folder`: None: the folder of the weights in use. `digests`: compute digests.
        """
        open_weights = self._open_weights if folder is None else self._opener(folder)
        return self._stage(open_weights(), digests)

    def stage_tensors(self, tensors: NamedTensors, *, digests: bool = False) -> StagedWeights:
        """Read and check new weights from tensors, as `stage_folder` does. Raises InputError."""
        config = CheckpointReader(self._runner.config.model).config
        update = UpdateSource.of_tensors(self._model, tensors, config, self._runner.device)
        return self._stage(update, digests)

    def use_folder(self, folder: str) -> None:
        """Set the folder from which weights are read after a sleep of level 2."""
        self._open_weights = self._opener(folder)

    def _opener(self, folder: str) -> Callable[[], UpdateSource]:
        return partial(UpdateSource.of_folder, self._model, folder, self._runner.device)

    def _stage(self, update: UpdateSource, digests: bool) -> StagedWeights:
        holds_weights = self._weights is not None and self._weights.keeps
        if not holds_weights:
            self.host.reset()
        what = "Reading the new weights"
        with phase(what), explain_out_of_memory(what.lower(), OTHERS):
            staged = stage(
                self._runner.decoder,
                update.config,
                update.source,
                device=self._runner.device,
                max_model_len=self._max_model_len,
                kernels=self._runner.config.kernels,
                digests=digests,
                host=None if holds_weights else self.host,
                ranks=self._ranks,
            )
        if self._runner.device.type == "cuda":
            torch.cuda.empty_cache()  # free what reading the layers used; a trainer may need it
        return staged

    def fill(self, staged: StagedWeights) -> None:
        """Replace the weights and wake them. No step may be in flight."""
        if self._weights is not None:
            with explain_out_of_memory("waking up the weights", OTHERS):
                self._weights.restore()
            self._weights = None
        with phase("Replacing the weights"):
            staged.commit()
