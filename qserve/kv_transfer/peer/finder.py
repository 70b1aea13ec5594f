"""Finder: source of the slot tables of other engines. FolderFinder: finds them in a folder."""

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

import torch

from qserve.kv_transfer.peer.memory import PeerMemory, SlotMemory, bytes_path
from qserve.kv_transfer.peer.slot_index import IndexFileError, SlotIndex
from qserve.kv_transfer.peer.slot_table import SlotTable

logger = logging.getLogger(__name__)


class Finder(Protocol):
    """Source of the slot tables (indexes) and buffers of other engines' ranks."""

    def find(self, known: Collection[str], *, now: bool) -> dict[str, list[Any]]:
        """Return the indexes of engines that are alive: engine -> index of each rank.

        `known`: engines to leave out. `now`: also find engines that have just started.
        """

    def memory(self, index: Any) -> SlotMemory:
        """Return the buffer of an index. Raises InputError, OSError or RuntimeError."""

    def forget_dead(self, index: SlotTable) -> None:
        """Remove the files of a dead engine."""

    def close(self) -> None:
        """Stop searching."""


class FolderFinder:
    """Finds indexes and buffers of engines on this host, by their files in a folder."""

    def __init__(self, folder: Path, suffix: str, device: torch.device) -> None:
        """`suffix`: of the index files."""
        self._folder, self._suffix, self._device = folder, suffix, device
        self._refused: set[str] = set()  # names of invalid files

    def find(self, known: Collection[str], *, now: bool) -> dict[str, list[SlotIndex]]:
        """Open the indexes in the folder. `now` makes no difference."""
        found: dict[str, list[SlotIndex]] = {}
        for path in sorted(self._folder.glob(f"*{self._suffix}")):
            engine = path.name.partition(".")[0]
            if engine in known:
                continue
            try:
                index = SlotIndex.open(path)
            except (OSError, ValueError, IndexFileError) as error:
                if not isinstance(error, FileNotFoundError) and path.name not in self._refused:
                    self._refused.add(path.name)
                    logger.warning("KV peer: %s %s; ignoring it", path, error)
                continue
            if index.is_alive:
                found.setdefault(engine, []).append(index)
                continue
            index.close()
            _remove(path)
        return found

    def memory(self, index: SlotIndex) -> PeerMemory:
        """Map the buffer. Raises InputError, OSError or PeerAccessError."""
        return PeerMemory(index.path, index.facts, self._device)

    def forget_dead(self, index: SlotTable) -> None:
        """Remove the files of an engine that was killed."""
        if isinstance(index, SlotIndex):
            _remove(index.path)

    def close(self) -> None:
        """Do nothing."""


def remove_dead(folder: Path, suffix: str) -> None:
    """Remove the files of engines that were killed. On a CPU these files occupy memory."""
    for path in folder.glob(f"*{suffix}"):
        try:
            index = SlotIndex.open(path)
        except (OSError, ValueError, IndexFileError):
            continue
        is_alive = index.is_alive
        index.close()
        if not is_alive:
            _remove(path)


def _remove(path: Path) -> None:
    """Remove the files of an engine that was killed."""
    for each in (path, bytes_path(path)):
        each.unlink(missing_ok=True)
