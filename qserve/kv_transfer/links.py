"""`make_link`: opens the link between engines that --kv-transfer-config selects."""

import torch

from qserve.kv_transfer.config import NIXL, KvTransferConfig
from qserve.kv_transfer.nixl.link import NixlLink
from qserve.kv_transfer.peer.link import MappedLink, PageLink


def make_link(config: KvTransferConfig, device: torch.device, *, of_states: bool) -> PageLink:
    """Open the link of a `peer` or `nixl` connector. Raises InputError.

    `of_states`: the link is for states, not for KV pages.
    """
    make = NixlLink if config.connector == NIXL else MappedLink
    return make(config.extra, device, of_states=of_states)
