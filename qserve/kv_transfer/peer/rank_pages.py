"""PeerRankPages: one rank's buffer for other engines, and what it takes from theirs."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

import numpy as np
import torch

from formats.errors import InputError
from qserve.kv_transfer.config import FLAG, KvTransferConfig
from qserve.kv_transfer.peer.layout import BufferFacts, PageTensor
from qserve.kv_transfer.peer.memory import BYTES_SUFFIX, allocate
from qserve.kv_transfer.peer.peers import Peers, remove_dead
from qserve.kv_transfer.peer.receiver import PageReceiver
from qserve.kv_transfer.peer.sender import PageSender
from qserve.kv_transfer.peer.settings import PeerSettings
from qserve.kv_transfer.peer.slot_index import SUFFIX
from qserve.model.cache_spec import Cache, CacheSpec

STEPS_IN_BUFFER = 4
GIB = 2**30


class PeerRankPages:
    """The connector of one rank. Only the thread that launches steps calls the methods."""

    def __init__(
        self,
        config: KvTransferConfig,
        specs: Sequence[CacheSpec],
        caches: Callable[[], Sequence[Cache]],
        device: torch.device,
        *,
        engine: str,
        rank: int,
        num_ranks: int,
        first_kv_heads: Sequence[int],
        model: str,
        digest: str,
        form: Mapping[str, str],
        step_pages: int,
    ) -> None:
        """Open the connector. Raises InputError.

        `engine`: random name, the same on all ranks. `first_kv_heads`: of this rank, by layer.
        `digest`, `form`: what pages depend on. `step_pages`: the most that one step completes.
        """
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        settings = PeerSettings.parse(config.extra)
        settings.make_folder()
        remove_dead(settings.path)
        tensors = _tensors(specs, caches(), first_kv_heads)
        page_bytes = sum(tensor.num_bytes for tensor in tensors)
        num_slots = STEPS_IN_BUFFER * step_pages
        if settings.buffer_gb is not None:
            num_slots = int(settings.buffer_gb * GIB) // page_bytes
            if num_slots < step_pages:
                raise InputError(
                    f"{FLAG} buffer_gb",
                    f"expected at least {step_pages * page_bytes / GIB:.3g}, the pages of one"
                    f" step, found {settings.buffer_gb:g}",
                    "raise it, or lower --max-num-batched-tokens",
                )
        facts = {
            "engine": engine,
            "rank": rank,
            "num_ranks": num_ranks,
            "model": model,
            "digest": digest,
            "form": dict(form),
            "tensors": tensors,
            "num_slots": num_slots,
            "process": os.getpid(),
        }
        self.sender: PageSender | None = None  # None: it only receives
        self.receiver: PageReceiver | None = None  # None: it only sends
        ours = BufferFacts(**facts, device=str(device))
        if config.saves:
            path = settings.path / f"{engine}.{rank}{SUFFIX}"
            memory = allocate(path.with_suffix(BYTES_SUFFIX), ours.offsets[-1], device)
            ours = BufferFacts(
                **facts, device=memory.device, handle=memory.handle, address=memory.address
            )
            try:
                self.sender = PageSender(path, ours, memory, device, caches)
            except BaseException:
                memory.close()
                raise
        if config.loads:
            peers = Peers(settings.path, ours, device)
            self.receiver = PageReceiver(peers, ours, device, caches, patience=settings.patience_s)
        self.num_slots = num_slots

    def send(self, keys_NB: np.ndarray, pages: Sequence[int]) -> None:
        """Send pages that the step that is launched next completes; up to `num_slots`."""
        self.sender.begin([key_B.tobytes() for key_B in keys_NB], pages)

    def receive(
        self, number: int, keys_NB: np.ndarray, pages: Sequence[int], waits: bool
    ) -> Future:
        """Fill pages that nothing uses. The future returns for each if it was loaded."""
        keys = [key_B.tobytes() for key_B in keys_NB]
        return self.receiver.receive(number, keys, pages, waits=waits)

    def expect_no_more(self, number: int) -> None:
        """Wait no longer for pages that are not announced."""
        self.receiver.expect_no_more(number)

    def cancel(self, number: int) -> None:
        """Let a call of `receive` end soon."""
        self.receiver.cancel(number)

    def close(self) -> None:
        """Stop, and remove the buffer."""
        for each in (self.receiver, self.sender):
            if each is not None:
                each.close()
        self.receiver = self.sender = None


def _tensors(
    specs: Sequence[CacheSpec], caches: Sequence[Cache], first_kv_heads: Sequence[int]
) -> list[PageTensor]:
    return [
        PageTensor(
            layer=layer,
            shape=list(tensor.shape[1:]),
            dtype=str(tensor.dtype).removeprefix("torch."),
            item_bytes=tensor.itemsize,
            axis=spec.heads_axis,
            first=first_kv_heads[layer] if spec.heads_axis is not None else 0,
        )
        for layer, (spec, cache) in enumerate(zip(specs, caches, strict=True))
        for tensor in cache.page_tensors
    ]
