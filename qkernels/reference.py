"""The plain torch twin of every operation of ops.py, in one place: same name, same arguments."""

from qkernels.attention.reference import apply_rope, paged_attention, rope_write_kv_, write_kv_
from qkernels.linear.reference import linear, linear_codes, linear_digits, prepare_weight
from qkernels.operands.limbs_reference import input_digits
from qkernels.rowwise.reference import (
    add_rms_norm,
    add_rms_norm_digits,
    add_rms_norm_quantize,
    quantize_input,
    quantize_input_asymmetric,
    rms_norm,
    rms_norm_digits,
    rms_norm_quantize,
    silu_and_mul,
    silu_and_mul_digits,
    silu_and_mul_quantize,
)
from qkernels.sampling.reference import sample_

__all__ = [
    "add_rms_norm",
    "add_rms_norm_digits",
    "add_rms_norm_quantize",
    "apply_rope",
    "input_digits",
    "linear",
    "linear_codes",
    "linear_digits",
    "paged_attention",
    "prepare_weight",
    "quantize_input",
    "quantize_input_asymmetric",
    "rms_norm",
    "rms_norm_digits",
    "rms_norm_quantize",
    "rope_write_kv_",
    "sample_",
    "silu_and_mul",
    "silu_and_mul_digits",
    "silu_and_mul_quantize",
    "write_kv_",
]
