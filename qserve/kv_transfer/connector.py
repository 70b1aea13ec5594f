"""KvConnector: what keeps KV pages outside of an engine, and how one is made from its settings.

A page is the bytes of all layers, as page_copies.py lays them out. Its key says everything that
those bytes depend on: model, form of the cache, tokens, salt (prefix_keys.py). So a connector
compares nothing but keys. Its methods may block: threads call them, never the engine's own.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from formats.errors import InputError
from qserve.kv_transfer.config import FLAG, KvTransferConfig
from qserve.kv_transfer.folder import FolderConnector


class KvConnector(Protocol):
    """Pages by key. Methods run in several threads at once; an error of theirs is a miss."""

    def match(self, keys: Sequence[bytes]) -> int:
        """How many of `keys` can be loaded, up to the first that cannot."""

    def load(self, key: bytes, page: memoryview) -> bool:
        """Fill `page`. Returns False where it is not there any more, or is not what was saved."""

    def save(self, key: bytes, page: memoryview) -> None:
        """Keep a page, for as long as there is room. One that is there already may stay."""


# name -> (settings, bytes of a page) -> connector; raises InputError
CONNECTORS: dict[str, Callable[[Mapping[str, Any], int], KvConnector]] = {
    "folder": FolderConnector.from_settings,
    # vLLM's names of the same: its files are others, but the settings are read.
    "ExampleConnector": FolderConnector.from_settings,
    "SharedStorageConnector": FolderConnector.from_settings,
}


def make_connector(config: KvTransferConfig, page_bytes: int) -> KvConnector:
    """The connector of a row, or of a dotted path. Raises InputError."""
    make = CONNECTORS.get(config.connector) or _import(config.connector)
    return make(config.extra, page_bytes)


def _import(path: str) -> Callable[[Mapping[str, Any], int], KvConnector]:
    module, _, name = path.replace(":", ".").rpartition(".")
    expected = f"kv_connector: expected one of {', '.join(CONNECTORS)}, or module:Class"
    if not module:
        raise InputError(FLAG, f"{expected}, found {path!r}")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InputError(
            FLAG, f"{path!r} cannot be imported: {error}", "add its folder to PYTHONPATH"
        ) from error
