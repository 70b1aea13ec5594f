"""All operations that a model calls. Each checks its arguments, then runs the best kernel.

Dimension letters of arguments and results:

    M  rows of x                    D  head dim
    K  inputs                       P  pages
    N  outputs                      B  tokens per page
    G  groups                       X  pages in a block table
    C  channels                     S  sampled rows
    I  intermediate size            V  vocabulary
    T  tokens of a step             W  rows of the history table
    R  requests
    H  query heads
    J  KV heads

Triton implementations never wait for the device, so every one can be captured in a CUDA graph.
Plain torch implementations may wait: those of attention, experts, adapters and delta nets do.
"""

from qkernels.attention.ops import apply_rope, paged_attention, rope_write_kv_, write_kv_
from qkernels.attention.selected.ops import block_attention, select_blocks
from qkernels.causal_conv.ops import causal_conv_, lacking_rows_, short_conv_
from qkernels.collective.ops import all_reduce, all_reduce_norm
from qkernels.delta_net.ops import delta_rule_, gated_rms_norm
from qkernels.drafts.ops import fill_drafts_, settle_drafts_, spread_logits
from qkernels.latent.fixed_order.attention import fixed_order_heads
from qkernels.latent.ops import (
    expanded_latent_attention,
    latent_attention,
    rope_write_latents_,
)
from qkernels.latent.selected.ops import (
    select_keys,
    selected_latent_attention,
    write_index_keys_,
)
from qkernels.linear.fixed_order import fixed_order_linear
from qkernels.linear.ops import linear, linear_codes, plan_linear, prepare_weight
from qkernels.lora.ops import lora_expand_, lora_shrink, lora_term
from qkernels.mamba1.ops import channel_scan_
from qkernels.mamba2.ops import gated_group_norm, selective_scan_
from qkernels.moe.ops import experts, plan_experts, prepare_experts, route, route_tokens
from qkernels.rowwise.ops import (
    activate,
    embed_norms,
    in_form,
    norm,
    quantize_input,
    to_limbs,
)
from qkernels.rowwise.spec import ActSpec, Branch, NormSpec
from qkernels.sampling.ops import sample_

__all__ = [
    "ActSpec",
    "Branch",
    "NormSpec",
    "activate",
    "all_reduce",
    "all_reduce_norm",
    "apply_rope",
    "block_attention",
    "causal_conv_",
    "channel_scan_",
    "delta_rule_",
    "embed_norms",
    "experts",
    "plan_experts",
    "prepare_experts",
    "route",
    "route_tokens",
    "fill_drafts_",
    "fixed_order_heads",
    "fixed_order_linear",
    "gated_group_norm",
    "gated_rms_norm",
    "in_form",
    "lacking_rows_",
    "expanded_latent_attention",
    "latent_attention",
    "to_limbs",
    "linear",
    "linear_codes",
    "lora_expand_",
    "lora_shrink",
    "lora_term",
    "norm",
    "paged_attention",
    "plan_linear",
    "prepare_weight",
    "quantize_input",
    "rope_write_kv_",
    "rope_write_latents_",
    "sample_",
    "select_blocks",
    "select_keys",
    "selected_latent_attention",
    "selective_scan_",
    "settle_drafts_",
    "short_conv_",
    "spread_logits",
    "write_index_keys_",
    "write_kv_",
]
