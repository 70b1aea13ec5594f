"""Decode attention as a tunable operation."""

import dataclasses
from collections.abc import Iterator

from qkernels.attention.config import (
    AttentionConfig,
    attention_config_fault,
    default_attention_config,
)
from qkernels.tuning.op import ConfigSpace, TunedOp, one_field


def _changed(config: AttentionConfig, name: str, value: object) -> Iterator[AttentionConfig]:
    """Yield the config with one field changed; block_m follows block_q."""
    if name != "block_q":
        yield from one_field(config, name, value)
    elif value != config.block_q:
        heads = config.block_m // config.block_q
        yield dataclasses.replace(config, block_q=value, block_m=value * heads)


TUNED = TunedOp(
    name="paged_attention",
    configs={
        AttentionConfig: ConfigSpace(
            fault=attention_config_fault,
            options={
                "split": (1, 2, 4, 8, 16, 32),
                "keys": (32, 64, 128),
                "stages": (1, 2, 3, 4),
                "warps": (2, 4, 8),
                "block_q": (1, 2, 4, 8, 16, 32, 64, 128),
            },
            changed=_changed,
        )
    },
    exact=("num_kv_heads", "heads_per_kv_head", "head_dim", "element_size", "window"),
    bucketed=("num_requests", "max_query_len", "max_context_len"),
    default=default_attention_config,
)
