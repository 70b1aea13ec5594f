"""Settings that disable a model's vision tower, and the budget of its encoder."""

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from formats.architecture.sizes import is_size
from formats.errors import InputError
from formats.files.json_file import read_json
from qkernels.choice import FIXED_ORDER
from qserve.config import EngineConfig
from qserve.engine.scheduling.encoder_budget import EncoderBudget
from qserve.model.model_config import ModelConfig
from qserve.multimodal.families import VisionConfig
from qserve.multimodal.layouts.squares import square_length

logger = logging.getLogger(__name__)


# Embeddings that a step may compute with --target-itl-ms; a single image may have more.
PACED_ROWS = 1024
# Key in the processor's file for the most embeddings of an image, and its default (Gemma 4).
MAX_KEY, MAX_POOLED = "max_soft_tokens", 280
REFERENCE = "reference"  # name of a kernel
PROCESSORS = ("preprocessor_config.json", "processor_config.json")


def largest_image(folder: str | Path, vision: VisionConfig) -> int:
    """Largest number of embeddings of one image, for a model that encodes an image in one step."""
    if "mm_tokens_per_image" in vision.values or vision.family.has_mutual_prompt:
        return square_length(vision.values)
    for name in PROCESSORS:
        if (Path(folder) / name).exists():
            stated = read_json(Path(folder) / name)
            own = stated.get("image_processor")
            most = (own if isinstance(own, dict) else stated).get(MAX_KEY)
            if is_size(most):
                return most
    return MAX_POOLED


class Limit(NamedTuple):
    """A condition under which a vision-language model takes text only."""

    is_met: Callable[[EngineConfig, VisionConfig], bool]
    remedy: str  # how to make the model take images


LIMITS = (
    Limit(lambda config, _: config.language_model_only, "remove --language-model-only"),
    Limit(
        lambda config, vision: vision.is_mutual and config.target_itl_ms is not None,
        "images of this model do not work with --target-itl-ms: each is computed in one step",
    ),
    Limit(
        lambda config, vision: (
            vision.is_mutual
            and config.max_num_batched_tokens
            < 2 * largest_image(config.model, vision) + config.max_num_seqs
        ),
        "each image of this model is computed in one step: raise --max-num-batched-tokens to twice"
        " its embeddings and --max-num-seqs",
    ),
    Limit(
        lambda config, _: importlib.util.find_spec("PIL") is None,
        "images need Pillow: pip install 'qserve-kit[vision]'",
    ),
    Limit(
        lambda config, _: not any((Path(config.model) / name).exists() for name in PROCESSORS),
        f"images need {PROCESSORS[0]}: copy it from the original model",
    ),
)


def longest_item(config: EngineConfig) -> int:
    """Number of tokens of the longest media item that a step can compute as a whole.

    A step may leave half of its budget to shorter prompts.
    """
    return (config.max_num_batched_tokens - config.max_num_seqs) // 2


def with_settings(config: EngineConfig, model: ModelConfig) -> ModelConfig:
    """Return the model, without its vision tower if a setting rules the tower out.

    Raises InputError if a setting of the tower is given but the model has no tower.
    """
    if model.vision is None:
        if config.mm_encoder_quantization is not None:
            raise InputError(
                f"--mm-encoder-quantization {config.mm_encoder_quantization}",
                f"{model.family.architecture} has no vision tower here",
                "remove the flag",
            )
        return model
    for limit in LIMITS:
        if limit.is_met(config, model.vision):
            logger.info("Text only: %s", limit.remedy)
            return replace(model, vision=None, media_kinds=frozenset(), no_vision=limit.remedy)
    if model.vision.is_mutual:
        _log_overridden_kernel(config.kernels.get("attention", ""))
    return model


def _log_overridden_kernel(choice: str) -> None:
    """Log that steps with images run another attention kernel than the setting selects.

    `choice`: names of selected kernels, and names of excluded ones with a minus sign.
    """
    names = {name for name in choice.split(",") if name and not name.startswith("-")}
    if names - {REFERENCE, FIXED_ORDER} or f"-{REFERENCE}" in choice.split(","):
        logger.warning(
            "--kernel attention=%s does not apply to steps with images: tokens of an image attend"
            " to later tokens of it, which only `%s` and `%s` support; these steps use `%s`",
            choice,
            REFERENCE,
            FIXED_ORDER,
            REFERENCE,
        )


def encoder_rows(config: EngineConfig) -> int:
    """Number of embeddings that a step may compute, and that the device keeps."""
    return config.max_num_batched_tokens


def make_budget(
    config: EngineConfig, model: ModelConfig, *, looks_ahead: bool
) -> EncoderBudget | None:
    """Return the encoder's budget; None for a text-only model.

    `looks_ahead`: True if a drafter reads embeddings of images.
    """
    if model.vision is None:
        return None
    rows = encoder_rows(config)
    in_step = rows if config.target_itl_ms is None else min(rows, PACED_ROWS)
    return EncoderBudget(in_step, rows, looks_ahead=looks_ahead)
