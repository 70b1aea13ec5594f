"""Read the options of a processor of images or videos from a model's folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from formats.checkpoint import read_json

# remedy of errors about an option
COPY_OPTIONS = "copy preprocessor_config.json from the original model"


def stated_options(folder: Path, files: Sequence[tuple[str, str]]) -> dict[str, Any] | None:
    """Return the options in the first file that has them; None: no file has any.

    `files`: (name of a file, key of the options in it; "": the whole file). Values of null are left
    out. Raises CheckpointError.
    """
    for name, key in files:
        if (folder / name).is_file():
            found = read_json(folder / name)
            found = found.get(key) if key else found
            if isinstance(found, dict):
                return {option: value for option, value in found.items() if value is not None}
    return None
