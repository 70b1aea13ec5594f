"""RunSettings: the arguments of quantize_checkpoint (calibrate/pipeline.py explains them)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from calibrate.float_model import FloatModel
from calibrate.recipe import Recipe
from calibrate.texts.data import CalibrationData, read_for_model
from calibrate.texts.image_windows import ChatReader
from formats.scheme import Scheme


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Arguments of quantize_checkpoint, one field each."""

    source: str | Path
    target: str | Path
    scheme: Scheme
    recipe: str | Recipe
    output_format: str | None
    ignore: Sequence[str]
    overrides: Iterable[tuple[str, Scheme]]
    bits: float | None
    pad: bool
    fit_groups: bool | None
    input_scales: Mapping[str, torch.Tensor | float]
    quantize_head: Scheme | None
    quantize_embedding: Scheme | None
    kv_cache: str | None
    kv_per_head: bool
    act_order: bool
    moe_calibrate_all_experts: bool
    adapter: str | Path | None
    calibration: str | CalibrationData | None
    samples: int
    sequence_length: int
    seed: int
    bos: bool
    eval_text: str | None
    quality_windows: int
    spill: str | Path | None
    device: str | Sequence[str]
    quantizer: str
    recorded: Mapping[str, Any] | None  # settings of the command, for the model card
    chats: ChatReader | None

    def read_calibration(self, model: FloatModel) -> CalibrationData:
        """Read the windows of calibration data. Raises InputError."""
        return read_for_model(
            model,
            self.calibration,
            self.samples,
            self.sequence_length,
            self.seed,
            self.bos,
            self.chats,
        )
