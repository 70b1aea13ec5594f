"""Operations of adapters, and the kernels that do them."""

from qkernels.dispatch import triton_or_reference
from qkernels.problem import needs_triton_on_gpu

SHRINK = triton_or_reference("lora", "lora_shrink", "triton_lora", needs_triton_on_gpu)
SHRINK_PARTS = triton_or_reference("lora", "lora_shrink_parts", "triton_lora", needs_triton_on_gpu)
EXPAND = triton_or_reference("lora", "lora_expand_", "triton_lora", needs_triton_on_gpu)
OPERATIONS = (SHRINK, SHRINK_PARTS, EXPAND)
