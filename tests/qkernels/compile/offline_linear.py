"""Weight-only products to compile: W4A16 and W8A16, each body."""

from dataclasses import replace

from offline import BF16, boxes, compile_kernel, compiled_kernel, dump, facts
from sass import overlapped, overwritten_in_flight

from qkernels.operands.limbs import LIMBS_COLUMNS, LIMBS_OF_INPUT
from qkernels.wna16 import sm90_gemv_imma as w4a16_digits
from qkernels.wna16 import sm90_large_m as w4a16_hopper
from qkernels.wna16 import sm90_small_m as w4a16_ring
from qkernels.wna16 import triton_gemm
from qkernels.wna16.numerics import WeightNumerics
from qkernels.wna16.sm90_gemv_imma_config import default_gemv_config
from qkernels.wna16.sm90_large_m_config import default_large_m_config
from qkernels.wna16.sm90_small_m_config import default_small_m_config
from qkernels.wna16.triton_config import default_triton_config


def linear_case(M: int, N: int, K: int, group: int, symmetric: bool, bits: int = 4) -> dict:
    tile = default_triton_config(M, N, K, group, 132)
    pointers = {
        "x_ptr": BF16,
        "words_ptr": "*i32",
        "scales_ptr": "*fp16",
        "y_ptr": BF16,
        "partials_ptr": "*fp32",
        "counters_ptr": "*i32",
    }
    if not symmetric:
        pointers["offsets_ptr"] = BF16
    constants = {
        "MAGIC": 0x43004300,
        "OFFSET": 136 if bits == 4 else 0,
        "BITS": bits,
        "BM": tile.block_m,
        "BN": tile.block_n,
        "BK": min(128, group),
        "TILE_N": 64,
        "SPLIT": tile.split,
        "STAGES": tile.stages,
        "USE_TMA": tile.use_tma,
        "PDL": tile.early,
        "INTERPRETED": False,
        "bias_ptr": None,
        "STEPS_OF_GROUP": 1,
    }
    if tile.use_tma:
        pointers["x_ptr"] = f"tensordesc<bf16[{tile.block_m}, {min(128, group)}]>"
    if symmetric:
        constants["offsets_ptr"] = None
    scalars = {"M": "i32", "N": "i32", "K": "i32"}
    options = {"num_warps": tile.warps} | ({"launch_pdl": True} if tile.early else {})
    return compile_kernel(triton_gemm._w4a16, pointers, scalars, constants, options)


def hopper_linear_case(
    M: int,
    N: int,
    K: int,
    dtype: str = "bf16",
    symmetric: bool = True,
    group: int = 128,
    bits: int = 4,
) -> dict:
    """The Hopper body of W4A16 and W8A16, at the tile of sm90_large_m_config.py."""
    tile = default_large_m_config(M, N, K, group, bits, 132)
    pointers = {"scales_ptr": "*fp16", "offsets_ptr": f"*{dtype}", "bias_ptr": f"*{dtype}"}
    pointers |= {"partials_ptr": "*fp32", "counters_ptr": "*i32"}
    pointers |= {
        "x_desc": boxes(dtype, [tile.block_m, w4a16_hopper.SLICE]),
        "half_desc": boxes(dtype, [tile.block_m // 2, w4a16_hopper.SLICE]),
        "words_desc": boxes("i32", w4a16_hopper.words_box(bits)),
        "y_desc": boxes(dtype, [tile.store_rows, 64]),
    }
    format = WeightNumerics(
        bits=bits,
        steps_of_group=group // 128,
        offset={4: 136, 8: 0}[bits] if dtype == "bf16" else 1024 + 2 ** (bits - 1),
        has_offsets=not symmetric,
        has_bias=True,
    )
    constants = {"TILE": tile, "FORMAT": format}
    scalars = {"M": "i32", "N": "i32", "K": "i32", "whole": "i32"}
    options = {"num_warps": 4, "maxnreg": tile.registers, "launch_pdl": True}
    kernel = w4a16_hopper._w4a16_hopper
    compiled = compiled_kernel(kernel, pointers, scalars, constants, options)
    sass = dump(compiled, "--dump-sass")
    in_flight = {}
    if sass is not None:
        in_flight["overlapped"] = overlapped(sass)
        in_flight["overwritten_in_flight"] = overwritten_in_flight(sass)
    shape = f"{bits} bits {tile.parts} x {tile.block_m} / {tile.split}" + " halves" * tile.halves
    return facts(compiled) | in_flight | {"tile": shape}


def digits_linear_case(
    M: int, N: int, K: int, dtype: str = "bf16", symmetric: bool = True, bits: int = 4
) -> dict:
    """W4A16 or W8A16 of few rows."""
    tile = default_gemv_config(M, N, K, 128, bits, 132)
    tiles = -(-M * LIMBS_OF_INPUT // LIMBS_COLUMNS)
    pointers = {
        "limbs_ptr": "*i8",
        "input_scales_ptr": "*fp32",
        "codes_ptr": "*i8",
        "scales_ptr": "*fp16",
        "y_ptr": f"*{dtype}",
    }
    constants = {
        "STEPS_OF_GROUP": 1,
        "BITS": bits,
        "OFFSET": {4: 136, 8: 0}[bits] if dtype == "bf16" else 1024 + 2 ** (bits - 1),
        "TILES": tiles,
        "COLUMNS": LIMBS_COLUMNS,
        "D": LIMBS_OF_INPUT,
        "W": tile.warps,
        "BN": tile.block_n,
        "TILE_N": 64,
        "AHEAD": tile.ahead,
        "bias_ptr": None,
    } | w4a16_digits.layouts(tile.warps, tile.block_n, bits)
    if symmetric:
        constants |= {"sums_ptr": None, "offsets_ptr": None}
    else:
        pointers |= {"sums_ptr": "*i32", "offsets_ptr": f"*{dtype}"}
    scalars = {"M": "i32", "N": "i32", "steps": "i32"}
    options = {"num_warps": tile.warps, "launch_pdl": True}
    kernel = w4a16_digits._w4a16_digits
    return compile_kernel(kernel, pointers, scalars, constants, options)


def ring_linear_case(
    M: int,
    N: int,
    K: int,
    dtype: str = "bf16",
    symmetric: bool = True,
    stages: int = 0,
    apart: bool = False,
) -> dict:
    """W4A16 of up to 64 rows."""
    tile = default_small_m_config(M, N, K, 128, 4, 132)
    tile = replace(tile, stages=stages or tile.stages)
    pointers = {
        "words_desc": boxes("i32", w4a16_ring.WORDS_BOX),
        "x_desc": boxes(dtype, [tile.rows, w4a16_ring.SLICE]),
        "scales_desc": boxes("fp16", [64]),
        "offsets_desc": boxes(dtype, [64]),
        "bias_ptr": f"*{dtype}",
        "y_ptr": "*fp32" if apart else f"*{dtype}",
        "partials_ptr": "*fp32",
        "counters_ptr": "*i32",
    }
    format = WeightNumerics(
        bits=4,
        steps_of_group=1,
        offset=136 if dtype == "bf16" else 1032,
        has_offsets=not symmetric,
        has_bias=True,
    )
    scalars = dict.fromkeys(("M", "N", "steps", "tiles"), "i32")
    options = {"num_warps": 4, "maxnreg": tile.registers, "launch_pdl": True}
    constants = {"TILE": tile, "FORMAT": format, "UNREDUCED": apart}
    kernel = w4a16_ring._w4a16_ring
    compiled = compiled_kernel(kernel, pointers, scalars, constants, options)
    sass = dump(compiled, "--dump-sass")
    in_flight = {} if sass is None else {"overwritten_in_flight": overwritten_in_flight(sass)}
    return facts(compiled) | in_flight | {"blocks": tile.blocks_of_sm}


def dequantize_case() -> dict:
    pointers = {"words_ptr": "*i32", "scales_ptr": "*fp16", "out_ptr": BF16}
    scalars = {"N": "i32", "K": "i32"}
    constants = {"MAGIC": 0x43004300, "OFFSET": 136, "BITS": 4, "BK": 128, "TILE_N": 64}
    constants |= {"ROWS": triton_gemm.DEQUANTIZE_ROWS, "INTERPRETED": False}
    constants |= {"offsets_ptr": None, "STEPS_OF_GROUP": 1}
    kernel = triton_gemm._dequantize_weight
    return compile_kernel(kernel, pointers, scalars, constants, {"num_warps": 1})


LINEAR = {
    "linear M=1": lambda: linear_case(1, 4096, 4096, 128, True),
    "linear M=1 asymmetric": lambda: linear_case(1, 4096, 4096, 128, False),
    "linear M=32": lambda: linear_case(32, 6144, 4096, 128, True),
    "linear M=64 group 32": lambda: linear_case(64, 4096, 4096, 32, True),
    "linear M=64 wide": lambda: linear_case(64, 28672, 4096, 128, True),
    "linear M=128": lambda: linear_case(128, 4096, 4096, 128, True),
    "linear M=256": lambda: linear_case(256, 4096, 14336, 128, True),
    "linear M=256 asymmetric": lambda: linear_case(256, 4096, 14336, 128, False),
    "linear M=1 8 bits": lambda: linear_case(1, 4096, 4096, 128, True, bits=8),
    "linear M=256 8 bits": lambda: linear_case(256, 4096, 4096, 128, False, bits=8),
    "linear hopper M=64": lambda: hopper_linear_case(64, 4096, 4096),
    "linear hopper M=256": lambda: hopper_linear_case(256, 4096, 4096, symmetric=False),
    "linear hopper M=512": lambda: hopper_linear_case(512, 6144, 4096),
    "linear hopper M=512, wide": lambda: hopper_linear_case(512, 4096, 14336, "fp16", group=256),
    "linear hopper M=1024": lambda: hopper_linear_case(1024, 6144, 4096, symmetric=False),
    "linear hopper M=256, 8 bits": lambda: hopper_linear_case(
        256, 4096, 4096, symmetric=False, bits=8
    ),
    "linear hopper M=512, 8 bits": lambda: hopper_linear_case(512, 6144, 4096, bits=8),
    "linear hopper M=1024, 8 bits": lambda: hopper_linear_case(1024, 6144, 4096, bits=8),
    "limbs M=1": lambda: digits_linear_case(1, 4096, 4096),
    "limbs M=4, wide": lambda: digits_linear_case(4, 28672, 4096),
    "limbs float16 asymmetric": lambda: digits_linear_case(2, 28672, 4096, "fp16", False),
    "ring M=8": lambda: ring_linear_case(8, 28672, 4096),
    "ring in parts, float16 asymmetric": lambda: ring_linear_case(5, 4096, 14336, "fp16", False),
    "ring M=16 asymmetric": lambda: ring_linear_case(16, 28672, 4096, symmetric=False),
    "ring M=32 in parts": lambda: ring_linear_case(32, 4096, 4096),
    "ring of parts that stay apart": lambda: ring_linear_case(32, 4096, 4096, apart=True),
    "ring M=64 of parts that stay apart": lambda: ring_linear_case(64, 4096, 4096, apart=True),
    "ring M=64": lambda: ring_linear_case(64, 28672, 4096),
    "ring M=64 alone": lambda: ring_linear_case(64, 6144, 4096, symmetric=False, stages=8),
    "limbs 8 bits": lambda: digits_linear_case(1, 4096, 4096, bits=8),
    "dequantize": dequantize_case,
}
