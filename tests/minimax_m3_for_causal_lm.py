"""MiniMax-M3's text model: transformers lists the class that has a head without published names."""

import functools

from transformers import AutoModelForCausalLM, MiniMaxM3VLForCausalLM, MiniMaxM3VLTextConfig
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)

# parts of published names inside of layers
PUBLISHED = ("block_sparse_moe", "index_", "experts", "gate_proj")


@functools.cache
def register() -> None:
    """Let AutoModelForCausalLM find the class, and read and write published names."""
    AutoModelForCausalLM.register(MiniMaxM3VLTextConfig, MiniMaxM3VLForCausalLM, exist_ok=True)
    whole = get_checkpoint_conversion_mapping("minimax_m3_vl")
    own = [e for e in whole if any(word in str(e.source_patterns) for word in PUBLISHED)]
    register_checkpoint_conversion_mapping("minimax_m3_vl_text", own, overwrite=True)
