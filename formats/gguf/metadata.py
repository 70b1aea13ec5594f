"""Checked access to the metadata of a GGUF file below its architecture's name. Needs no torch."""

import array
import struct
from typing import Any

from formats.errors import CHECK_ACCESS, CheckpointError
from formats.gguf.architectures.architecture import Architecture
from formats.gguf.architectures.table import find_architecture
from formats.gguf.container import GgufFile

MAX_SIZE = 2**31
_DOWNLOAD = "download the file again, or another GGUF file of the model"  # remedy
MAX_DIVISORS = 4096


class Metadata:
    """Metadata of one file, by key below the architecture's name."""

    def __init__(self, gguf: GgufFile) -> None:
        """Find the architecture's row. Raises CheckpointError for an unknown architecture."""
        self.gguf, self.subject = gguf, str(gguf.files[0])
        name = gguf.metadata.get("general.architecture")
        row: Architecture = find_architecture(name, self.subject)
        self.architecture = row.variant_of_file(gguf.tensors, gguf.metadata)

    def get(self, key: str) -> Any:
        """Return a value; None: the file has none. An array of equal numbers becomes one number."""
        value = self.gguf.metadata.get(f"{self.architecture.name}.{key}")
        if value is None or isinstance(value, str | bool | int | float):
            return value
        values = list(value)
        return values[0] if values and len(set(values)) == 1 else values

    def number(self, key: str, default: float | None = None) -> float | None:
        """Return a finite number. Raises CheckpointError if the value is something else."""
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, bool | str | list) or value != value or abs(value) > 1e30:
            raise self.wrong(key, f"expected a number, found {value!r:.60}")
        return shortest(value) if isinstance(value, float) else value

    def numbers(self, key: str) -> list[float] | None:
        """Return finite numbers, one if all are equal; None: the file has none.

        Raises CheckpointError if a value is something else.
        """
        value = self.get(key)
        if value is None:
            return None
        values = value if isinstance(value, list) else [value]
        if not values or not all(type(x) in (int, float) and abs(x) <= 1e30 for x in values):
            raise self.wrong(key, f"expected numbers, found {value!r:.60}")
        return [shortest(float(each)) for each in values]

    def size(self, key: str, default: int | None = None) -> int:
        """Return a positive whole number. Raises CheckpointError if the value is something else."""
        value = self.get(key)
        value = default if value is None else value
        if type(value) is not int or not 0 < value < MAX_SIZE:
            raise self.wrong(key, f"expected a positive whole number, found {value!r:.60}")
        return value

    def divisors(self, name: str, width: int, *, most: float = 1e6) -> list[float]:
        """Read a tensor of frequency divisors [width / 2], all below `most`.

        Raises CheckpointError.
        """
        tensor = self.gguf.tensors.get(name)
        subject = f"{self.subject}: {name}"
        if tensor is None or tensor.type.name != "F32" or tensor.shape != (width // 2,):
            found = "none" if tensor is None else f"{tensor.type.name} {list(tensor.shape)}"
            raise CheckpointError(
                subject,
                f"expected F32 [{width // 2}], found {found}",
                _DOWNLOAD,
            )
        if width // 2 > MAX_DIVISORS:
            raise CheckpointError(
                subject,
                f"expected at most {MAX_DIVISORS} values, found {width // 2}",
                _DOWNLOAD,
            )
        try:
            with tensor.file.open("rb") as file:
                file.seek(tensor.offset)
                values = array.array("f", file.read(tensor.num_bytes))
        except (OSError, ValueError) as error:
            raise CheckpointError(subject, f"cannot be read: {error}", CHECK_ACCESS) from None
        if len(values) != width // 2 or not all(0 < value < most for value in values):
            raise CheckpointError(
                subject,
                f"expected {width // 2} positive numbers below {most:g}, found"
                f" {values.tolist()!s:.80}",
                _DOWNLOAD,
            )
        return values.tolist()

    def wrong(self, key: str, problem: str) -> CheckpointError:
        name = f"{self.subject}: {self.architecture.name}.{key}"
        return CheckpointError(name, problem, _DOWNLOAD)


def shortest(value: float) -> float:
    """Return the number with the fewest digits that is the same in float32, the files' dtype."""
    for digits in range(1, 9):
        found = float(f"{value:.{digits}g}")
        if struct.pack("<f", found) == struct.pack("<f", value):
            return found
    return value
