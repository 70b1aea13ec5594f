"""PeerRankPages: sends one rank's pages or states to other engines, and receives them.

A state takes the place of a page: its key is that of the page at whose end it was copied.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch

from formats.errors import InputError
from qserve.kv_transfer.config import FLAG, KvTransferConfig
from qserve.kv_transfer.links import make_link
from qserve.kv_transfer.peer.layout import BufferFacts, PageTensor
from qserve.kv_transfer.peer.peers import Peers
from qserve.kv_transfer.peer.receiver import PageReceiver
from qserve.kv_transfer.peer.sender import PageSender
from qserve.model.cache_spec import Cache

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSize:
    """Size of a transfer buffer."""

    usual: int  # slots without the setting buffer_gb
    least: int  # minimum number of slots
    share: float = 1.0  # part of buffer_gb that this buffer gets
    what: str = "the pages of one step"  # contents of the smallest buffer, for the error

    def num_slots(self, slot_bytes: int, buffer_gb: float | None) -> int:
        """Return the number of slots. Raises InputError if buffer_gb is too small."""
        if buffer_gb is None:
            return self.usual
        found = int(self.share * buffer_gb * GIB) // slot_bytes
        if found < self.least:
            raise InputError(
                f"{FLAG} buffer_gb",
                f"expected at least {self.least * slot_bytes / GIB / self.share:.3g}, for"
                f" {self.what}, found {buffer_gb:g}",
                "raise it, or lower --max-num-batched-tokens",
            )
        return found


class PeerRankPages:
    """The connector of one rank, for pages or for states.

    Only the thread that launches steps may call the methods.
    """

    def __init__(
        self,
        config: KvTransferConfig,
        tensors: list[PageTensor],
        caches: Callable[[], Sequence[Cache]],
        device: torch.device,
        *,
        engine: str,
        rank: int,
        num_ranks: int,
        model: str,
        digest: str,
        form: Mapping[str, str],
        size: BufferSize,
        of_states: bool = False,
    ) -> None:
        """Open the connector. Raises InputError.

        `caches`: returns the caches whose `page_tensors` are sent, which `tensors` describes.
        `engine`: random name, the same on all ranks. `digest`, `form`: facts that page contents
        depend on. `of_states`: True if these tensors are states.
        """
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._link = link = make_link(config, device, of_states=of_states)
        settings = link.settings
        num_slots = size.num_slots(sum(tensor.num_bytes for tensor in tensors), settings.buffer_gb)
        facts = {
            "of_states": of_states,
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
