"""Dispatch table of the draft operations."""

from qkernels.dispatch import triton_or_reference
from qkernels.problem import needs_triton, needs_triton_on_gpu

FILL_DRAFTS = triton_or_reference("drafts", "fill_drafts_", "triton_fill", needs_triton)
SPREAD_LOGITS = triton_or_reference("drafts", "spread_logits", "triton_spread", needs_triton_on_gpu)
SETTLE_DRAFTS = triton_or_reference("drafts", "settle_drafts_", "triton_settle", needs_triton)
OPERATIONS = (FILL_DRAFTS, SPREAD_LOGITS, SETTLE_DRAFTS)
