"""Kept inputs of Solar's layers, stored as channels after the D channels of the hidden states.

All code that handles a layer's inputs and outputs handles them unchanged, as it does the channels
of carried.py.

Legend: B windows, S tokens of a window, D hidden size, X: D plus D channels for each connection.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from formats.architecture.skip_connections import SkipConnection


class KeptInputs:
    """Channels with the inputs that earlier layers kept, one group for each skip connection."""

    def __init__(self, skips: Sequence[SkipConnection], hidden_size: int) -> None:
        self._skips, self.hidden_size = skips, hidden_size
        self.width = len(skips) * hidden_size

    def start(
        self, ids_S: torch.Tensor, rows_SD: torch.Tensor, is_image_S: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the first layer's input of a window: embeddings, and nothing kept, [S, X]."""
        return torch.cat([rows_SD, rows_SD.new_zeros(len(rows_SD), self.width)], -1)

    def inputs(self, hidden_BSX: torch.Tensor, layer: int) -> torch.Tensor:
        """Return the hidden states that a layer reads, with kept inputs mixed in."""
        hidden_BSD, *kept = self._with_kept(hidden_BSX, layer)
        for skip, kept_BSD in zip(self._skips, kept, strict=True):
            if layer in skip.mixed:
                hidden_BSD = torch.lerp(hidden_BSD, kept_BSD, skip.factor)
        return hidden_BSD

    def arguments(self, hidden_BSX: torch.Tensor, layer: int) -> dict[str, Any]:
        """Return the arguments of a layer besides the hidden states: none."""
        return {}

    def joined(
        self,
        output_BSD: torch.Tensor,
        hidden_BSX: torch.Tensor,
        layer: int,
        arguments: Mapping[str, Any],
    ) -> torch.Tensor:
        """Return a layer's outputs with the channels of kept inputs."""
        return torch.cat([output_BSD, *self._with_kept(hidden_BSX, layer)[1:]], -1)

    def merged(self, hidden_SX: torch.Tensor) -> torch.Tensor:
        """Return the states [S, D] that the last norm reads."""
        return hidden_SX[..., : self.hidden_size]

    def _with_kept(self, hidden_BSX: torch.Tensor, layer: int) -> list[torch.Tensor]:
        """Return the hidden states, then what each connection keeps once the layer has begun."""
        hidden_BSD, *kept = hidden_BSX.split(self.hidden_size, -1)
        pairs = zip(self._skips, kept, strict=True)
        return [hidden_BSD, *(hidden_BSD if layer in skip.kept else each for skip, each in pairs)]
