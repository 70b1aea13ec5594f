"""Operations on an engine with no step in flight: sleep, wake up, update and digest weights."""

import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from formats.files.memory_tensors import MemoryTensors
from formats.layouts import quantized_modules
from formats.weight_digest import total_digest
from qserve.config import EngineConfig
from qserve.engine.control.commands import (
    FIRST_VERSION,
    KV_CACHE,
    LEVELS,
    TAGS,
    WEIGHTS,
    JoinWeightGroup,
    ReceiveWeights,
    SharedTensor,
)
from qserve.engine.control.fingerprint import settings_of, system_fingerprint
from qserve.engine.control.shared_tensors import NamedTensors, open_tensors
from qserve.engine.control.weight_group import WeightGroup
from qserve.engine.distributed.shared_residence import SharedResidence, SharedStaged
from qserve.engine.distributed.worker_group import WorkerGroup
from qserve.engine.runner.residence import Residence
from qserve.model.model_config import ModelConfig
from qserve.model.resident.host_memory import to_host
from qserve.model.resident.staged import StagedWeights
from qserve.model.resident.update_source import rounded_schemes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightDigests:
    """Digests of an engine's weights."""

    version: str
    total: str
    tensors: dict[str, str]  # by name
    # scheme of each linear that is rounded while loading, by name without `.weight`
    schemes: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedUpdate:
    """New weights that are read and checked, but not yet in use."""

    weights: StagedWeights | SharedStaged
    version: str
    folder: str | None  # None: the weights came as tensors, which cannot be read again

    def without_folder(self) -> "StagedUpdate":
        """Return this update without its folder, for a folder that will be deleted."""
        return replace(self, folder=None)


class Operations:
    """Sleep, wake-up and weight updates of one engine."""

    def __init__(self, config: EngineConfig, model: ModelConfig, workers: WorkerGroup) -> None:
        self._config, self._model, self._workers = config, model, workers
        self._settings = settings_of(config)  # read now: files that it names may change later
        self._folder: str | None = config.model  # source of the weights in use; None: tensors
        # newest weights that came from a folder
        self._last_folder, self._last_version = config.model, FIRST_VERSION
        self._digests: dict[str, str] | None = None  # None: not computed yet
        self._num_updates = 0
        self._received: dict[str, torch.Tensor] = {}  # parts of an update, on the host
        self._groups: dict[str, WeightGroup] = {}  # by name
        self.version = FIRST_VERSION  # of the weights in use
        self.is_sleeping = False
        self._fingerprint: str | None = None  # None: not computed for the weights in use

    @property
    def fingerprint(self) -> str:
        """The system_fingerprint of replies (engine/control/fingerprint.py).

        While the engine sleeps, this is the value from before; empty if none was computed.
        """
        if self._fingerprint is None and not self.is_sleeping:
            workers = self._workers
            device = workers.runner.device
            self._fingerprint = system_fingerprint(self._settings, workers.checksum(), device)
        return self._fingerprint or ""

    @property
    def _residence(self) -> Residence | SharedResidence:
        return self._workers.residence

    def check_awake(self) -> None:
        """Raise InputError if weights or KV pages are not on the device."""
        if self.is_sleeping:
            raise InputError("the model", "is asleep", "wake it up first")

    def check_sleep(self, level: int) -> None:
        """Raise InputError if the engine does not support this sleep level."""
        if level not in LEVELS:
            raise InputError(
                "sleep level",
                f"expected 0, 1 or 2, found {level!r:.40}",
                "1 moves the weights to the host's memory, 2 drops them",
            )
        if level:
            _ = self._residence  # raises if weights cannot leave the device

    def sleep(self, level: int) -> None:
        """Free the device's memory. Level 0 does nothing: the caller has paused generation."""
        self.check_sleep(level)
        if level:
            self._residence.sleep(level)
            self.is_sleeping = True

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Bring back the memory that the tags name; None: all. Raises InputError.

        After a sleep of level 2, weights are read from the folder of the last update, or else from
        the model's folder. Weights that came as tensors are lost: the version is then that of the
        folder.
        """
        wanted = tuple(TAGS if tags is None else tags)
        for tag in wanted:
            if tag not in TAGS:
                raise InputError(
                    "tags",
                    f"expected {', '.join(TAGS)}, found {tag!r:.40}",
                    "leave tags out to wake all",
                )
        if not self.is_sleeping:
            return
        residence = self._residence
        if WEIGHTS in wanted and not residence.has_weights:
            if residence.lost_weights and self._folder is None:
                self._folder, self.version = self._last_folder, self._last_version
                self._digests = self._fingerprint = None
                logger.warning(
                    "The tensors of the last update are lost; the weights are version %s again,"
                    " from %s",
                    self.version,
                    self._folder,
                )
            residence.wake_weights()
        if KV_CACHE in wanted:
            residence.wake_pages()
        self.is_sleeping = residence.is_asleep

    def stage(
        self,
        *,
        folder: str | None = None,
        tensors: NamedTensors | None = None,
        version: str | None = None,
        digests: bool = False,
    ) -> StagedUpdate:
        """Read and check new weights from a folder or tensors, without using them yet.

        `version`: by default the number of updates, this one included. `digests`: compute digests
        now; digests of tensors cannot be computed later. Raises InputError.
        """
        if self._config.kv_transfer is not None:
            raise InputError(
                "weight updates",
                "are not supported with --kv-transfer-config: engines with different weights would"
                " exchange KV pages",
                "start the server without --kv-transfer-config",
            )
        if self._model.vision is not None:
            raise InputError(
                "weight updates",
                "do not include the vision tower, which would keep its old weights",
                "start with --language-model-only",
            )
        if folder is not None:
            staged = self._residence.stage_folder(folder, digests=digests)
        else:
            staged = self._residence.stage_tensors(tensors or (), digests=digests)
        if version is None:
            version = str(self._num_updates + 1)
        return StagedUpdate(weights=staged, version=version, folder=folder)

    def join_group(self, command: JoinWeightGroup) -> None:
        """Join a group in which a trainer broadcasts weights. Raises InputError."""
        _ = self._residence  # raises where weights cannot be replaced
        if command.name in self._groups:
            raise InputError(
                f"weight group {command.name:.80}", "exists already", "destroy it first"
            )
        device = self._workers.runner.device
        if device.type == "cuda" and device.index is None:  # NCCL requires the number
            device = torch.device("cuda", torch.cuda.current_device())
        self._groups[command.name] = WeightGroup(command, command.rank, device)

    def leave_group(self, name: str) -> None:
        """Leave a group. Raises InputError if no group has this name."""
        self._group(name)
        del self._groups[name]

    def _group(self, name: str) -> WeightGroup:
        if name not in self._groups:
            raise InputError(
                f"weight group {name:.80}", "does not exist", "POST /init_weights_update_group"
            )
        return self._groups[name]

    def receive(self, command: ReceiveWeights) -> tuple[int, bool]:
        """Copy one part of the new weights to the host.

        Returns the number of tensors so far, and True if they include all tensors of the model's
        folder. On an error all parts are dropped. Raises InputError.
        """
        _ = self._residence  # raises if weights cannot be replaced
        if command.is_first:
            self.drop_received()
        shared, broadcast = command.tensors, command.broadcast
        try:
            names = [each.name for each in shared] if broadcast is None else broadcast.names
            # Checked before receiving: a group is unusable after a broadcast that stops midway.
            for name, count in Counter([*self._received, *names]).items():
                if count > 1:
                    raise InputError(
                        f"tensor {name:.200}",
                        "comes twice in the update",
                        "send all tensors again: those already sent are dropped",
                    )
            if broadcast is None:
                coming = open_tensors(shared)
            else:
                coming = self._group(broadcast.group).receive(broadcast)
            for name, tensor in coming:
                is_ours = broadcast is not None and tensor.device.type == "cpu"
                self._received[name] = tensor if is_ours else to_host(tensor)
        except BaseException:
            self.drop_received()
            raise
        return len(self._received), self._has_all()

    def drop_received(self) -> None:
        """Drop the received parts of an unfinished update."""
        self._received = {}

    def _has_all(self) -> bool:
        """Return True if the received float tensors include all tensors of the model's folder."""
        reader = CheckpointReader(self._config.model)
        coded = set(quantized_modules(reader.entries))
        names = set()
        for name in reader.entries:
            module = name.rpartition(".")[0].removesuffix(".weight")
            is_code = module in coded and not name.endswith(".bias")
            names.add(f"{module}.weight" if is_code else name)
        held = MemoryTensors(self._received.items(), reader.config)
        return names <= held.entries.keys()

    def stage_shared(
        self,
        shared: Sequence[SharedTensor],
        version: str | None = None,
        digests: bool = False,
    ) -> StagedUpdate:
        """Read and check the received parts plus `shared`. Raises InputError.

        The received parts are dropped even on an error: the next update starts from the first part.
        """
        received = self._received
        self.drop_received()
        tensors = itertools.chain(received.items(), open_tensors(shared))
        return self.stage(tensors=tensors, version=version, digests=digests)

    def commit(self, update: StagedUpdate) -> None:
        """Start using staged weights. Wakes up weights that sleep. Raises InputError."""
        self._residence.fill(update.weights)
        self._num_updates += 1
        self._fingerprint = None
        self._digests = update.weights.digests and dict(update.weights.digests)
        if update.folder is None:
            if self._folder is not None:
                self._last_folder, self._last_version = self._folder, self.version
        else:
            self._residence.use_folder(update.folder)
        self._folder, self.version = update.folder, update.version
        self.is_sleeping = self._residence.is_asleep

    def weight_digests(self) -> WeightDigests:
        """Return digests of the weights in use. The first call reads the folder of the weights.

        A digest covers the weights as read and rounded, not the kernels' private layouts.
        Raises InputError.
        """
        if self._digests is None:
            if self._folder is None:
                raise InputError(
                    "weight digests",
                    "were not computed with the last update, whose tensors are gone",
                    "update with digests",
                )
            if self._config.load_format == "dummy":
                raise InputError(
                    "weight digests",
                    "random weights have none",
                    "serve the model without --load-format dummy",
                )
            staged = self._residence.stage_folder(None, digests=True)
            self._digests = dict(staged.digests or {})
        return WeightDigests(
            version=self.version,
            total=total_digest(self._digests),
            tensors=self._digests,
            schemes=rounded_schemes(self._model),
        )
