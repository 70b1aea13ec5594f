"""Channel factors of a base checkpoint, and a warning if adapters of the float model do not fit."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from formats.checkpoint import read_json
from formats.errors import CheckpointError
from formats.files.channel_factors import ChannelFactors, read_channel_factors
from formats.files.side_files import CHANNEL_FACTORS
from formats.quality.record import read_quality
from formats.quant_config import find_block

logger = logging.getLogger(__name__)

ROTATE = "rotate"
SCALING = ("awq", "smoothquant")  # recipes, or formats of other tools, with channel factors
CONFIG = "config.json"


def factors_for_adapters(folder: str | Path) -> ChannelFactors | None:
    """Return a checkpoint's channel factors, or None. Logs a warning if adapters do not fit.

    Raises CheckpointError if the file of factors is damaged.
    """
    folder = Path(folder)
    factors = read_channel_factors(folder)
    reason = _misfit(_method(folder), factors)
    if reason is not None:
        logger.warning(
            "%s: %s; adapters trained on the float model do not fit. Quantize it with the recipe"
            " gptaq, or serve adapters that were trained on this checkpoint.",
            folder,
            reason,
        )
    return factors


def _misfit(method: str, factors: ChannelFactors | None) -> str | None:
    """Return why adapters of the float model do not fit, or None if they do."""
    if ROTATE in method:
        return f"made by {method}, which rotates the inputs of all linears"
    if factors is None and any(each in method for each in SCALING):
        return f"made by {method}, which scales the inputs of linears, and has no {CHANNEL_FACTORS}"
    return None


def _method(folder: Path) -> str:
    """Return the recipe that quality.json names, else the quantization format of config.json."""
    try:
        quality = read_quality(folder)
        if quality is not None:
            return str(quality.values.get("recipe"))
        block: Any = find_block(folder, read_json(folder / CONFIG))
    except CheckpointError:  # the model's loader reports it
        return ""
    return str(block.get("quant_method")) if isinstance(block, Mapping) else ""
