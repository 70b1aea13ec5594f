"""RankTransfers: exchanges one rank's KV pages and state snapshots with other engines.

The leader's SharedPages and SharedPeerPages make these calls on every rank.
"""

import json
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from qserve.engine.distributed.peer_limits import check_peer
from qserve.engine.runner.model_runner import ModelRunner
from qserve.engine.runner.senders import Senders
from qserve.kv_transfer.connector import make_connector
from qserve.kv_transfer.peer.rank_pages import BufferSize, PeerRankPages
from qserve.kv_transfer.peer.tensors import SlotCache, page_tensors, state_tensors
from qserve.kv_transfer.rank_pages import RankPages
from qserve.model.model_config import ModelConfig
from qserve.model.rank_shards import first_kv_heads, state_ranges
from qserve.parallel.ranks import Ranks

STEPS_IN_BUFFER = 4  # the default buffer holds the pages of so many of the largest steps
# Slots of the default buffer of states. A state may have 100 MB, and is read soon after it is sent.
STATES_IN_BUFFER = 16


class RankTransfers:
    """Connectors of one rank. Each is None until it is opened."""

    def __init__(self, runner: ModelRunner, model: ModelConfig, ranks: Ranks) -> None:
        """`model`: the whole model; the runner may hold a shard of it."""
        self._runner, self._model, self._ranks = runner, model, ranks
        self.pages: RankPages | None = None  # set by open_pages
        self.states: RankPages | None = None  # set by open_pages
        self.peer: PeerRankPages | None = None  # set by open_peer
        self.peer_states: PeerRankPages | None = None  # set by open_peer

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

    def open_peer(self, engine: str, digest: str, form: str) -> None:
        """Open this rank's `peer` connectors for KV pages and, if the model has them, for states.

        `engine`: random name of this engine. `digest`, `form` (JSON): facts that page contents
        depend on; both engines must agree on them. Raises InputError.
        """
        config, runner = self._runner.config, self._runner
        size = config.tensor_parallel_size
        check_peer(config, runner)
        rank = self._ranks.rank % size
        facts = {
            "engine": engine,
            "rank": self._ranks.rank,
            "num_ranks": self._ranks.size,
            "model": config.model,
            "digest": digest,
            "form": json.loads(form),
        }
        share = 0.5 if runner.has_states else 1.0  # of the setting buffer_gb
        # a request's first page may have been begun before
        step_pages = config.max_num_batched_tokens // config.block_size + config.max_num_seqs
        specs, heads = list(runner.cache_specs), list(first_kv_heads(self._model, size, rank))
        if runner.speculator is not None:
            specs += runner.speculator.cache_specs(runner.kv_format)
            heads += runner.speculator.first_kv_heads
        self.peer = PeerRankPages(
            config.kv_transfer,
            page_tensors(specs, runner.layer_caches.with_pages, heads),
            lambda: runner.layer_caches.with_pages,
            runner.device,
            size=BufferSize(usual=STEPS_IN_BUFFER * step_pages, least=step_pages, share=share),
            **facts,
        )
        runner.senders.pages = self.peer.sender
        if not runner.has_states:
            return
        layers = [SlotCache.of(each) for each in runner.caches]
        others = self._slot_caches()[len(layers) :]
        self.peer_states = PeerRankPages(
            config.kv_transfer,
            state_tensors(
                runner.cache_specs, layers, state_ranges(self._model, size, rank), others
            ),
            self._slot_caches,
            runner.device,
            size=BufferSize(
                usual=STATES_IN_BUFFER, least=1, share=1 - share, what="a state and the pages"
            ),
            of_states=True,
            **facts,
        )
        runner.senders.states = self.peer_states.sender

    def _slot_caches(self) -> list[SlotCache]:
        """Return the states of all layers, and the counts of tokens that they include."""
        return [SlotCache.of(each) for each in self._runner.layer_caches.with_states]

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

    def send_states(self, keys_NB: np.ndarray, slots: Sequence[int]) -> None:
        """Send other engines the states in these slots, as they are when the next step begins."""
        self.peer_states.send(keys_NB, slots)

    def receive_states(
        self, number: int, keys_NB: np.ndarray, slots: Sequence[int], waits: bool
    ) -> Future:
        """Fill state slots of the device with states from other engines."""
        return self.peer_states.receive(number, keys_NB, slots, waits)

    def expect_no_more_states(self, number: int) -> None:
        """Stop the `receive_states` call `number` from waiting for states not yet announced."""
        self.peer_states.expect_no_more(number)

    def cancel_states(self, number: int) -> None:
        """Make the `receive_states` call `number` end soon."""
        self.peer_states.cancel(number)

    def close_peer(self) -> None:
        """Close the `peer` connectors if they are open."""
        for each in (self.peer, self.peer_states):
            if each is not None:
                each.close()
        self.peer = self.peer_states = None
        self._runner.senders = Senders()
