"""SharedPeerPages: the leader's access to the peer connectors of all ranks.

Only the thread that launches steps may call the methods, so that calls and steps reach each rank in
the same order.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from qserve.kv_transfer.peer.rank_pages import PeerRankPages
from qserve.kv_transfer.shared_pages import in_all, merged


class OtherRanks(Protocol):
    """The ranks other than the leader. RankGroup of the engine implements this."""

    def begin(self, name: str, *values: Any) -> list[Future]:
        """Start a call on each rank. Returns the futures of the results."""

    def send(self, name: str, *values: Any) -> None:
        """Send a call without a result to each rank."""


class SharedPeerPages:
    """The peer connectors of all ranks of an engine, for KV pages or for states."""

    def __init__(
        self, ours: PeerRankPages, rank_group: OtherRanks | None, kind: str = "pages"
    ) -> None:
        """`ours`: the leader's connector. `rank_group`: the other ranks; None: one rank.

        `kind`: "pages" or "states", which is part of the names of the ranks' calls.
        """
        self._ours, self._rank_group, self._kind = ours, rank_group, kind
        self._number = 0

    @property
    def sends(self) -> bool:
        return self._ours.sender is not None

    def has(self, key: bytes) -> bool:
        """Return True if the ranks' buffers have a page, or will have it after the next step."""
        return self._ours.sender.has(key)

    def send(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Send the pages that the next launched step completes."""
        size = self._ours.num_slots
        for start in range(0, len(keys), size):
            values = _array(keys[start : start + size]), list(pages[start : start + size])
            if self._rank_group is not None:
                self._rank_group.send(f"send_{self._kind}", *values)
            self._ours.send(*values)

    def match(self, keys: Sequence[bytes]) -> int:
        """Return the number of leading pages that one engine has announced."""
        return self._ours.receiver.match(keys)

    def deepest(self, keys: Sequence[bytes]) -> int:
        """Return the number of keys up to the last one that an engine has announced."""
        return self._ours.receiver.deepest(keys)

    @property
    def num_peers(self) -> int:
        """Number of engines that are alive and whose pages can be used."""
        return self._ours.receiver.num_peers

    def receive(
        self, keys: Sequence[bytes], pages: Sequence[int], *, waits: bool
    ) -> tuple[int, Future]:
        """Fill unused pages. Returns the call's number, and a future: whether each was loaded.

        `waits`: also wait for pages that no engine has announced yet.
        """
        self._number += 1
        values = self._number, _array(keys), list(pages), waits
        theirs = []
        if self._rank_group is not None:
            theirs = self._rank_group.begin(f"receive_{self._kind}", *values)
        ours = self._ours.receive(*values)
        whole = merged([ours, *theirs], in_all, [False] * len(keys)) if theirs else ours
        return self._number, whole

    def expect_no_more(self, number: int) -> None:
        """Stop the call `number` of `receive` from waiting for pages that are not announced."""
        if self._rank_group is not None:
            self._rank_group.send(f"expect_no_more_{self._kind}", number)
        self._ours.expect_no_more(number)

    def cancel(self, number: int) -> None:
        """Make the call `number` of `receive` end soon."""
        if self._rank_group is not None:
            self._rank_group.send(f"cancel_{self._kind}", number)
        self._ours.cancel(number)


def _array(keys: Sequence[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1)
