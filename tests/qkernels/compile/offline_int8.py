"""Products of 8-bit codes to compile, and the roundings that make codes."""

from dataclasses import replace

import triton.language as tl
from offline import BF16, LAUNCH, boxes, compile_kernel

from qkernels.operands.split_k_triton import PartialsFormat, reduce_warps
from qkernels.rowwise import norm_act_quantize as fused_quant
from qkernels.rowwise import quantize
from qkernels.w8a8 import sm90 as w8a8_hopper
from qkernels.w8a8 import triton_gemm as w8a8
from qkernels.w8a8.config import SM90_BLOCK_K, default_sm90_config, default_w8a8_triton_config


def int8_case(M: int, N: int, K: int, dtype: str = "i8", **changes) -> dict:
    tile = replace(default_w8a8_triton_config(M, N, K, 132, dtype == "i8"), **changes)
    pointers = {
        "x": f"tensordesc<{dtype}[{tile.block_m}, {tile.block_k}]>",
        "weight": f"tensordesc<{dtype}[{tile.block_n}, {tile.block_k}]>",
        "weight_ptr": f"*{dtype}",
        "input_scales_ptr": "*fp32",
        "scales_ptr": "*fp32",
        "y_ptr": BF16,
        "partials_ptr": "*i32" if dtype == "i8" else "*fp32",
        "counters_ptr": "*i32",
    }
    constants = {
        "bias_ptr": None,
        "zeros_ptr": None,
        "weight_sums_ptr": None,
        "BM": tile.block_m,
        "BN": tile.block_n,
        "BK": tile.block_k,
        "SPLIT": tile.split,
        "STAGES": tile.stages,
        "GROUP_M": tile.group_m,
        "WEIGHT_IS_A": tile.weight_is_a,
        "PDL": tile.early,
        "BLOCKS": False,
    }
    scalars = {"M": "i32", "N": "i32", "K": "i32"}
    options = {"num_warps": tile.warps} | ({"launch_pdl": True} if tile.early else {})
    return compile_kernel(w8a8._w8a8, pointers, scalars, constants, options)


def hopper_int8_case(
    M: int, N: int, K: int, dtype: str = "i8", blocks: bool = False, **changes
) -> dict:
    """The warp-specialized kernel: Gluon, whose descriptors carry their layouts."""
    kind = "blocks" if blocks else "int" if dtype == "i8" else "float"
    tile = replace(default_sm90_config(M, N, K, 132, kind), **changes)
    x_rows = tile.block_b if tile.weight_is_a else tile.consumer_rows
    y_block = [tile.consumer_rows, tile.store_width]
    y_block = y_block[::-1] if tile.weight_is_a else y_block
    pointers = {
        "weight": boxes(dtype, [tile.weight_box_rows, SM90_BLOCK_K]),
        "x": boxes(dtype, [x_rows, SM90_BLOCK_K]),
        "y": boxes("bf16", [1, *y_block] if tile.idle_rows else y_block),
        "input_scales_ptr": "*fp32",
        "scales_ptr": "*fp32",
        "bias_ptr": BF16,
        "zeros_ptr": "*i32",
        "weight_sums_ptr": "*i32",
        "partials_ptr": "*i32" if dtype == "i8" else "*fp32",
        "counters_ptr": "*i32",
    }
    constants = {
        "CONFIG": tile,
        "HAS_BIAS": True,
        "HAS_ZEROS": dtype == "i8" and tile.num_consumers < 3,
        "BLOCKS": blocks,
    }
    scalars = {"M": "i32", "N": "i32", "K": "i32"}
    options = {"num_warps": 4, "maxnreg": tile.registers, "launch_pdl": True}
    kernel = w8a8_hopper._w8a8_sm90
    return compile_kernel(kernel, pointers, scalars, constants, options)


def quantize_case(K: int, dtype: str = "i8") -> dict:
    pointers = {"x_ptr": BF16, "codes_ptr": f"*{dtype}", "scales_ptr": "*fp32"}
    constants = {"scale_ptr": None, "SMALLEST": -128.0, "LARGEST": 127.0, "MIN_SCALE": 1e-10}
    chunk, chunks, warps = quantize.row_chunks(K, 2)
    constants |= {"CHUNK": chunk, "CHUNKS": chunks} | LAUNCH
    options = {"num_warps": warps, "launch_pdl": True}
    scalars = {"stride_x": "i32", "K": "i32"}
    return compile_kernel(quantize._quantize_rows, pointers, scalars, constants, options)


def fused_case(kernel, C: int, parts: int = 0, **options) -> dict:
    pointers = {"x_ptr": "*fp32" if parts else BF16}
    pointers |= {"residual_ptr": BF16, "weight_ptr": BF16, "total_ptr": BF16}
    pointers |= {"codes_ptr": "*i8", "scales_ptr": "*fp32"}
    pointers = {name: pointers[name] for name in kernel.arg_names if name in pointers}
    constants = {"scale_ptr": None, "SMALLEST": -128.0, "LARGEST": 127.0, "MIN_SCALE": 1e-10}
    constants |= LAUNCH
    if "SUM" in kernel.arg_names:
        constants["SUM"] = PartialsFormat(num_consumers=parts, dtype=tl.bfloat16)
    warps = reduce_warps(C) if parts else quantize.row_warps(C)
    if "CHUNK" in kernel.arg_names:
        constants["CHUNK"], constants["CHUNKS"], warps = quantize.row_chunks(C, 2)
    else:
        constants["BLOCK"] = C
    scalars = {"stride_part": "i32", "C": "i32", "I": "i32", "eps": "fp32"}
    scalars = {name: scalars[name] for name in kernel.arg_names if name in scalars}
    options |= {"num_warps": warps, "launch_pdl": True}
    return compile_kernel(kernel, pointers, scalars, constants, options)


INT8 = {
    "linear int8 M=1": lambda: int8_case(1, 4096, 4096),
    "linear int8 M=128": lambda: int8_case(128, 4096, 4096),
    "linear int8 M=4096": lambda: int8_case(4096, 4096, 4096),
    "linear float8 M=1": lambda: int8_case(1, 4096, 4096, "fp8e4nv"),
    "linear float8 M=4096": lambda: int8_case(4096, 4096, 4096, "fp8e4nv"),
    "linear sm_90 int8 M=1, split": lambda: hopper_int8_case(1, 4096, 4096),
    "linear sm_90 int8 M=16, wide": lambda: hopper_int8_case(16, 28672, 4096),
    "linear sm_90 int8 M=128, split": lambda: hopper_int8_case(128, 4096, 14336),
    "linear sm_90 int8 M=64, idle rows": lambda: hopper_int8_case(64, 6144, 4096),
    "linear sm_90 int8 M=128, idle rows": lambda: hopper_int8_case(
        128, 4096, 4096, split=1, reduce_scatter=False, idle_rows=32
    ),
    "linear sm_90 int8 M=256": lambda: hopper_int8_case(256, 6144, 4096),
    "linear sm_90 int8 M=1024": lambda: hopper_int8_case(1024, 6144, 4096),
    "linear sm_90 int8 M=4096": lambda: hopper_int8_case(4096, 4096, 4096),
    "linear sm_90 float8 M=64": lambda: hopper_int8_case(64, 4096, 4096, "fp8e4nv"),
    "linear sm_90 float8 M=4096": lambda: hopper_int8_case(4096, 4096, 4096, "fp8e4nv"),
    "linear sm_90 blocks M=1": lambda: hopper_int8_case(
        1, 4096, 4096, "fp8e4nv", True, promotion_steps=1
    ),
    "linear sm_90 blocks M=4096": lambda: hopper_int8_case(4096, 4096, 4096, "fp8e4nv", True),
    "quantize": lambda: quantize_case(4096),
    "quantize, widest": lambda: quantize_case(2**15),
    "quantize float8": lambda: quantize_case(2**14, "fp8e4nv"),
    "norm and quantize": lambda: fused_case(fused_quant._rms_norm_quantize, 2**13),
    "norm and quantize, widest": lambda: fused_case(fused_quant._rms_norm_quantize, 2**14),
    "norm of parts and quantize": lambda: fused_case(fused_quant._rms_norm_quantize, 2**12, 7),
    "silu and quantize": lambda: fused_case(fused_quant._silu_and_mul_quantize, 14336, maxnreg=80),
    "silu and quantize, few rows": lambda: fused_case(
        fused_quant._silu_and_mul_quantize, 14336, maxnreg=96
    ),
    "silu and quantize, widest": lambda: fused_case(fused_quant._silu_and_mul_quantize, 2**15),
}
