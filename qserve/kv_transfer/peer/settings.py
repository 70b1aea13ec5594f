"""PeerSettings: the settings in kv_connector_extra_config for the connector `peer`."""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.errors import InputError, one_line
from qserve.errors import LEAVE_OUT
from qserve.kv_transfer.config import FLAG

KEYS = ("path", "buffer_gb", "patience_s")
MEMORY = Path("/dev/shm")  # folder of in-memory files on Linux
PATIENCE_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """Folder, buffer size and timeout of the connector."""

    path: Path  # folder of the index files; on a CPU also of the page buffers
    buffer_gb: float | None = None  # GiB per rank; None: the pages of four of the largest steps
    patience_s: float = PATIENCE_SECONDS  # longest wait of a request without progress

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> "PeerSettings":
        """Parse the settings. Raises InputError."""
        if unknown := extra.keys() - set(KEYS):
            raise InputError(
                f"{FLAG} kv_connector_extra_config",
                f"has unknown keys: {', '.join(sorted(unknown))}",
                f"known keys: {', '.join(KEYS)}",
            )
        path = extra.get("path", str(default_folder()))
        if not isinstance(path, str) or not path:
            raise InputError(
                f"{FLAG} path",
                f"expected a folder, found {path!r}",
                "give the path of a folder that all engines can write to",
            )
        for name in ("buffer_gb", "patience_s"):
            value = extra.get(name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if name in extra and not (is_number and value > 0):
                raise InputError(
                    f"{FLAG} {name}", f"expected a number above 0, found {value!r}", LEAVE_OUT
                )
        return cls(
            path=Path(path),
            buffer_gb=extra.get("buffer_gb"),
            patience_s=extra.get("patience_s", PATIENCE_SECONDS),
        )

    def make_folder(self) -> None:
        """Create the folder with access for this user only. Raises InputError."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            owner = self.path.stat().st_uid
        except OSError as error:
            raise InputError(
                f"{FLAG} path",
                f"{self.path} cannot be used: {one_line(error)}",
                "specify a folder that can be created",
            ) from error
        if owner != os.getuid():
            raise InputError(
                f"{FLAG} path",
                f"{self.path} belongs to another user, who could change what the model says",
                "specify a folder of your own",
            )


def default_folder() -> Path:
    """Return the default folder for engines of this user."""
    memory = MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())
    return memory / f"qserve-kv-{os.getuid()}"
