"""SharedPeerPages: the leader's access to the peer connectors of all ranks.

Only the thread that launches steps calls the methods: calls reach each rank in order of its steps.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from qserve.kv_transfer.peer.rank_pages import PeerRankPages
from qserve.kv_transfer.shared_pages import in_all, merged


class OtherRanks(Protocol):
    """Ranks of the model other than the leader (engine: RankGroup)."""

    def begin(self, name: str, *values: Any) -> list[Future]:
        """Start a call on each rank. Returns the future results."""

    def tell(self, name: str, *values: Any) -> None:
        """Make a call on each rank, which has no result."""


class SharedPeerPages:
    """Peer connectors of one engine's ranks."""

    def __init__(self, ours: PeerRankPages, rank_group: OtherRanks | None) -> None:
        """`rank_group`: None with one rank."""
        self._ours, self._rank_group = ours, rank_group
        self._number = 0

    @property
    def sends(self) -> bool:
        return self._ours.sender is not None

    def has(self, key: bytes) -> bool:
        """True if a page is in the buffers of all ranks, or is on its way there."""
        return self._ours.sender.has(key)

    def send(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Send pages that the step that is launched next completes."""
        size = self._ours.num_slots
        for start in range(0, len(keys), size):
            values = _array(keys[start : start + size]), list(pages[start : start + size])
            if self._rank_group is not None:
                self._rank_group.tell("send_pages", *values)
            self._ours.send(*values)

    def match(self, keys: Sequence[bytes]) -> int:
        """Number of leading pages that an engine has announced."""
        return self._ours.receiver.match(keys)

    @property
    def num_peers(self) -> int:
        """Engines that live and whose pages can be used."""
        return self._ours.receiver.num_peers

    def receive(
        self, keys: Sequence[bytes], pages: Sequence[int], *, waits: bool
    ) -> tuple[int, Future]:
        """Fill pages that nothing uses. Returns the call's number, and whether each was loaded.

        `waits`: also for pages that no engine has announced yet.
        """
        self._number += 1
        values = self._number, _array(keys), list(pages), waits
        theirs = []
        if self._rank_group is not None:
            theirs = self._rank_group.begin("receive_pages", *values)
        ours = self._ours.receive(*values)
        whole = merged([ours, *theirs], in_all, [False] * len(keys)) if theirs else ours
        return self._number, whole

    def expect_no_more(self, number: int) -> None:
        """Let a call of `receive` wait no longer for pages that are not announced."""
        if self._rank_group is not None:
            self._rank_group.tell("expect_no_more_pages", number)
        self._ours.expect_no_more(number)

    def cancel(self, number: int) -> None:
        """Let a call of `receive` end soon."""
        if self._rank_group is not None:
            self._rank_group.tell("cancel_pages", number)
        self._ours.cancel(number)


def _array(keys: Sequence[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1)
