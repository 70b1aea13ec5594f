"""The operations that a model calls, in one place: each checks its arguments, then runs a kernel.

Legend: M rows of x, K inputs, N outputs, G groups, T tokens of a step, R requests, H query heads, J
KV heads, D head dim, P pages, B tokens of a page, X pages of a block table, C channels, I
intermediate size, S sampled rows, V vocabulary, W rows of the history table.

No operation that runs in Triton waits for the device, so all may be captured in a CUDA graph. Plain
torch rows may wait: those of attention, experts, adapters and delta nets do.
"""

from qkernels.attention.ops import apply_rope, paged_attention, rope_write_kv_, write_kv_
from qkernels.collective.ops import all_reduce, all_reduce_add_rms_norm_into
from qkernels.delta_net.ops import causal_conv_, delta_rule_, gated_rms_norm
from qkernels.drafts.ops import fill_drafts_, settle_drafts_, spread_logits
from qkernels.linear.ops import linear, linear_codes, plan_linear, prepare_weight
from qkernels.lora.ops import lora_expand_, lora_shrink, lora_term
from qkernels.moe.ops import experts, plan_experts, prepare_experts, route, route_tokens
from qkernels.rowwise.branch import Branch
from qkernels.rowwise.into_form import (
    add_rms_norm_into,
    embed_norms_into,
    gelu_and_mul_into,
    in_form,
    rms_norm_into,
    silu_and_mul_into,
)
from qkernels.rowwise.ops import (
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
    to_limbs,
)
from qkernels.sampling.ops import sample_

__all__ = [
    "Branch",
    "add_rms_norm",
    "add_rms_norm_into",
    "add_rms_norm_limbs",
    "add_rms_norm_quantize",
    "all_reduce",
    "all_reduce_add_rms_norm_into",
    "apply_rope",
    "causal_conv_",
    "delta_rule_",
    "embed_norms",
    "embed_norms_into",
    "embed_norms_limbs",
    "experts",
    "plan_experts",
    "prepare_experts",
    "route",
    "route_tokens",
    "fill_drafts_",
    "gated_rms_norm",
    "gelu_and_mul",
    "gelu_and_mul_into",
    "gelu_and_mul_limbs",
    "gelu_and_mul_quantize",
    "in_form",
    "to_limbs",
    "linear",
    "linear_codes",
    "lora_expand_",
    "lora_shrink",
    "lora_term",
    "paged_attention",
    "plan_linear",
    "prepare_weight",
    "quantize_input",
    "quantize_input_asymmetric",
    "rms_norm",
    "rms_norm_into",
    "rms_norm_limbs",
    "rms_norm_quantize",
    "rope_write_kv_",
    "sample_",
    "settle_drafts_",
    "silu_and_mul",
    "silu_and_mul_into",
    "silu_and_mul_limbs",
    "silu_and_mul_quantize",
    "spread_logits",
    "write_kv_",
]
