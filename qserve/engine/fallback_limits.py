"""Settings that models run through transformers do not support."""

from pathlib import Path

from formats.architecture.stored_form.config import canonical_config
from formats.checkpoint import CONFIG, read_json
from formats.files.model_path import model_folder
from qserve.config import EngineConfig
from qserve.engine.state_limits import Limit, check_limits
from qserve.model.fallback.division import check_division
from qserve.model.fallback.support import BUILDER
from qserve.model.model_config import ModelConfig

WITHOUT_HEAD = ("ngram", "suffix")  # drafters that read only token ids

LIMITS = (
    Limit(
        "--prefill-context-parallel-size",
        lambda config: config.prefill_context_parallel_size > 1,
        "its layers do not exchange keys",
    ),
    Limit(
        "--pipeline-parallel-size",
        lambda config: config.pipeline_parallel_size > 1,
        "its layers cannot be called one by one",
    ),
    Limit(
        "--record-expert-loads",
        lambda config: config.record_expert_loads is not None,
        "the tokens of its experts are not counted",
    ),
    Limit(
        "--enable-lora",
        lambda config: config.enable_lora,
        "its linear layers do not support adapters",
    ),
    Limit(
        "--speculative-config",
        lambda config: (
            config.speculation is not None and config.speculation.method not in WITHOUT_HEAD
        ),
        "a drafter cannot read the hidden states of its layers; ngram works",
    ),
    Limit(
        "--lm-head-quantization",
        lambda config: config.lm_head_quantization is not None,
        "transformers computes its logits",
    ),
    Limit(
        "--load-format dummy",
        lambda config: config.load_format == "dummy",
        "its weights are checked against transformers at startup",
    ),
)


def is_fallback(model: ModelConfig) -> bool:
    """True if transformers runs the model."""
    return model.family.builder == BUILDER


def check_fallback(config: EngineConfig, model: ModelConfig) -> None:
    """Raise InputError for a setting that a model run through transformers does not support."""
    if is_fallback(model):
        other = f"{model.family.architecture}, which runs through transformers"
        check_limits(LIMITS, config, other)
        if config.tensor_parallel_size > 1:
            raw = canonical_config(read_json(Path(model_folder(config.model)) / CONFIG))
            check_division(raw, model.family.architecture, config.tensor_parallel_size)
