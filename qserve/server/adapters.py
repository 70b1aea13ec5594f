"""LoRA adapters that clients may select as their model.

Adapters of --lora-modules are loaded at start-up. Clients may load more adapters: subfolders of
--lora-folder, by the subfolder's name.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from formats.errors import InputError
from formats.peft.lora_config import ADAPTER_CONFIG, WEIGHTS
from qserve.lora.request import LoRARequest
from qserve.server.http.clients import Turns

MAX_LOADED = 1024  # maximum number of adapters that clients may load


@dataclass(slots=True, kw_only=True)
class ServedAdapters:
    """Adapters by name. Use it on the server's event loop only."""

    of_name: dict[str, LoRARequest] = field(default_factory=dict)
    of_start: dict[str, str] = field(default_factory=dict)  # --lora-modules: name -> folder
    folder: str | None = None  # --lora-folder; None: clients may load no adapters
    turns: Turns = field(default_factory=lambda: Turns(1))  # one client loads or unloads at a time
    _num_numbered: int = 0

    @classmethod
    def of(
        cls, loras: Iterable[LoRARequest], names: Iterable[str], folder: str | None = None
    ) -> "ServedAdapters":
        """Start with the adapters of --lora-modules.

        Raises InputError if an adapter has the same name as the model (`names`).
        """
        adapters = cls(folder=folder and str(Path(folder).resolve()))
        for lora in loras:
            adapters.check_free(lora.lora_name, names)
            adapters.add(lora)
            adapters.of_start[lora.lora_name] = lora.lora_path
        return adapters

    def check_free(self, name: str, model_names: Iterable[str]) -> None:
        """Raise InputError if the name is one of `model_names`."""
        if name in model_names:
            raise InputError(f"adapter {name}", "this name is the model's", "choose another name")

    def next_request(self, name: str, path: str) -> LoRARequest:
        """Return a LoRARequest with a new id. Ids are not reused, even if a load fails."""
        lora = LoRARequest(name, self._num_numbered + 1, path)
        self._num_numbered += 1
        return lora

    def add(self, lora: LoRARequest) -> None:
        self.of_name[lora.lora_name] = lora
        self._num_numbered = max(self._num_numbered, lora.lora_int_id)

    def path_of(self, name: str) -> str:
        """Return the folder of an adapter by its name in --lora-folder.

        Raises InputError. The error does not reveal the server's paths.
        """
        root = Path(self.folder).resolve()
        plain = Path(name).name == name and name not in ("", ".", "..") and "\0" not in name
        found = root / name if plain and len(name) < 256 else None
        if found is None:
            last = Path(name[:300].replace("\0", "")).name
            raise InputError(
                "lora_path",
                f"expected the name of a folder in --lora-folder, found {name[:300]!r}",
                f"give its name alone: {last!r}" if last not in ("", "..") else "",
            )
        # Symbolic links must not lead out of --lora-folder.
        for file in (found, found / ADAPTER_CONFIG, found / WEIGHTS):
            if not file.exists() or not file.resolve().is_relative_to(root):
                raise InputError(
                    f"lora_path {name}",
                    "there is no such adapter"
                    if file is found
                    else f"expected {ADAPTER_CONFIG} and {WEIGHTS} in it",
                    "check the names of the folders in --lora-folder",
                )
        return str(found)
