"""`make_link`: opens the link between engines that --kv-transfer-config selects."""

import torch

from qserve.kv_transfer.config import NIXL, KvTransferConfig
from qserve.kv_transfer.nixl.link import NixlLink
from qserve.kv_transfer.peer.link import MappedLink, PageLink


def make_link(config: KvTransferConfig, device: torch.device) -> PageLink:
    """Open the link of a `peer` or `nixl` connector. Raises InputError."""
    make = NixlLink if config.connector == NIXL else MappedLink
    return make(config.extra, device)
