"""The connections of a rank, as the engine's settings and the model need them."""

from collections.abc import Callable

import torch

from qserve.config import EngineConfig
from qserve.model.model_config import ModelConfig
from qserve.model.rank_shards import has_equal_shards
from qserve.model.tp_plan import place_experts
from qserve.parallel.ranks import Ranks, join


def join_ranks(
    config: EngineConfig,
    model: ModelConfig,
    address: str,
    rank: int,
    device: torch.device,
    check: Callable[[], None] = lambda: None,
) -> Ranks:
    """Join the other ranks at a torch.distributed address. `check`: see `join`."""
    tensor, placement = config.tensor_parallel_size, place_experts(model, config)
    return join(
        address,
        rank,
        tensor_parallel_size=tensor,
        stages=config.pipeline_parallel_size,
        contexts=config.prefill_context_parallel_size,
        device=device,
        all_reduce=config.all_reduce,
        hidden_size=model.hidden_size,
        max_rows=config.max_num_batched_tokens,
        equal_shards=has_equal_shards(model, tensor, placement),
        fixed_order=config.batch_invariant,
        check=check,
    )
