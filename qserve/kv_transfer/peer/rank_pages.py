"""PeerRankPages: sends one rank's pages to other engines, and receives pages from them."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

import numpy as np
import torch

from formats.errors import InputError
from qserve.kv_transfer.config import FLAG, KvTransferConfig
from qserve.kv_transfer.links import make_link
from qserve.kv_transfer.peer.layout import BufferFacts, PageTensor
from qserve.kv_transfer.peer.peers import Peers
from qserve.kv_transfer.peer.receiver import PageReceiver
from qserve.kv_transfer.peer.sender import PageSender
from qserve.model.cache_spec import Cache, CacheSpec

STEPS_IN_BUFFER = 4  # the default buffer holds the pages of so many of the largest steps
GIB = 2**30


class PeerRankPages:
    """The connector of one rank. Only the thread that launches steps may call the methods."""

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

        `engine`: random name, the same on all ranks. `first_kv_heads`: this rank's first KV head,
        by layer. `digest`, `form`: facts that page contents depend on. `step_pages`: maximum number
        of pages that one step completes.
        """
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._link = link = make_link(config, device)
        settings = link.settings
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
        self.sender: PageSender | None = None  # None: this engine only receives
        self.receiver: PageReceiver | None = None  # None: this engine only sends
        ours = BufferFacts(**facts, device=str(device))
        try:
            if config.saves:
                index, memory = link.publish(
                    ours,
                    lambda at, h, address: BufferFacts(
                        **facts, device=at, handle=h, address=address
                    ),
                )
                self.sender = PageSender(index, memory, device, caches)
            if config.loads:
                self.receiver = PageReceiver(
                    Peers(link.finder(ours), ours),
                    ours,
                    device,
                    caches,
                    patience=settings.patience_s,
                )
        except BaseException:
            self.close()
            raise
        self.num_slots = num_slots

    def send(self, keys_NB: np.ndarray, pages: Sequence[int]) -> None:
        """Send the pages, up to `num_slots`, that the next launched step completes."""
        self.sender.begin([key_B.tobytes() for key_B in keys_NB], pages)

    def receive(
        self, number: int, keys_NB: np.ndarray, pages: Sequence[int], waits: bool
    ) -> Future:
        """Fill unused pages. The future's result says for each page if it was loaded.

        `waits`: also wait for pages that are not announced yet.
        """
        keys = [key_B.tobytes() for key_B in keys_NB]
        return self.receiver.receive(number, keys, pages, waits=waits)

    def expect_no_more(self, number: int) -> None:
        """Stop the call `number` of `receive` from waiting for pages that are not announced."""
        self.receiver.expect_no_more(number)

    def cancel(self, number: int) -> None:
        """Make the call `number` of `receive` end soon."""
        self.receiver.cancel(number)

    def close(self) -> None:
        """Stop sending and receiving, and remove the buffer."""
        for each in (self.receiver, self.sender):
            if each is not None:
                each.close()
        self.receiver = self.sender = None
        self._link.close()


def _tensors(
    specs: Sequence[CacheSpec], caches: Sequence[Cache], first_kv_heads: Sequence[int]
) -> list[PageTensor]:
    return [
        PageTensor(
            layer=layer,
            shape=list(tensor.shape[1:]),
            dtype=str(tensor.dtype).removeprefix("torch."),
            item_bytes=tensor.itemsize,
            axis=axis,
            first=first_kv_heads[layer] if axis is not None else 0,
        )
        for layer, (spec, cache) in enumerate(zip(specs, caches, strict=True))
        for tensor, axis in zip(
            cache.page_tensors, spec.heads_axes(len(cache.page_tensors)), strict=True
        )
    ]
