"""LoRA adapters that clients may select as their model.

Those of the start have a folder each. A client may load more from one folder alone, by the name of
a folder in it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from formats.errors import InputError
from formats.peft.lora_config import ADAPTER_CONFIG, WEIGHTS
from qserve.lora.request import LoRARequest
from qserve.server.http.clients import Turns

MAX_LOADED = 1024  # limit of adapters loaded by clients


@dataclass(slots=True, kw_only=True)
class ServedAdapters:
    """Adapters by name. Use it on the server's event loop only."""

    of_name: dict[str, LoRARequest] = field(default_factory=dict)
    of_start: dict[str, str] = field(default_factory=dict)  # folder of each of --lora-modules
    folder: str | None = None  # folder that clients may load from; None: none
    turns: Turns = field(default_factory=lambda: Turns(1))  # of clients that load or unload
    _num_numbered: int = 0

    @classmethod
    def of(
        cls, loras: Iterable[LoRARequest], names: Iterable[str], folder: str | None = None
    ) -> "ServedAdapters":
        """Adapters of the start. Raises InputError if one has a name of the model (`names`)."""
        adapters = cls(folder=folder and str(Path(folder).resolve()))
        for lora in loras:
            adapters.check_free(lora.lora_name, names)
            adapters.add(lora)
            adapters.of_start[lora.lora_name] = lora.lora_path
        return adapters

    def check_free(self, name: str, model_names: Iterable[str]) -> None:
        """Raise InputError if the name is one of the model's."""
        if name in model_names:
            raise InputError(f"adapter {name}", "this name is the model's", "choose another name")

    def next_request(self, name: str, path: str) -> LoRARequest:
        """Make a request with a new number, even if an earlier one was not loaded."""
        lora = LoRARequest(name, self._num_numbered + 1, path)
        self._num_numbered += 1
        return lora

    def add(self, lora: LoRARequest) -> None:
        self.of_name[lora.lora_name] = lora
        self._num_numbered = max(self._num_numbered, lora.lora_int_id)

    def path_of(self, name: str) -> str:
        """Folder of an adapter that a client names. Raises InputError without paths in it."""
        root = Path(self.folder).resolve()
        plain = Path(name).name == name and name not in ("", ".", "..") and "\0" not in name
        found = root / name if plain and len(name) < 256 else None
        if found is None:
            raise InputError(
                "lora_path",
                f"expected the name of a folder, found {name[:300]!r}",
                "leave out separators",
            )
        # Symbolic links may point anywhere within the folder, but not outside.
        for file in (found, found / ADAPTER_CONFIG, found / WEIGHTS):
            if not file.exists() or not file.resolve().is_relative_to(root):
                raise InputError(
                    f"lora_path {name}",
                    "there is no such adapter"
                    if file is found
                    else f"expected {ADAPTER_CONFIG} and {WEIGHTS} in it",
                )
        return str(found)
