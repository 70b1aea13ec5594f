"""The plain torch twin of every operation of ops.py, in one place: same name, same arguments."""

from qkernels.attention.reference import apply_rope, paged_attention, rope_write_kv_, write_kv_
from qkernels.collective.reference import all_reduce, all_reduce_add_rms_norm_into
from qkernels.drafts.reference import fill_drafts_, settle_drafts_, spread_logits
from qkernels.linear.reference import linear, linear_codes, prepare_weight
from qkernels.lora.reference import lora_expand_, lora_shrink, lora_shrink_parts
from qkernels.moe.reference import experts, prepare_experts, route, route_tokens
from qkernels.operands.limbs_reference import to_limbs
from qkernels.rowwise.reference import (
    add_rms_norm,
    add_rms_norm_limbs,
    add_rms_norm_quantize,
    embed_norms,
    embed_norms_limbs,
    gelu_and_mul,
    gelu_and_mul_limbs,
    gelu_and_mul_quantize,
    quantize_input,
    quantize_input_asymmetric,
    rms_norm,
    rms_norm_limbs,
    rms_norm_quantize,
    silu_and_mul,
    silu_and_mul_limbs,
    silu_and_mul_quantize,
)
from qkernels.sampling.reference import sample_

__all__ = [
    "add_rms_norm",
    "add_rms_norm_limbs",
    "add_rms_norm_quantize",
    "all_reduce",
    "all_reduce_add_rms_norm_into",
    "apply_rope",
    "embed_norms",
    "embed_norms_limbs",
    "experts",
    "fill_drafts_",
    "prepare_experts",
    "route",
    "route_tokens",
    "gelu_and_mul",
    "gelu_and_mul_limbs",
    "gelu_and_mul_quantize",
    "to_limbs",
    "linear",
    "linear_codes",
    "lora_expand_",
    "lora_shrink",
    "lora_shrink_parts",
    "paged_attention",
    "prepare_weight",
    "quantize_input",
    "quantize_input_asymmetric",
    "rms_norm",
    "rms_norm_limbs",
    "rms_norm_quantize",
    "rope_write_kv_",
    "sample_",
    "settle_drafts_",
    "silu_and_mul",
    "silu_and_mul_limbs",
    "silu_and_mul_quantize",
    "spread_logits",
    "write_kv_",
]
