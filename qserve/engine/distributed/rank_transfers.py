"""RankTransfers: exchanges one rank's KV pages and state snapshots with other engines.

The leader's SharedPages and SharedPeerPages make these calls on every rank.
"""

import json
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from qserve.engine.distributed.peer_limits import check_peer
from qserve.engine.runner.model_runner import ModelRunner
from qserve.kv_transfer.connector import make_connector
from qserve.kv_transfer.peer.rank_pages import PeerRankPages
from qserve.kv_transfer.rank_pages import RankPages
from qserve.model.model_config import ModelConfig
from qserve.model.tp_plan import first_kv_heads
from qserve.parallel.ranks import Ranks


class RankTransfers:
    """Connectors of one rank. Each is None until it is opened."""

    def __init__(self, runner: ModelRunner, model: ModelConfig, ranks: Ranks) -> None:
        """`model`: the whole model; the runner may hold a shard of it."""
        self._runner, self._model, self._ranks = runner, model, ranks
        self.pages: RankPages | None = None  # set by open_pages
        self.states: RankPages | None = None  # set by open_pages
        self.peer: PeerRankPages | None = None  # set by open_peer

    def open_pages(self) -> tuple[int, int]:
        """Open this rank's connectors for KV pages and, if the model has states, snapshots.

        Returns the bytes of a page and of a snapshot (0: no snapshots). Raises InputError.
        """
        caches = self._runner.layer_caches
        copies, states = caches.page_copies, caches.state_copies
        config, rank, size = self._runner.config.kv_transfer, self._ranks.rank, self._ranks.size
        connector = make_connector(config, copies.page_bytes)
        self.pages = RankPages(connector, copies, rank=rank, size=size)
        if states is None:
            return copies.page_bytes, 0
        connector = make_connector(config, states.page_bytes)
        self.states = RankPages(connector, states, rank=rank, size=size, kind="states")
        return copies.page_bytes, states.page_bytes

    def match_pages(self, keys_NB: np.ndarray) -> Future:
        """Count the leading keys whose pages this rank's connector has."""
        return self.pages.match(keys_NB)

    def load_pages(self, keys_NB: np.ndarray, slots: Sequence[int]) -> Future:
        """Load KV pages into slots of the host tier."""
        return self.pages.load(keys_NB, slots)

    def save_pages(self, keys_NB: np.ndarray, pages: Sequence[int]) -> Future:
        """Save KV pages of the device."""
        return self.pages.save(keys_NB, pages)

    def deepest_states(self, keys_NB: np.ndarray) -> Future:
        """Count the keys up to the last one whose snapshot this rank's connector has."""
        return self.states.deepest(keys_NB)

    def load_states(self, keys_NB: np.ndarray, slots: Sequence[int]) -> Future:
        """Load state snapshots into slots of the host tier."""
        return self.states.load(keys_NB, slots)

    def save_states(self, keys_NB: np.ndarray, slots: Sequence[int]) -> Future:
        """Save the states in these slots of the device."""
        return self.states.save(keys_NB, slots)

    def open_peer(self, engine: str, digest: str, form: str) -> int:
        """Open this rank's `peer` connector. Returns the maximum number of pages per transfer.

        `engine`: random name of this engine. `digest`, `form` (JSON): facts that page contents
        depend on; both engines must agree on them. Raises InputError.
        """
        config, runner = self._runner.config, self._runner
        size = config.tensor_parallel_size
        check_peer(config, runner)
        self.peer = PeerRankPages(
            config.kv_transfer,
            runner.cache_specs,
            lambda: runner.caches,
            runner.device,
            engine=engine,
            rank=self._ranks.rank,
            num_ranks=self._ranks.size,
            first_kv_heads=first_kv_heads(self._model, size, self._ranks.rank % size),
            model=config.model,
            digest=digest,
            form=json.loads(form),
            # a request's first page may have been begun before
            step_pages=config.max_num_batched_tokens // config.block_size + config.max_num_seqs,
        )
        runner.page_sender = self.peer.sender
        return self.peer.num_slots

    def send_pages(self, keys_NB: np.ndarray, pages: Sequence[int]) -> None:
        """Send other engines the pages that the next launched step completes."""
        self.peer.send(keys_NB, pages)

    def receive_pages(
        self, number: int, keys_NB: np.ndarray, pages: Sequence[int], waits: bool
    ) -> Future:
        """Fill pages of the device with pages from other engines."""
        return self.peer.receive(number, keys_NB, pages, waits)

    def expect_no_more_pages(self, number: int) -> None:
        """Stop the `receive_pages` call `number` from waiting for pages not yet announced."""
        self.peer.expect_no_more(number)

    def cancel_pages(self, number: int) -> None:
        """Make the `receive_pages` call `number` end soon."""
        self.peer.cancel(number)

    def close_peer(self) -> None:
        """Close the `peer` connector if it is open."""
        if self.peer is not None:
            self.peer.close()
            self.peer = self._runner.page_sender = None
