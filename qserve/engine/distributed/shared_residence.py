"""SharedResidence: sleep, wake-up and weight updates of a model that is split over ranks.

SharedResidence has the interface of Residence. All ranks run each operation at the same time,
because captured CUDA graphs contain all-reduces over all ranks.
"""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from formats.errors import InputError
from qserve.engine.control.shared_tensors import NamedTensors, shared_tensors
from qserve.engine.distributed.rank_group import RankGroup
from qserve.engine.runner.residence import Residence
from qserve.model.resident.staged import StagedWeights

PIECE_BYTES = 2**25  # bytes of a tensor in one frame


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStaged:
    """New weights that all ranks have read and checked."""

    ours: StagedWeights  # the leader's shard
    digests: dict[str, str] | None  # digests of all ranks' tensors, if requested


class SharedResidence:
    """Weights and KV pages of all ranks."""

    def __init__(
        self,
        ours: Residence,
        rank_group: RankGroup,
        in_step: Callable[[], AbstractContextManager[None]],
        *,
        shares_memory: bool,
    ) -> None:
        """`ours`: residence of the leader. `in_step`: context for work that may wait for other
        ranks. `shares_memory`: True if all ranks are on this machine.
        """
        self._ours, self._rank_group, self._in_step = ours, rank_group, in_step
        self._shares_memory = shares_memory

    @property
    def is_asleep(self) -> bool:
        """True if KV pages or weights are not on the devices."""
        return self._ours.is_asleep

    @property
    def has_weights(self) -> bool:
        return self._ours.has_weights

    @property
    def lost_weights(self) -> bool:
        """True if the weights were dropped."""
        return self._ours.lost_weights

    def sleep(self, level: int) -> None:
        """Free device memory on all ranks. If one fails, wakes all ranks and raises InputError."""
        try:
            self._on_all("sleep", level)
        except InputError:
            self.wake_weights()
            self.wake_pages()
            raise

    def wake_weights(self) -> None:
        """Bring the weights back. Raises InputError."""
        self._on_all("wake_weights")

    def wake_pages(self) -> None:
        """Allocate empty KV pages and capture the first CUDA graphs. Raises InputError."""
        if not self._ours.has_weights:
            self._ours.wake_pages()  # raises
        self._on_all("wake_pages")

    def stage_folder(self, folder: str | None, *, digests: bool = False) -> SharedStaged:
        """Read and check new weights; each rank reads its shard. Raises InputError."""
        return self._stage(
            lambda: self._ours.stage_folder(folder, digests=digests),
            *("stage_folder", folder, digests),
        )

    def stage_tensors(self, tensors: NamedTensors, *, digests: bool = False) -> SharedStaged:
        """Read and check new weights from tensors; each rank takes its shard.

        Ranks on this machine read the tensors from shared host memory. If ranks are on other
        machines, the leader sends every rank all tensors over its connection. Raises InputError.
        """
        named = [(name, each.cpu()) for name, each in tensors]
        if not self._shares_memory:
            self._send(named)
            return self._stage(
                lambda: self._ours.stage_tensors(named, digests=digests),
                *("stage_received", digests),
            )
        with shared_tensors(named) as shared:
            return self._stage(
                lambda: self._ours.stage_tensors(named, digests=digests),
                *("stage_tensors", msgspec.json.encode(shared), digests),
            )

    def use_folder(self, folder: str) -> None:
        """Set the folder from which weights are read after a sleep of level 2."""
        self._on_all("use_folder", folder)

    def fill(self, staged: SharedStaged) -> None:
        """Replace the weights. If one rank fails, no further step can run."""
        theirs = self._rank_group.begin("reside", "fill")
        try:
            with self._in_step():
                self._ours.fill(staged.ours)
            for each in theirs:
                each.result()
        except BaseException as error:
            self._rank_group.forbid_steps(f"some ranks have new weights, others not: {error}")
            raise

    def _send(self, named: list[tuple[str, torch.Tensor]]) -> None:
        """Send all tensors to the ranks, piece by piece. Raises the error of a rank.

        After an error the ranks drop all pieces.
        """
        before: list[Future] = []
        try:
            for name, tensor in named:
                form = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
                content = tensor.contiguous().flatten().view(torch.uint8).numpy()
                for start in range(0, max(1, len(content)), PIECE_BYTES):
                    piece = content[start : start + PIECE_BYTES]
                    begun = self._rank_group.begin("reside", "receive", name, *form, start, piece)
                    for each in before:  # so at most two pieces are in a rank's connection
                        each.result()
                    before = begun
            for each in before:
                each.result()
        except BaseException:
            self._rank_group.begin("reside", "drop")  # runs after the pieces already sent
            raise

    def _stage(self, ours: Callable[[], StagedWeights], *call: Any) -> SharedStaged:
        theirs = self._rank_group.begin("reside", *call)
        try:
            staged = ours()
            digests = dict(staged.digests or {})
            for each in theirs:
                digests |= msgspec.json.decode(each.result())
        except BaseException:
            for each in theirs:
                each.exception()  # wait for the rank before it drops its tensors
            self._rank_group.begin("reside", "drop")
            raise
        return SharedStaged(ours=staged, digests=digests if staged.digests is not None else None)

    def _on_all(self, name: str, *values: Any) -> None:
        """Run one operation on all ranks at the same time and wait for all.

        Raises the leader's error, or else the first error of another rank.
        """
        theirs = self._rank_group.begin("reside", name, *values)
        try:
            with self._in_step():
                getattr(self._ours, name)(*values)
        finally:
            ended = [each.exception() for each in theirs]
        for error in ended:
            if error is not None:
                raise error
