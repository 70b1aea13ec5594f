"""Checks of features that do not work with data-parallel engines that share experts."""

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.engine.fallback_limits import is_fallback
from qserve.model.blocks.dense_and_experts import DenseAndExperts
from qserve.model.decoder import Decoder
from qserve.model.model_config import ModelConfig


def check_shared_experts(config: EngineConfig, decoder: Decoder, model: ModelConfig) -> None:
    """Raise InputError for a setting or model that does not work with shared experts."""
    if not config.shares_experts:
        return
    given = _given(config)
    name = model.family.architecture
    of_layers = is_fallback(model) or any(
        isinstance(module, DenseAndExperts) for module in decoder.modules()
    )
    for subject, is_there, remedy in (
        (f"the layers of {name}", of_layers, "use --tensor-parallel-size"),
        ("--speculative-config", config.speculation is not None, "remove it"),
        ("--enable-lora", config.enable_lora, "remove it"),
        ("--batch-invariant", config.batch_invariant, "remove it"),
        ("--kv-transfer-config", config.kv_transfer is not None, "remove it"),
    ):
        if is_there:
            raise InputError(given, f"does not work with {subject}", remedy)


def check_shared_residence(config: EngineConfig) -> None:
    """Raise InputError if the engine shares experts, since it cannot sleep or change weights.

    Another engine may be in a step that needs this engine's experts.
    """
    if config.shares_experts:
        raise InputError(
            "sleep and new weights",
            f"do not work with {_given(config)}: the engines use each other's experts",
            "use --tensor-parallel-size instead, or restart the server with other weights",
        )


def _given(config: EngineConfig) -> str:
    return f"--data-parallel-size {config.data_parallel_size} --enable-expert-parallel"
