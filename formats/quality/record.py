"""Read quality.json, and show it as text."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.errors import CheckpointError
from formats.quality.probe import Probe
from formats.table import count_text

QUALITY = "quality.json"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Contents of quality.json that other programs of the project read."""

    values: dict[str, Any]  # the whole file
    probe: Probe | None
    checksums: dict[str, int]

    @property
    def measured(self) -> dict[str, Any] | None:
        """Perplexities and distance from the float model; None: not measured."""
        return self.values.get("measured")

    def to_text(self) -> str:
        """Return the quality as one line of text."""
        return measured_text(self.measured) if self.measured else "quality: not measured"


def measured_text(found: dict[str, Any]) -> str:
    """Format perplexities and distances as one line."""
    return (
        f"perplexity {found['float_perplexity']:.4f} -> {found['perplexity']:.4f},"
        f" KL divergence {found['divergence']:.5f} nats, same top token"
        f" {100 * found['same_top_token']:.1f} %, on"
        f" {count_text(found['windows'], 'window')} of"
        f" {found['sequence_length']} tokens of {found['text']}"
    )


def read_quality(folder: str | Path) -> Quality | None:
    """Return the quality of a folder; None if it has no quality.json. Raises CheckpointError."""
    path = Path(folder) / QUALITY
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict) or values.get("version") != VERSION:
            raise ValueError(f"expected version {VERSION}")
        probe = values.get("probe")
        found = Quality(
            values=values,
            probe=None if probe is None else Probe.from_dict(probe),
            checksums={str(k): int(v) for k, v in (values.get("checksums") or {}).items()},
        )
        found.to_text()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            str(path), f"cannot be read: {error}", "delete it, or quantize the model again"
        ) from None
    return found
