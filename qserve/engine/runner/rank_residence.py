"""RankResidence: weights and pages of a rank other than the leader, at the leader's calls."""

from typing import Any

import msgspec

from qserve.engine.control.commands import SharedTensor
from qserve.engine.control.shared_tensors import open_tensors
from qserve.engine.runner.residence import Residence
from qserve.model.resident.staged import StagedWeights

CALLS = ("sleep", "wake_weights", "wake_pages", "use_folder")  # of Residence, as they are


class RankResidence:
    """The Residence of this rank, and the weights that are staged in it."""

    def __init__(self, residence: Residence) -> None:
        self._residence = residence
        self._staged: StagedWeights | None = None

    def call(self, name: str, *values: Any) -> Any:
        """Make a call of the leader. Raises InputError, and ValueError for a name of none."""
        if name in CALLS:
            return getattr(self._residence, name)(*values)
        if name in ("stage_folder", "stage_tensors", "fill", "drop"):
            return getattr(self, f"_{name}")(*values)
        raise ValueError(f"no call of a rank's residence: {name!r}")

    def _stage_folder(self, folder: str | None, digests: bool) -> str:
        self._staged = None  # of an update that did not end
        self._staged = self._residence.stage_folder(folder, digests=digests)
        return self._digests()

    def _stage_tensors(self, shared: bytes, digests: bool) -> str:
        """`shared`: descriptions of the tensors, as JSON."""
        self._staged = None
        tensors = open_tensors(msgspec.json.decode(shared, type=list[SharedTensor]))
        self._staged = self._residence.stage_tensors(tensors, digests=digests)
        return self._digests()

    def _digests(self) -> str:
        """Digests by name, as JSON."""
        return msgspec.json.encode(self._staged.digests or {}).decode()

    def _fill(self) -> None:
        staged, self._staged = self._staged, None
        self._residence.fill(staged)

    def _drop(self) -> None:
        self._staged = None
