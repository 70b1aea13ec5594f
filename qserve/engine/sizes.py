"""Sizes of an engine: model shapes, longest sequence, largest step."""

import logging

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.engine import media_limits
from qserve.engine.scheduling.plan import Drafting
from qserve.engine.step.step_input import StepInput
from qserve.model.loading.head_scheme import with_head_scheme
from qserve.model.model_config import ModelConfig
from qserve.params.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


def read_model(config: EngineConfig) -> ModelConfig:
    """Read the model's shapes and schemes, with the settings applied. Raises InputError."""
    model = ModelConfig.from_folder(
        config.model,
        activation_bits=config.activation_bits,
        quantization=config.online_quantization,
        implementation=config.model_impl,
    )
    model = with_head_scheme(model, config.lm_head_quantization)
    return media_limits.with_settings(config, model)


def pick_length(config: EngineConfig, model: ModelConfig) -> int:
    """Return and log the maximum number of tokens of prompt plus output. Raises InputError."""
    length, context = model_length(config, model), model.context
    text = "Using max model len %d (config.json: %d by %s)"
    logger.info(text, length, context.length, context.source)
    return length


def check_input_len(config: EngineConfig, input_len: int, output_len: int) -> None:
    """Raise InputError if the model cannot hold so many tokens. Reads only the model's config."""
    length = model_length(config, read_model(config))
    if input_len + output_len > length:
        raise InputError(
            f"--input-len {input_len}",
            f"expected at most {length - output_len} tokens, which leaves {output_len} for the"
            f" output of {length} (--max-model-len)",
            "shorten input or output",
        )


def model_length(config: EngineConfig, model: ModelConfig) -> int:
    """Return the maximum number of tokens of prompt plus output. Raises InputError."""
    longest, source = model.context.length, model.context.source
    length = longest if config.max_model_len is None else config.max_model_len
    if not 2 <= length <= longest:
        raise InputError(
            "--max-model-len",
            f"expected 2 to {longest} (config.json: {source}), found {length}",
            "use a value in this range, or leave the flag out",
        )
    return length


def largest_step(config: EngineConfig, max_model_len: int, drafting: Drafting | None) -> StepInput:
    """Return a step that fills the token budget and samples as many rows as possible."""
    budget, page_size = config.max_num_batched_tokens, config.block_size
    rows = min(config.max_num_seqs, budget)
    count = min(budget // rows, max_model_len)
    return StepInput.of_sequence(
        [0] * count,
        list(range(-(-count // page_size))),
        page_size=page_size,
        params=SamplingParams(top_p=0.9),
        num_copies=rows,
        drafting=drafting,
    )
