"""Plain torch references of the operations in ops.py, with the same names and arguments."""

from qkernels.attention.reference import apply_rope, paged_attention, rope_write_kv_, write_kv_
from qkernels.collective.reference import all_reduce, all_reduce_norm
from qkernels.drafts.reference import fill_drafts_, settle_drafts_, spread_logits
from qkernels.linear.reference import linear, linear_codes, prepare_weight
from qkernels.lora.reference import lora_expand_, lora_shrink, lora_shrink_parts
from qkernels.moe.reference import experts, prepare_experts, route, route_tokens
from qkernels.operands.limbs_reference import to_limbs
from qkernels.rowwise.reference import (
    activate,
    embed_norms,
    in_form,
    norm,
    quantize_input,
)
from qkernels.sampling.reference import sample_

__all__ = [
    "activate",
    "all_reduce",
    "all_reduce_norm",
    "apply_rope",
    "embed_norms",
    "experts",
    "fill_drafts_",
    "in_form",
    "prepare_experts",
    "route",
    "route_tokens",
    "to_limbs",
    "linear",
    "linear_codes",
    "lora_expand_",
    "lora_shrink",
    "lora_shrink_parts",
    "norm",
    "paged_attention",
    "prepare_weight",
    "quantize_input",
    "rope_write_kv_",
    "sample_",
    "settle_drafts_",
    "spread_logits",
    "write_kv_",
]
