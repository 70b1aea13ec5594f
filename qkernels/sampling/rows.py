"""Dispatch table of sampling."""

from qkernels.dispatch import triton_or_reference
from qkernels.problem import needs_triton_on_gpu

SAMPLE = triton_or_reference("sampling", "sample_", "triton_sample", needs_triton_on_gpu)
OPERATIONS = (SAMPLE,)
