"""Floors of a step: the least time that its bytes and operations take on this GPU, by class."""

import torch

from qkernels.bench.measure import CEILINGS
from qserve.bench.steps.step_case import StepCase
from qserve.engine.engine import Engine

EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts"}
A_PRODUCT = "model.layers.0.mlp.up_proj"  # linear whose scheme counts as that of all layers


def floors_us(engine: Engine, case: StepCase) -> dict[str, float]:
    """Return the least microseconds of one step: operator class -> time.

    It is {} for a GPU whose limits were not measured, and for models with experts. The time of
    products is that of reading all weights once, or of two operations per weight and token on the
    bf16 units, whichever is longer. The time of attention is that of reading the keys and values of
    the context once, or of its operations.
    """
    model = engine.model_config
    if engine.runner.device.type != "cuda" or EXPERTS & model.values.keys():
        return {}
    ceiling = CEILINGS.get(torch.cuda.get_device_name())
    if ceiling is None:
        return {}
    scheme = None if model.quant is None else model.quant.scheme_for(A_PRODUCT)
    bits = 16 if scheme is None else scheme.weight.bits
    heads = 2 * model.sizes["q"] + 2 * model.sizes["kv"]
    of_layers = model.num_layers * model.hidden_size * (heads + 3 * model.intermediate_size)
    of_head = model.hidden_size * model.vocab_size
    num_bytes = of_layers * bits / 8 + of_head * 2
    operations = 2 * (of_layers * case.num_tokens + of_head * case.num_requests)
    kv_bytes_per_token = engine.runner.bytes_per_page / engine.config.block_size
    num_keys = sum(each.count * (each.kv_len + each.query_len) for each in case.requests)
    pairs = sum(
        each.count * each.query_len * (each.kv_len + each.query_len / 2) for each in case.requests
    )
    # All shards are equal. The bytes of a page are already those of one rank.
    ranks = engine.config.num_ranks // engine.config.prefill_context_parallel_size
    num_bytes, operations = num_bytes / ranks, operations / ranks
    attention = 4 * pairs * model.num_heads * model.head_dim * model.num_layers / ranks
    return {
        "products": 1e6
        * max(num_bytes / ceiling.bytes_per_second, operations / ceiling.operations_per_second),
        "attention": 1e6
        * max(
            num_keys * kv_bytes_per_token / ceiling.bytes_per_second,
            attention / ceiling.operations_per_second,
        ),
    }
