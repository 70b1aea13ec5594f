"""KvTransferConfig: the settings of --kv-transfer-config. The keys are vLLM's."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from formats.errors import InputError
from qserve.errors import LEAVE_OUT

FLAG = "--kv-transfer-config"
PEER = "peer"  # pages go directly between engines of one host (peer/)
NIXL = "nixl"  # pages go directly between engines, also across hosts (nixl/)
ROLES = ("kv_both", "kv_producer", "kv_consumer")
# vLLM's keys -> fields of KvTransferConfig
NAMES = {
    "kv_connector": "connector",
    "kv_role": "role",
    "kv_connector_extra_config": "extra",
}
# Keys of vLLM that are accepted and ignored. Pages are found by key, so engines need no id.
IGNORED = {"engine_id"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTransferConfig:
    """Where an engine saves KV pages to and loads them from, besides its own memory."""

    connector: str
    role: str = "kv_both"
    extra: Mapping[str, Any] = field(default_factory=dict)  # the connector's own settings

    @property
    def saves(self) -> bool:
        return self.role != "kv_consumer"

    @property
    def loads(self) -> bool:
        return self.role != "kv_producer"

    @property
    def is_peer(self) -> bool:
        """True if pages go directly from engine to engine, without a store in between."""
        return self.connector in (PEER, NIXL)

    @property
    def answers_after_saving(self) -> bool:
        """True if a reply waits until its pages are saved.

        After a reply from a producer, the client sends the prompt to a consumer, which must find
        the pages.
        """
        return self.role == "kv_producer"

    @classmethod
    def parse(cls, text: str) -> "KvTransferConfig":
        """Parse a JSON object. Raises InputError."""
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise InputError(
                FLAG,
                f"expected a JSON object, found {text!r:.200}",
                f'for example {FLAG} \'{{"kv_connector": "folder", "kv_role": "kv_both"}}\'',
            )
        if (policy := found.pop("kv_load_failure_policy", "recompute")) != "recompute":
            raise InputError(
                FLAG,
                f"kv_load_failure_policy: expected recompute, found {policy!r:.80}",
                "remove it; pages that cannot be loaded are recomputed",
            )
        unknown = found.keys() - NAMES.keys() - IGNORED
        if unknown:
            raise InputError(
                FLAG,
                f"has unknown keys: {', '.join(sorted(unknown))}",
                f"known keys: {', '.join(NAMES)}",
            )
        config = cls(**{"connector": ""} | {NAMES[k]: v for k, v in found.items() if k in NAMES})
        if not isinstance(config.connector, str) or not config.connector:
            raise InputError(
                FLAG,
                "kv_connector: expected folder, peer, nixl, or module:Class, found"
                f" {config.connector!r:.80}",
                'for example {"kv_connector": "folder"}',
            )
        if config.role not in ROLES:
            raise InputError(
                FLAG,
                f"kv_role: expected one of {', '.join(ROLES)}, found {config.role!r}",
                LEAVE_OUT,
            )
        if not isinstance(config.extra, dict):
            raise InputError(
                FLAG,
                f"kv_connector_extra_config: expected an object, found {config.extra!r:.80}",
                'for example {"path": "/dev/shm/kv"}',
            )
        return config
