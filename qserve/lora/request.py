"""LoRARequest: the LoRA adapter of a request. Names follow vLLM's."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from formats.errors import InputError
from qserve.errors import ParameterError

MAX_NAME = 256
MAX_RANK = 512  # maximum of --max-lora-rank


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """The name of an adapter, and its PEFT folder, which is read if the name is not known yet."""

    lora_name: str
    lora_int_id: int  # unique per name
    lora_path: str = ""

    def __post_init__(self) -> None:
        """Check the values. Raises ParameterError."""
        if not 0 < len(self.lora_name) <= MAX_NAME or not self.lora_name.isprintable():
            raise ParameterError(
                "lora_name",
                f"expected 1 to {MAX_NAME} printable characters, found {self.lora_name[:300]!r}",
                "give a shorter name of printable characters",
            )
        if self.lora_int_id < 1:
            raise ParameterError(
                "lora_int_id",
                f"expected 1 or more, found {self.lora_int_id}",
                "number adapters from 1",
            )


def parse_modules(modules: Sequence[str]) -> tuple[LoRARequest, ...]:
    """Parse the adapters of --lora-modules, numbered from 1. Raises InputError."""
    found = []
    for number, text in enumerate(modules, start=1):
        name, path = _parse(text)
        if name in (each.lora_name for each in found):
            raise InputError("--lora-modules", f"lists {name!r} twice", "use unique names")
        found.append(LoRARequest(name, number, path))
    return tuple(found)


def _parse(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if text.lstrip().startswith("{"):
        try:
            value = json.loads(text)
        except ValueError as error:
            raise InputError(
                "--lora-modules",
                f"is not valid JSON: {error}",
                "write --lora-modules NAME=FOLDER instead",
            ) from None
        name, path = value.get("name"), value.get("path")
    if not (isinstance(name, str) and name and isinstance(path, str) and path):
        raise InputError(
            "--lora-modules",
            f"expected NAME=FOLDER, found {text[:300]!r}",
            "write --lora-modules NAME=FOLDER",
        )
    return name, path
