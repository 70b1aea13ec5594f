"""Limits of data-parallel engines that share the experts of a model."""

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.engine.fallback_limits import is_fallback
from qserve.model.blocks.dense_and_experts import DenseAndExperts
from qserve.model.decoder import Decoder
from qserve.model.model_config import ModelConfig


def check_shared_experts(config: EngineConfig, decoder: Decoder, model: ModelConfig) -> None:
    """Raise InputError for what does not work with engines that share experts."""
    if not config.shares_experts:
        return
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
            raise InputError(
                f"--data-parallel-size {config.data_parallel_size} --enable-expert-parallel",
                f"does not work with {subject}",
                remedy,
            )
