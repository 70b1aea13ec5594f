"""Table of all architectures that are read and written. Needs no torch."""

from typing import Any

from formats.errors import CheckpointError
from formats.gguf.architectures.architecture import Architecture
from formats.gguf.architectures.classics import CLASSICS
from formats.gguf.architectures.dense import DENSE
from formats.gguf.architectures.gemma import GEMMAS
from formats.gguf.architectures.hybrids import HYBRIDS
from formats.gguf.architectures.latents import LATENTS
from formats.gguf.architectures.mamba_models import MAMBA_MODELS
from formats.gguf.architectures.mixtures import MIXTURES
from formats.gguf.architectures.step import STEP
from formats.gguf.architectures.uneven import UNEVEN

ARCHITECTURES: dict[str, Architecture] = {
    row.name: row
    for row in (
        *(*DENSE, *CLASSICS, *GEMMAS, *MIXTURES, *LATENTS, *UNEVEN, STEP, *HYBRIDS, *MAMBA_MODELS),
    )
}


def find_architecture(name: Any, subject: str) -> Architecture:
    """Return the row of an architecture. Raises CheckpointError if there is none."""
    if not isinstance(name, str) or not name:
        raise CheckpointError(subject, "has no general.architecture", "download the file again")
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{subject}: general.architecture",
            f"expected one of {', '.join(ARCHITECTURES)}, found {name!r:.60}",
            "use a model of one of these architectures",
        )
    return ARCHITECTURES[name]
