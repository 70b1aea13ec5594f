"""Sampling and norms to compile."""

import triton.language as tl
from offline import BF16, compile_kernel

from qkernels.operands.split_k_triton import PartialsFormat, reduce_warps
from qkernels.rowwise import norm_act
from qkernels.sampling import triton_sample as sampling


def sampling_case(kernel) -> dict:
    types = {"_tokens_ptr": "*i64", "floats": "*fp32", "ints": "*i32", "logits": BF16}
    types |= {"words": "*i64", "bias": "*i64", "history": "*i32", "group_max": "*fp32"}
    types |= {"group_list": "*i32", "value_tokens": "*i32", "values": "*fp32", "logprobs": "*fp32"}
    pointers, scalars = {}, {}
    for name in kernel.arg_names:
        if name.endswith("_ptr"):
            # the longest fitting name: value_tokens_ptr is no _tokens_ptr
            pointers[name] = types[max((t for t in types if t in name), key=len)]
        elif name not in ("PADDED_CHUNKS", "INTERPRETED"):
            scalars[name] = "i32"
    constants = {"INTERPRETED": False}
    if "PADDED_CHUNKS" in kernel.arg_names:
        constants["PADDED_CHUNKS"] = 128
    options = {"num_warps": 8, "enable_fp_fusion": False}
    return compile_kernel(kernel, pointers, scalars, constants, options)


def norm_case(block: int, parts: int = 0) -> dict:
    pointers = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "out_ptr", "total_ptr"), BF16)
    if parts:
        pointers["x_ptr"] = "*fp32"
    options = {"num_warps": reduce_warps(block) if parts else 8, "launch_pdl": True}
    constants = {"BLOCK": block, "PDL": True, "SUM": PartialsFormat(parts=parts, dtype=tl.bfloat16)}
    scalars = {"stride_part": "i32", "C": "i32", "eps": "fp32"}
    return compile_kernel(norm_act._rms_norm, pointers, scalars, constants, options)


OTHERS = {
    "sampling, first": lambda: sampling_case(sampling._scan_chunks),
    "sampling, second": lambda: sampling_case(sampling._pick),
    "norm, early": lambda: norm_case(4096),
    "norm of parts": lambda: norm_case(4096, parts=7),
    "norm of parts, widest": lambda: norm_case(8192, parts=4),
    "norm of most parts": lambda: norm_case(2048, parts=16),
}
