"""RankResidence: runs the leader's sleep and weight calls on another rank."""

from typing import Any

import msgspec
import numpy as np
import torch

from formats.errors import InputError
from qserve.engine.control.commands import SharedTensor
from qserve.engine.control.shared_tensors import DTYPES, open_tensors
from qserve.engine.runner.residence import Residence
from qserve.model.resident.staged import StagedWeights

CALLS = ("sleep", "wake_weights", "wake_pages", "use_folder")  # passed on to Residence
OWN_CALLS = ("stage_folder", "stage_tensors", "receive", "stage_received", "fill", "drop")


class RankResidence:
    """The Residence of this rank, and the weights that are staged in it."""

    def __init__(self, residence: Residence) -> None:
        self._residence = residence
        self._staged: StagedWeights | None = None
        self._received: dict[str, torch.Tensor] = {}  # tensors sent over the leader's connection

    def call(self, name: str, *values: Any) -> Any:
        """Run a call of the leader. Raises InputError, or ValueError for an unknown name."""
        if name in CALLS:
            return getattr(self._residence, name)(*values)
        if name in OWN_CALLS:
            return getattr(self, f"_{name}")(*values)
        raise ValueError(f"not a call of a rank's residence: {name!r}")

    def _stage_folder(self, folder: str | None, digests: bool) -> str:
        self._staged = None  # drop weights of an unfinished update
        self._staged = self._residence.stage_folder(folder, digests=digests)
        return self._digests()

    def _stage_tensors(self, shared: bytes, digests: bool) -> str:
        """`shared`: descriptions of the tensors, as JSON."""
        self._staged = None
        tensors = open_tensors(msgspec.json.decode(shared, type=list[SharedTensor]))
        self._staged = self._residence.stage_tensors(tensors, digests=digests)
        return self._digests()

    def _receive(
        self, name: str, dtype: str, shape: tuple[int, ...], start: int, content: np.ndarray
    ) -> None:
        """Store bytes of a tensor, which begin at byte `start`."""
        if start == 0:
            if dtype not in DTYPES:
                known = ", ".join(DTYPES)
                raise InputError(f"tensor {name}", f"has the dtype {dtype}", f"known: {known}")
            self._received[name] = torch.empty(shape, dtype=DTYPES[dtype])
        if name not in self._received:
            raise InputError(
                f"tensor {name}", "its first bytes were rejected", "send the whole tensor again"
            )
        whole = self._received[name].flatten().view(torch.uint8)
        whole[start : start + len(content)] = torch.from_numpy(content)

    def _stage_received(self, digests: bool) -> str:
        received, self._received = self._received, {}
        self._staged = None
        self._staged = self._residence.stage_tensors(received.items(), digests=digests)
        return self._digests()

    def _digests(self) -> str:
        """Return the digests by tensor name, as JSON."""
        return msgspec.json.encode(self._staged.digests or {}).decode()

    def _fill(self) -> None:
        staged, self._staged = self._staged, None
        self._residence.fill(staged)

    def _drop(self) -> None:
        self._staged, self._received = None, {}
