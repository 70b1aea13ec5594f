"""MediaBuffers: embeddings and rotary tables of captured steps with media, at fixed addresses.

A graph with media starts from embeddings: embeddings of tokens and of media are combined before the
graph runs. All graphs share the buffers.

T: tokens of the step. C: hidden size. L: levels. D: rotated channels.
"""

from dataclasses import replace

import torch

from qserve.engine.step.device_step import Batch
from qserve.model.axis_ropes import AxisRopes, RowRopes
from qserve.model.blocks.attention import InputEmbeds
from qserve.model.blocks.media_experts import MediaExperts
from qserve.model.decoder import Decoder


class MediaBuffers:
    """Inputs of captured steps with media, in addition to those of StepBuffers."""

    def __init__(
        self, decoder: Decoder, ropes: AxisRopes | None, num_levels: int, max_tokens: int
    ) -> None:
        """`ropes`: None if positions have one axis."""
        self._decoder = decoder
        shape = 1 + num_levels, max_tokens, decoder.config.hidden_size
        self._rows_LTC = torch.zeros(shape, dtype=decoder.dtype, device=decoder.device)
        self._is_media_T: torch.Tensor | None = None
        if any(isinstance(module, MediaExperts) for module in decoder.modules()):
            self._is_media_T = torch.zeros(max_tokens, dtype=torch.bool, device=decoder.device)
        self._ropes = None
        if ropes is not None:
            zeros_AT = torch.zeros(
                ropes.num_axes, max_tokens, dtype=torch.int64, device=decoder.device
            )
            self._ropes = ropes.of(zeros_AT)

    @property
    def nbytes(self) -> int:
        """Device memory of the buffers."""
        found = [self._rows_LTC]
        if self._is_media_T is not None:
            found.append(self._is_media_T)
        if self._ropes is not None:
            found += [self._ropes.rows_T, *self._ropes.tables.values()]
        return sum(tensor.nbytes for tensor in found)

    def attach(self, batch: Batch) -> Batch:
        """Return a graph's inputs with views of the buffers added."""
        count = batch.num_tokens
        values_TC, *added = self._rows_LTC[:, :count]
        embeds = InputEmbeds(rows_M=None, values_MC=values_TC, added_MC=tuple(added))
        ropes = None if self._ropes is None else self._ropes.of_rows(slice(0, count))
        media_T = None if self._is_media_T is None else self._is_media_T[:count]
        return replace(batch, embeds=embeds, row_ropes=ropes, is_media_T=media_T)

    def fill_(self, step: Batch, ropes: RowRopes | None, num_padded: int) -> None:
        """Write a step's embeddings and rotary tables to the buffers.

        `ropes`: rotary tables of the step's rows. `num_padded`: tokens of its graph.
        """
        count = step.num_tokens
        self._rows_LTC[:, :num_padded] = 0
        self._rows_LTC[0, :count] = self._decoder.embedded(step.token_ids_T, step)
        if step.embeds is not None:
            step.embeds.fill_levels_(self._rows_LTC[1:])
        if self._is_media_T is not None:
            self._is_media_T[:num_padded] = False
            if step.is_media_T is not None:
                self._is_media_T[:count] = step.is_media_T
        if self._ropes is not None:
            assert ropes is not None
            for rotary, table_TD in self._ropes.tables.items():
                table_TD[:count] = ropes.tables[rotary]
