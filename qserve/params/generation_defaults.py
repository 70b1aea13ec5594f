"""Sampling defaults from a model's generation_config.json, for fields that a request omits."""

import json
from pathlib import Path

from formats.errors import InputError, one_line
from qserve.errors import ParameterError
from qserve.params.sampling_params import SamplingParams

FILE = "generation_config.json"
COPY_DEFAULTS = "copy the file from the original model, or remove it"  # remedy
# Sampling fields whose defaults are read from the file.
DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def load_defaults(folder: str | Path) -> dict[str, float]:
    """Return the sampling fields that the file sets; {} if there is no file. Raises InputError."""
    path = Path(folder) / FILE
    try:
        found = json.loads(path.read_text())
        defaults = {name: found[name] for name in DEFAULTED if found.get(name) is not None}
        SamplingParams(**defaults)
    except FileNotFoundError:
        return {}
    except ParameterError as error:
        raise InputError(f"{path} {error.subject}", error.problem, COPY_DEFAULTS) from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(str(path), f"cannot be used: {one_line(error)}", COPY_DEFAULTS) from error
    return defaults
