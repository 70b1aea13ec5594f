"""Sampling and norms to compile."""

from offline import BF16, compile_kernel

from qkernels import elementwise, sampling


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


def norm_case(block: int) -> dict:
    pointers = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "out_ptr", "total_ptr"), BF16)
    options = {"num_warps": 8, "launch_pdl": True}
    constants = {"BLOCK": block, "EARLY": True}
    scalars = {"C": "i32", "eps": "fp32"}
    return compile_kernel(elementwise._rms_norm, pointers, scalars, constants, options)


OTHERS = {
    "sampling, first": lambda: sampling_case(sampling._scan_chunks),
    "sampling, second": lambda: sampling_case(sampling._pick),
    "norm, early": lambda: norm_case(4096),
}
