"""KvConnector: a store of KV pages outside of an engine. `make_connector` creates it.

A page is the bytes of all layers, in the layout of page_copies.py. The key of a page covers
everything that these bytes depend on: model, cache format, tokens, salt (prefix_cache.py). So a
connector only compares keys. Its methods may block: worker threads call them, never the engine's
thread.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from formats.errors import InputError
from qserve.kv_transfer.config import FLAG, NIXL, PEER, KvTransferConfig
from qserve.kv_transfer.folder import FolderConnector


class KvConnector(Protocol):
    """A store of pages by key. Several threads call the methods; an exception counts as a miss."""

    def match(self, keys: Sequence[bytes]) -> int:
        """Return the number of leading `keys` whose pages can be loaded."""

    def load(self, key: bytes, page: memoryview) -> bool:
        """Fill `page` with the stored page. Returns False if it is gone or corrupted."""

    def save(self, key: bytes, page: memoryview) -> None:
        """Store a page if there is room. An existing page with this key may stay."""


# name -> (settings, bytes of a page) -> connector; raises InputError
CONNECTORS: dict[str, Callable[[Mapping[str, Any], int], KvConnector]] = {
    "folder": FolderConnector.from_settings,
    # vLLM's names of folder connectors. Their settings are accepted; the file format differs.
    "ExampleConnector": FolderConnector.from_settings,
    "SharedStorageConnector": FolderConnector.from_settings,
}


def make_connector(config: KvTransferConfig, page_bytes: int) -> KvConnector:
    """Create a connector from its name in CONNECTORS or from module:Class. Raises InputError."""
    make = CONNECTORS.get(config.connector) or _import(config.connector)
    return make(config.extra, page_bytes)


def _import(path: str) -> Callable[[Mapping[str, Any], int], KvConnector]:
    module, _, name = path.replace(":", ".").rpartition(".")
    expected = (
        f"kv_connector: expected one of {', '.join((*CONNECTORS, PEER, NIXL))}, or module:Class"
    )
    if not module:
        raise InputError(
            FLAG, f"{expected}, found {path!r}", "name an importable module and its class"
        )
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InputError(
            FLAG, f"{path!r} cannot be imported: {error}", "add its folder to PYTHONPATH"
        ) from error
