"""Floors of a step: the least time that its bytes and operations take on this GPU, by class."""

import torch

from formats.architecture.sizes import size
from qkernels.bench.measure import CEILINGS, Ceiling
from qserve.bench.steps.step_case import StepCase
from qserve.engine.engine import Engine
from qserve.engine.fallback_limits import is_fallback
from qserve.model.model_config import ModelConfig


def floors_us(engine: Engine, case: StepCase) -> dict[str, float]:
    """Return the least microseconds of one step: operator class -> time.

    It is {} for a GPU whose limits were not measured, for models with experts, and for models that
    transformers runs.
    """
    model = engine.model_config
    if engine.runner.device.type != "cuda" or is_fallback(model) or _has_experts(model):
        return {}
    ceiling = CEILINGS.get(torch.cuda.get_device_name())
    if ceiling is None:
        return {}
    # All shards are equal. The bytes of a page are already those of one rank.
    ranks = engine.config.num_ranks // engine.config.prefill_context_parallel_size
    return model_floors_us(
        model,
        case,
        ceiling,
        kv_bytes_per_token=engine.runner.bytes_per_page / engine.config.block_size,
        ranks=ranks,
    )


def model_floors_us(
    model: ModelConfig, case: StepCase, ceiling: Ceiling, *, kv_bytes_per_token: float, ranks: int
) -> dict[str, float]:
    """Return the floors of one of `ranks` equal shards of a model.

    The floor of products is the time to read all weights once, or to compute two operations per
    weight and token on the bf16 units, whichever is longer. The floor of attention is the time to
    read the keys and values of the context once, or to compute its operations, whichever is longer;
    windows are ignored. Reading and writing the states of recurrent layers is not counted.
    """
    in_layers, num_bytes = linear_weights(model)
    in_head = model.hidden_size * model.vocab_size
    num_bytes += 2 * in_head
    operations = 2 * (in_layers * case.num_tokens + in_head * case.num_requests)
    num_keys = sum(each.count * (each.kv_len + each.query_len) for each in case.requests)
    pairs = sum(
        each.count * each.query_len * (each.kv_len + each.query_len / 2) for each in case.requests
    )
    attention = 4 * pairs * model.num_heads * model.head_dim * num_attention_layers(model)
    return {
        "products": 1e6
        * max(num_bytes / ceiling.bytes_per_second, operations / ceiling.operations_per_second)
        / ranks,
        "attention": 1e6
        * max(
            num_keys * kv_bytes_per_token / ceiling.bytes_per_second,
            attention / ranks / ceiling.operations_per_second,
        ),
    }


def linear_weights(model: ModelConfig) -> tuple[int, float]:
    """Return the number of weights in all layers' linears, and their bytes without scales."""
    number, num_bits, sizes = 0, 0, model.sizes
    for layer in range(model.num_layers):
        prefix = model.family.layer.format(i=layer)
        for linear in model.family.linears_of(model.values, layer):
            rows, columns = (size(names, sizes) for names in linear.shape)
            name = f"{prefix}.{linear.name}"
            scheme = None if model.quant is None else model.quant.scheme_for(name)
            number += rows * columns
            num_bits += rows * columns * (16 if scheme is None else scheme.weight.bits)
    return number, num_bits / 8


def num_attention_layers(model: ModelConfig) -> int:
    """Return the number of layers with attention; the others have only a recurrent state."""
    layers = range(model.num_layers)
    return sum(model.family.blocks(model.values, layer).attention for layer in layers)


def _has_experts(model: ModelConfig) -> bool:
    layers = range(model.num_layers)
    return any(model.family.blocks(model.values, layer).experts for layer in layers)
