"""Encoder: the vision tower on the device, and the embeddings that are kept there.

The scheduler decides which media items are encoded, kept and dropped
(scheduling/encoder_budget.py).
M: rows of a step with embeddings. C: hidden size. T: rows of the step.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from formats.checkpoint import CheckpointReader
from qserve.config import EngineConfig
from qserve.engine.media_limits import encoder_rows
from qserve.engine.runner.graphs.media_buffers import MediaBuffers
from qserve.engine.runner.graphs.tower_graphs import MAX_PATCHES, TowerGraphs
from qserve.engine.step.device_step import Batch, DraftMedia
from qserve.engine.step.media_rows import ItemRows, MediaRows
from qserve.engine.step.step_input import StepInput
from qserve.engine.step.transfer import to_device
from qserve.model.axis_ropes import AxisRopes
from qserve.model.blocks.attention import InputEmbeds
from qserve.model.blocks.rotary import Rotary
from qserve.model.decoder import Decoder
from qserve.multimodal.families import VisionConfig
from qserve.multimodal.tower import Tower

logger = logging.getLogger(__name__)


class Encoder:
    """Encodes media items, keeps their embeddings by digest, and adds them to steps."""

    def __init__(
        self,
        tower: Tower | None,
        ropes: AxisRopes | None,
        vision: VisionConfig,
        deferred_bytes: int,
    ) -> None:
        """`tower`: None on later pipeline stages. `ropes`: None if positions have one axis.

        `deferred_bytes`: device memory to reserve for kept embeddings and for a call of the tower.
        """
        self.tower, self.deferred_bytes = tower, deferred_bytes
        # number of first layers whose outputs get more embeddings added (deepstack)
        self._num_levels = vision.num_levels
        self._sees_ahead_in_windows = vision.sees_ahead_in_windows
        self._ropes = ropes
        self._graphs: TowerGraphs | None = None
        self._rows: dict[str, torch.Tensor] = {}

    @classmethod
    def load(
        cls,
        vision: VisionConfig,
        config: EngineConfig,
        decoder: Decoder,
    ) -> "Encoder":
        """Load the tower of a decoder's model. With --load-format dummy its weights are random.

        Later pipeline stages have no tower, but they compute positions.
        """
        ropes = None
        if vision.axis_pairs:
            rotaries = [each for each in decoder.modules() if isinstance(each, Rotary)]
            is_interleaved = vision.family.has_interleaved_axes
            ropes = AxisRopes(
                rotaries,
                vision.axis_pairs,
                is_interleaved=is_interleaved,
                divides_channels=vision.family.counts_images,
                has_frames_last=vision.family.has_frames_last,
            )
        if decoder.pipeline is not None and not decoder.pipeline.is_first:
            return cls(None, ropes, vision, 0)
        is_dummy = config.load_format == "dummy"
        tower = Tower.load(
            vision,
            config.model,
            None if is_dummy else CheckpointReader(config.model).other_parts,
            device=decoder.device,
            dtype=decoder.dtype,
            encodes_alone=config.batch_invariant,
            scheme=config.mm_encoder_quantization,
        )
        size = sum(each.nbytes for each in tower.parameters())
        scheme = config.mm_encoder_quantization
        text = f", layers in {scheme}" if scheme else ""
        logger.info("Vision tower: %.2f GiB in %s%s", size / 2**30, tower.dtype, text)
        width = decoder.config.hidden_size * (1 + vision.num_levels) * decoder.dtype.itemsize
        deferred_bytes = encoder_rows(config) * width + tower.workspace_bytes
        encoder = cls(tower, ropes, vision, deferred_bytes)
        if decoder.device.type == "cuda" and not config.enforce_eager:
            encoder.use_graphs()
        return encoder

    def use_graphs(self) -> None:
        """Run the tower in CUDA graphs, if it is built from this project's operations."""
        if self.tower is None or self.tower.of_grids is None:
            return
        self._graphs = TowerGraphs(self.tower.of_grids)
        self.tower.encode_grid = self._graphs.encode
        self.deferred_bytes += self.tower.activation_bytes(MAX_PATCHES) + self._graphs.buffer_bytes

    def close_graphs(self) -> None:
        """Free the tower's CUDA graphs. Later calls capture them again."""
        if self._graphs is not None:
            self._graphs.close()

    @property
    def has_axes(self) -> bool:
        """True if positions have several axes."""
        return self._ropes is not None

    @property
    def is_mutual(self) -> bool:
        """True if the rows of an image attend to each other, which CUDA graphs do not support."""
        return self.tower is not None and self.tower.config.is_mutual

    def with_media(self, batch: Batch, step: StepInput) -> tuple[Batch, DraftMedia]:
        """Add embeddings and positions of a step's media.

        Returns the step's tensors with them, and the media for a drafter.
        """
        device, next_embeds, positions_AT = batch.token_ids_T.device, None, None
        if step.media is not None:
            if step.media.of_items:
                batch = replace(batch, num_levels=self._num_levels)
            if self.tower is not None:
                self._encode(self.tower, step.media)
                embeds = self._embeds(step.media.rows_M, step.media.of_items, device)
                next_embeds = self._embeds(step.media.before_M, step.media.of_next, device)
                batch = replace(batch, embeds=embeds)
            ahead = step.media.keys_ahead_T
            if ahead is not None:  # the device has already corrected positions for drafts
                last_keys_T = batch.positions_T + to_device(ahead, device)
                in_windows = self._sees_ahead_in_windows
                batch = replace(batch, last_keys_T=last_keys_T, sees_ahead_in_windows=in_windows)
            if step.media.unlimited_T is not None:
                batch = replace(batch, unlimited_T=to_device(step.media.unlimited_T, device))
        if step.axis_offsets_AT is not None:
            positions_AT = batch.positions_T + to_device(step.axis_offsets_AT, device)
            batch = replace(batch, row_ropes=self._ropes.of(positions_AT))
        shifts = step.text_shifts_T
        return batch, DraftMedia(
            next_embeds=next_embeds,
            positions_AT=positions_AT,
            text_shifts_T=None if shifts is None else to_device(shifts, device),
        )

    def make_buffers(self, decoder: Decoder, max_tokens: int) -> MediaBuffers:
        """Allocate the input buffers of CUDA graphs with media."""
        return MediaBuffers(decoder, self._ropes, self._num_levels, max_tokens)

    def fill_(self, buffers: MediaBuffers, padded: Batch, step: StepInput) -> None:
        """Encode the media of a step and write the embeddings to the input buffers of its graph.

        `padded`: the graph's other inputs, already filled.
        """
        count, media_T = step.num_tokens, step.is_media_T
        batch = replace(
            padded,
            token_ids_T=padded.token_ids_T[:count],
            positions_T=padded.positions_T[:count],
            embeds=None,
            row_ropes=None,
            is_media_T=None if media_T is None else to_device(media_T, padded.token_ids_T.device),
        )
        batch, _ = self.with_media(batch, step)
        ropes = batch.row_ropes
        if ropes is None and self._ropes is not None:
            ropes = self._ropes.of(batch.positions_T.expand(self._ropes.num_axes, -1))
        buffers.fill_(batch, ropes, padded.num_tokens)

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Context that drops embeddings made inside it, which the scheduler does not know."""
        known = self._rows.copy()
        try:
            yield
        finally:
            self._rows = known

    def _encode(self, tower: Tower, media: MediaRows) -> None:
        """Drop and encode media items as the plan says."""
        for digest in media.dropped:
            self._rows.pop(digest, None)
        encoded = tower.encode(media.encode)
        self._rows.update(
            (item.digest, rows_MC) for item, rows_MC in zip(media.encode, encoded, strict=True)
        )

    def _embeds(
        self, rows_M: np.ndarray, of_items: Sequence[ItemRows], device: torch.device
    ) -> InputEmbeds | None:
        """Collect the embeddings for rows of a step. Returns None if there are none."""
        found = [self._rows[digest][start:stop] for digest, start, stop in of_items]
        if not found:
            return None
        values_MC, *added = torch.cat(found).chunk(1 + self._num_levels, -1)
        rows_M = to_device(rows_M, device)
        return InputEmbeds(rows_M=rows_M, values_MC=values_MC, added_MC=tuple(added))
