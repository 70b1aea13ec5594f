"""ServedAdapters: the LoRA adapters that clients may name as their model. Knows no HTTP.

Those of the start have a folder each. A client may load more from one folder alone, by the name of
a folder in it.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from formats.errors import InputError
from formats.lora import WEIGHTS
from formats.lora_config import ADAPTER_CONFIG
from qserve.lora.request import LoRARequest

MAX_LOADED = 1024  # that clients may have loaded


@dataclass(slots=True, kw_only=True)
class ServedAdapters:
    """By name. Used on the server's event loop alone."""

    of_name: dict[str, LoRARequest] = field(default_factory=dict)
    folder: str | None = None  # that clients may load from; None: they may not
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while one is loaded
    _num_numbered: int = 0

    @classmethod
    def of(
        cls, loras: Iterable[LoRARequest], names: Iterable[str], folder: str | None = None
    ) -> "ServedAdapters":
        """Raises InputError where an adapter is called as the model is (`names`)."""
        adapters = cls(folder=folder)
        for lora in loras:
            adapters.check_free(lora.lora_name, names)
            adapters.add(lora)
        return adapters

    def check_free(self, name: str, model_names: Iterable[str]) -> None:
        """Raise InputError where a name is the model's."""
        if name in model_names:
            raise InputError(f"adapter {name}", "the model is called so", "give it another name")

    def next_request(self, name: str, path: str) -> LoRARequest:
        """One with a number of its own, also where an earlier one was not loaded."""
        lora = LoRARequest(name, self._num_numbered + 1, path)
        self._num_numbered += 1
        return lora

    def add(self, lora: LoRARequest) -> None:
        self.of_name[lora.lora_name] = lora
        self._num_numbered = max(self._num_numbered, lora.lora_int_id)

    def path_of(self, name: str) -> str:
        """The folder of an adapter that a client names. Raises InputError; it tells no paths."""
        root = Path(self.folder).resolve()
        plain = Path(name).name == name and name not in ("", ".", "..") and "\0" not in name
        found = root / name if plain and len(name) < 256 else None
        if found is None:
            raise InputError(
                "lora_path", f"expected the name of a folder, found {name[:300]!r}", "no separators"
            )
        # Links may lead from place to place within the folder, and nowhere else.
        for file in (found, found / ADAPTER_CONFIG, found / WEIGHTS):
            if not file.exists() or not file.resolve().is_relative_to(root):
                raise InputError(
                    f"lora_path {name}",
                    "there is no such adapter"
                    if file is found
                    else f"expected {ADAPTER_CONFIG} and {WEIGHTS} in it",
                )
        return str(found)
