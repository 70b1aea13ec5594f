"""Compile the kernels for sm_90 without a GPU and print what the machine code uses, as JSON lines.

Run by test_compile.py in a process of its own: where Triton interprets, it cannot compile.
"""

import json
import math
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import triton
from sass import overlapped, overwritten_in_flight
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from qkernels import (
    act_quant,
    attention_hopper,
    coded_decode,
    elementwise,
    fused_quant,
    input_digits,
    kv_cache,
    paged_attention,
    sampling,
    w4a16,
    w4a16_digits,
    w4a16_digits_ring,
    w4a16_hopper,
    w8a8,
    w8a8_hopper,
)
from qkernels.attention_tiles import attention_tile
from qkernels.int8_tiles import INT8_HOPPER_BLOCK_K, int8_hopper_tile, int8_tile
from qkernels.tiles import (
    LINEAR_DIGITS,
    LINEAR_DIGITS_COLUMNS,
    linear_digits_tile,
    linear_ring_tile,
    linear_tile,
)
from qkernels.w4a16_hopper_tiles import linear_hopper_tile

BF16 = "*bf16"
LAUNCH = {"EARLY": True, "SIGNAL_FIRST": True, "INTERPRETED": False}


def compile_kernel(kernel, pointers: dict, scalars: dict, constants: dict, options: dict) -> dict:
    return facts(compiled_kernel(kernel, pointers, scalars, constants, options))


def compiled_kernel(kernel, pointers: dict, scalars: dict, constants: dict, options: dict):
    """`pointers` and `scalars` map argument names to types; constants includes absent pointers."""
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        signature[name] = pointers.get(name) or scalars.get(name) or "constexpr"
        aligned = name in ("N", "K", "C", "I") or name.startswith("stride_")
        aligned = aligned or signature[name].startswith("*")
        if signature[name] != "constexpr" and aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source_of = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = source_of(kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def facts(compiled) -> dict:
    found = {
        "shared": compiled.metadata.shared,
        "wgmma": "wgmma.mma_async" in compiled.asm["ptx"],
        "integer_mma": compiled.asm["ptx"].count("mma.sync.aligned.m16n8k32"),
        "local_in_ptx": bool(re.search(r"\.local\s", compiled.asm["ptx"])),
    }
    usage, sass = dump(compiled, "--dump-resource-usage"), dump(compiled, "--dump-sass")
    if sass is not None:
        found["registers"] = int(re.search(r"REG:(\d+)", usage).group(1))
        found["local"] = int(re.search(r"LOCAL:(\d+)", usage).group(1))
        found["stack"] = int(re.search(r"STACK:(\d+)", usage).group(1))
        found["spill_stores"] = len(re.findall(r"\bSTL\b", sass))
        found["hgmma"] = len(re.findall(r"\b[HIQ]GMMA\b", sass))
        found["loop_spills"] = spills_in_product_loops(sass)
        found["instructions"] = len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", sass, re.MULTILINE))
    return found


def product_loops(sass: str) -> list[list[str]]:
    """The instructions of each innermost loop with products."""
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", sass, re.MULTILINE)
    index = {int(address, 16): i for i, (address, _) in enumerate(lines)}
    loops = []  # first and last line; a branch without a condition returns from a wait
    for i, (address, text) in enumerate(lines):
        target = re.match(r"@!?U?P\d BRA(?:\.\w+)? 0x([0-9a-f]+)$", text)
        if target and int(target[1], 16) < int(address, 16):
            loops.append((index[int(target[1], 16)], i))
    found = []
    for first, last in loops:
        body = [text for _, text in lines[first : last + 1]]
        inner = any(first < other and end < last for other, end in loops)
        if not inner and any("GMMA" in text for text in body):
            found.append(body)
    return found


def spills_in_product_loops(sass: str) -> int:
    """Registers stored to or loaded from local memory in the innermost loops with products."""
    bodies = product_loops(sass)
    return sum(bool(re.search(r"\b(STL|LDL)\b", text)) for body in bodies for text in body)


def most_waits_in_product_loops(sass: str) -> int:
    return max(sum("WARPGROUP.DEPBAR" in text for text in body) for body in product_loops(sass))


def dump(compiled, what: str) -> str | None:
    """What cuobjdump says of the machine code; None: this triton came without it."""
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not cuobjdump.exists():
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return _run(cuobjdump, what, file.name)


def _run(*command) -> str:
    return subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, check=True
    ).stdout


def linear_case(M: int, N: int, K: int, group: int, symmetric: bool, bits: int = 4) -> dict:
    tile = linear_tile(M, N, K, group, 132)
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
        "BULK": tile.bulk,
        "EARLY": tile.early,
        "INTERPRETED": False,
        "bias_ptr": None,
        "STEPS_OF_GROUP": 1,
    }
    if tile.bulk:
        pointers["x_ptr"] = f"tensordesc<bf16[{tile.block_m}, {min(128, group)}]>"
    if symmetric:
        constants["offsets_ptr"] = None
    scalars = {"M": "i32", "N": "i32", "K": "i32"}
    options = {"num_warps": tile.warps} | ({"launch_pdl": True} if tile.early else {})
    return compile_kernel(w4a16._w4a16, pointers, scalars, constants, options)


def hopper_linear_case(
    M: int,
    N: int,
    K: int,
    dtype: str = "bf16",
    symmetric: bool = True,
    group: int = 128,
    bits: int = 4,
) -> dict:
    """The Hopper body of W4A16 and W8A16, at the tile of w4a16_hopper_tiles.py."""
    tile = linear_hopper_tile(M, N, K, group, bits, 132)
    element = gl.bfloat16 if dtype == "bf16" else gl.float16
    pointers = {"scales_ptr": "*fp16", "offsets_ptr": f"*{dtype}", "bias_ptr": f"*{dtype}"}
    pointers |= {"partials_ptr": "*fp32", "counters_ptr": "*i32"}
    for name, kind, block, type in (
        ("x_desc", dtype, [tile.block_m, w4a16_hopper.SLICE], element),
        ("half_desc", dtype, [tile.block_m // 2, w4a16_hopper.SLICE], element),
        ("words_desc", "i32", w4a16_hopper.words_box(bits), gl.int32),
        ("y_desc", dtype, [tile.store_rows, 64], element),
    ):
        layout = gl.NVMMASharedLayout.get_default_for(block, type)
        pointers[name] = f"tensordesc<{kind}[{block[0]}, {block[1]}],{layout!r}>"
    format = w4a16_hopper.Format(
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
    """W4A16 or W8A16 of few rows, and the kernel that makes its digits."""
    tile = linear_digits_tile(M, N, K, 128, bits, 132)
    tiles = -(-M * LINEAR_DIGITS // LINEAR_DIGITS_COLUMNS)
    pointers = {
        "digits_ptr": "*i8",
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
        "COLUMNS": LINEAR_DIGITS_COLUMNS,
        "D": LINEAR_DIGITS,
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
    found = compile_kernel(kernel, pointers, scalars, constants, options)
    pointers = {"x_ptr": f"*{dtype}", "words_ptr": "*i32", "scales_ptr": "*fp32"}
    constants = {"STEP": 128, "BLOCK": input_digits.STEPS_OF_BLOCK, "EARLY": True} | {
        name: constants[name] for name in ("BITS", "D", "COLUMNS")
    }
    if symmetric:
        constants["sums_ptr"] = None
    else:
        pointers["sums_ptr"] = "*i32"
    scalars = {"K": "i32", "steps": "i32", "tiles": "i32"}
    options = {"num_warps": 1, "launch_pdl": True}
    compile_kernel(input_digits._digits, pointers, scalars, constants, options)
    return found


def ring_linear_case(M: int, N: int, K: int, dtype: str = "bf16", symmetric: bool = True) -> dict:
    """W4A16 of 5 to 16 rows, and the kernel that makes its digits."""
    tile = linear_ring_tile(M, N, K, 128, 4, 132)
    bytes_of_rows = [4 * tile.rows, 128]

    def box(kind: str, block: list[int], element) -> str:
        layout = gl.NVMMASharedLayout.get_default_for(block, element)
        return f"tensordesc<{kind}[{', '.join(map(str, block))}],{layout!r}>"

    half = gl.bfloat16 if dtype == "bf16" else gl.float16
    pointers = {
        "words_desc": box("i8", w4a16_digits_ring.WORDS_BOX, gl.int8),
        "digits_desc": box("i8", bytes_of_rows, gl.int8),
        "facts_desc": box("fp32", [4 * tile.rows], gl.float32),
        "scales_desc": box("fp16", [64], gl.float16),
        "offsets_desc": box(dtype, [64], half),
        "bias_ptr": f"*{dtype}",
        "y_ptr": f"*{dtype}",
        "partials_ptr": "*fp32",
        "counters_ptr": "*i32",
    }
    format = w4a16_digits_ring.Format(
        steps_of_group=1, offset=136, has_offsets=not symmetric, has_bias=True
    )
    scalars = dict.fromkeys(("M", "N", "steps", "tiles"), "i32")
    registers = w4a16_digits_ring.REGISTERS
    options = {"num_warps": 4, "maxnreg": registers, "launch_pdl": True}
    kernel = w4a16_digits_ring._w4a16_digits_ring
    constants = {"TILE": tile, "FORMAT": format}
    found = compile_kernel(kernel, pointers, scalars, constants, options)
    pointers = {"x_ptr": f"*{dtype}", "words_ptr": "*i32", "facts_ptr": "*fp32"}
    constants = {"R": tile.rows, "SUMS": not symmetric, "STEP": 128, "EARLY": True}
    constants["BLOCK"] = input_digits.STEPS_OF_BLOCK
    options = {"num_warps": 1, "launch_pdl": True}
    scalars = {"K": "i32", "steps": "i32"}
    compile_kernel(input_digits._digit_rows, pointers, scalars, constants, options)
    return found


def int8_case(M: int, N: int, K: int, dtype: str = "i8", **changes) -> dict:
    tile = replace(int8_tile(M, N, K, 132, dtype == "i8"), **changes)
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
        "TILES_M_OF_GROUP": tile.tiles_m_of_group,
        "WEIGHT_LEFT": tile.weight_left,
        "EARLY": tile.early,
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
    tile = int8_hopper_tile(M, N, K, 132, kind)

    def descriptor(dtype: str, block: list[int], element: object) -> str:
        layout = gl.NVMMASharedLayout.get_default_for(block, element)
        return f"tensordesc<{dtype}[{block[0]}, {block[1]}],{layout!r}>"

    x_rows = tile.block_right if tile.weight_left else tile.part
    y_block = [tile.part, tile.store_width]
    y_block = y_block[::-1] if tile.weight_left else y_block
    pointers = {
        "weight": descriptor(dtype, [w8a8_hopper.BOX, INT8_HOPPER_BLOCK_K], gl.int8),
        "x": descriptor(dtype, [x_rows, INT8_HOPPER_BLOCK_K], gl.int8),
        "y": descriptor("bf16", y_block, gl.bfloat16),
        "input_scales_ptr": "*fp32",
        "scales_ptr": "*fp32",
        "bias_ptr": BF16,
        "zeros_ptr": "*i32",
        "weight_sums_ptr": "*i32",
        "partials_ptr": "*i32" if dtype == "i8" else "*fp32",
        "counters_ptr": "*i32",
    }
    constants = {
        "TILE": tile,
        "HAS_BIAS": True,
        "HAS_ZEROS": dtype == "i8" and tile.parts < 3,
        "BLOCKS": blocks,
    }
    scalars = {"M": "i32", "N": "i32", "K": "i32"}
    options = {"num_warps": 4, "maxnreg": tile.registers, "launch_pdl": True}
    kernel = w8a8_hopper._w8a8_hopper
    return compile_kernel(kernel, pointers, scalars, constants, options)


def quantize_case(K: int, dtype: str = "i8") -> dict:
    pointers = {"x_ptr": BF16, "codes_ptr": f"*{dtype}", "scales_ptr": "*fp32"}
    constants = {"scale_ptr": None, "SMALLEST": -128.0, "LARGEST": 127.0, "MIN_SCALE": 1e-10}
    chunk, chunks, warps = act_quant.row_chunks(K, 2)
    constants |= {"CHUNK": chunk, "CHUNKS": chunks} | LAUNCH
    options = {"num_warps": warps, "launch_pdl": True}
    scalars = {"stride_x": "i32", "K": "i32"}
    return compile_kernel(act_quant._quantize_rows, pointers, scalars, constants, options)


def fused_case(kernel, C: int, **options) -> dict:
    pointers = {"x_ptr": BF16, "residual_ptr": BF16, "weight_ptr": BF16, "total_ptr": BF16}
    pointers |= {"codes_ptr": "*i8", "scales_ptr": "*fp32"}
    pointers = {name: pointers[name] for name in kernel.arg_names if name in pointers}
    constants = {"scale_ptr": None, "SMALLEST": -128.0, "LARGEST": 127.0, "MIN_SCALE": 1e-10}
    constants |= LAUNCH
    warps = act_quant.row_warps(C)
    if "CHUNK" in kernel.arg_names:
        constants["CHUNK"], constants["CHUNKS"], warps = act_quant.row_chunks(C, 2)
    else:
        constants["BLOCK"] = C
    scalars = {"C": "i32", "I": "i32", "eps": "fp32"}
    scalars = {name: scalars[name] for name in kernel.arg_names if name in scalars}
    options |= {"num_warps": warps, "launch_pdl": True}
    return compile_kernel(kernel, pointers, scalars, constants, options)


def dequantize_case() -> dict:
    pointers = {"words_ptr": "*i32", "scales_ptr": "*fp16", "out_ptr": BF16}
    scalars = {"N": "i32", "K": "i32"}
    constants = {"MAGIC": 0x43004300, "OFFSET": 136, "BITS": 4, "BK": 128, "TILE_N": 64}
    constants |= {"ROWS": w4a16.DEQUANTIZE_ROWS, "INTERPRETED": False}
    constants |= {"offsets_ptr": None, "STEPS_OF_GROUP": 1}
    kernel = w4a16._dequantize_weight
    return compile_kernel(kernel, pointers, scalars, constants, {"num_warps": 1})


def attention_case(
    requests: int,
    query: int,
    D: int,
    group: int,
    window: int = 0,
    dtype: str = BF16,
    page: int = 16,
    pages: str | None = None,
    **changes,
) -> dict:
    pages = pages or dtype
    tile = attention_tile(
        num_requests=requests,
        num_kv_heads=8,
        heads_per_kv_head=group,
        head_dim=D,
        element_size=4 if dtype == "*fp32" else 2,
        page_element_size={"*fp32": 4, "*bf16": 2}.get(pages, 1),
        max_query_len=query,
        max_context_len=8192,
        window=window or None,
        sm_count=132,
    )
    tile = replace(tile, **changes)
    pointers = {"q_ptr": dtype, "k_ptr": pages, "v_ptr": pages, "tables_ptr": "*i32"}
    pointers |= {"starts_ptr": "*i32", "lengths_ptr": "*i32", "out_ptr": dtype}
    constants = {
        "H": 8 * group,
        "GROUP": group,
        "PADDED_GROUP": tile.block_m // tile.block_q,
        "D": D,
        "PADDED_D": 1 << math.ceil(math.log2(D)),
        "B": page,
        "WINDOW": window,
        "SOFT_CAP": False,
        "ALIGNMENT": 16,
        "BLOCK_M": tile.block_m,
        "BLOCK_Q": tile.block_q,
        "KEYS": tile.keys,
        "SPLIT": tile.split,
        "STAGES": tile.stages,
        "EARLY": True,
    }
    if tile.split > 1:
        pointers |= {"partials_ptr": "*fp32", "sums_ptr": "*fp32"}
    else:
        constants |= {"partials_ptr": None, "sums_ptr": None}
    constants |= {"cap_log2": 0.0}
    if pages != dtype:
        pointers |= {"k_scales_ptr": "*fp32", "v_scales_ptr": "*fp32"}
    else:
        constants |= {"k_scales_ptr": None, "v_scales_ptr": None}
    constants |= dict.fromkeys(("stride_ksb", "stride_vsb"), 1)
    scalars = {"R": "i32", "T": "i32", "scale": "fp32", "stride_table": "i32"}
    scalars |= {
        name: "i32"
        for name in paged_attention._paged_attention.arg_names
        if "stride" in name and name not in constants
    }
    kernel = paged_attention._paged_attention
    options = {"num_warps": tile.warps, "launch_pdl": True}
    return compile_kernel(kernel, pointers, scalars, constants, options) | {"split": tile.split}


def coded_decode_case(pages: str, D: int = 128, split: int = 1, **changes) -> dict:
    """The Gluon kernel over 8-bit pages; both kinds are read as words and bytes."""
    kernel = coded_decode._coded_decode
    pointers = {"q_ptr": BF16, "k_ptr": "*i32", "v_ptr": "*i8", "tables_ptr": "*i32"}
    pointers |= {"starts_ptr": "*i32", "lengths_ptr": "*i32", "out_ptr": BF16}
    pointers |= dict.fromkeys(("k_scales_ptr", "v_scales_ptr"), "*fp32")
    pointers |= dict.fromkeys(("partials_ptr", "sums_ptr"), "*fp32")
    constants = {
        "H": 32,
        "GROUP": 4,
        "PADDED_GROUP": 4,
        "D": D,
        "B": 16,
        "WINDOW": 0,
        "SOFT_CAP": False,
        "SPLIT": split,
        "IS_INT": pages == "int8",
        "SHRINK": coded_decode.QUERY_SHRINK,
        "W": coded_decode.WARPS,
        "N": coded_decode.KEYS_OF_WARP,
        "STAGES": coded_decode.STAGES,
        "STRIDE_KB": 8 * D // 4,
        "STRIDE_VB": 8 * D,
        "stride_ksb": 1,
        "stride_vsb": 1,
        **coded_decode.layouts(D),
        **changes,
    }
    scalars = {"scale": "fp32", "cap_log2": "fp32"}
    scalars |= dict.fromkeys((n for n in kernel.arg_names if n not in constants), "i32") | scalars
    options = {"num_warps": coded_decode.WARPS, "maxnreg": coded_decode.REGISTERS}
    return compile_kernel(kernel, pointers, scalars, constants, options)


def chunk_attention_case(
    D: int = 128,
    group: int = 4,
    page: int = 16,
    dtype: str = "bf16",
    split: int = 1,
    pages: str | None = None,
    **changes,
) -> dict:
    kernel = attention_hopper._chunk_attention
    padded_d = max(64, 1 << math.ceil(math.log2(D)))
    kind, bits, width = (dtype, 16, 64) if pages is None else ("i8", 8, padded_d)
    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=width * bits // 8, element_bitwidth=bits, rank=4
    )
    pointers = dict.fromkeys((n for n in kernel.arg_names if n.endswith("_ptr")), "*i32")
    pointers |= dict.fromkeys(("q_ptr", "out_ptr"), f"*{dtype}")
    pointers |= dict.fromkeys(("k_scales_ptr", "v_scales_ptr"), "*fp32")
    rows = page if pages is None else min(64, page)
    boxes = f"tensordesc<{kind}[1, {rows}, 1, {width}],{layout!r}>"
    pointers |= dict.fromkeys(("k_desc", "v_desc"), boxes)
    constants = {"H": 8 * group, "J": 8, "D": D, "PADDED_D": padded_d, "B": page}
    constants |= {"WINDOWED": False, "SOFT_CAP": False, "SPLIT": split, "IS_INT": pages == "int8"}
    constants |= {"UNIFORM": False}
    constants |= dict.fromkeys(("stride_ksb", "stride_vsb"), 1) | changes
    pointers |= dict.fromkeys(("partials_ptr", "sums_ptr"), "*fp32")
    absent = () if split > 1 else ("partials_ptr", "sums_ptr")
    for name in absent if pages else (*absent, "k_scales_ptr", "v_scales_ptr"):
        constants[name] = None
        del pointers[name]
    absent = {*pointers, *constants}
    scalars = dict.fromkeys((n for n in kernel.arg_names if n not in absent), "i32")
    scalars |= {"scale": "fp32", "cap_log2": "fp32"}
    registers = attention_hopper.CODED_REGISTERS if pages else attention_hopper.REGISTERS
    options = {"num_warps": 4, "maxnreg": registers}
    compiled = compiled_kernel(kernel, pointers, scalars, constants, options)
    sass = dump(compiled, "--dump-sass")
    waits = {} if sass is None else {"waits_in_loops": most_waits_in_product_loops(sass)}
    return facts(compiled) | waits


def kv_case(pages: str = BF16, rotate: bool = True, norm: bool = False, D: int = 128) -> dict:
    kernel, heads = kv_cache._rope_write_kv, max(1, kv_cache.ELEMENTS_OF_PROGRAM // D)
    pointers = {"k_ptr": BF16, "v_ptr": BF16, "slots_ptr": "*i64"}
    pointers |= {"k_pages_ptr": pages, "v_pages_ptr": pages}
    if rotate:
        pointers |= {"q_ptr": BF16, "q_out_ptr": BF16}
        pointers |= {"cos_sin_ptr": "*fp32", "positions_ptr": "*i64"}
    if norm:
        pointers |= {"q_norm_ptr": BF16, "k_norm_ptr": BF16}
    if pages != BF16:
        pointers |= {"k_scales_ptr": "*fp32", "v_scales_ptr": "*fp32"}
    constants = {
        "H": 32 if rotate else 0,
        "J": 8,
        "D": D,
        "PADDED_D": D,
        "WIDTH": D if rotate else 0,
        "B": 16,
        "HEADS": heads,
        "STATIC": False,
        "SMALLEST": -128.0,
        "LARGEST": 127.0,
        "MIN_SCALE": 1e-10,
        "INTERPRETED": False,
        "EARLY": True,
    }
    constants |= {
        name: None for name in kernel.arg_names if name.endswith("_ptr") and name not in pointers
    }
    scalars = {name: "i32" for name in kernel.arg_names if name.startswith("stride_")}
    options = {"num_warps": max(1, heads * D // 256), "launch_pdl": True}
    return compile_kernel(kernel, pointers, scalars | {"eps": "fp32"}, constants, options)


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


CASES = {
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
    "digits M=1": lambda: digits_linear_case(1, 4096, 4096),
    "digits M=4, wide": lambda: digits_linear_case(4, 28672, 4096),
    "digits float16 asymmetric": lambda: digits_linear_case(2, 28672, 4096, "fp16", False),
    "ring M=8": lambda: ring_linear_case(8, 28672, 4096),
    "ring in parts, float16 asymmetric": lambda: ring_linear_case(5, 4096, 14336, "fp16", False),
    "ring M=16 asymmetric": lambda: ring_linear_case(16, 28672, 4096, symmetric=False),
    "digits 8 bits": lambda: digits_linear_case(1, 4096, 4096, bits=8),
    "linear int8 M=1": lambda: int8_case(1, 4096, 4096),
    "linear int8 M=128": lambda: int8_case(128, 4096, 4096),
    "linear int8 M=4096": lambda: int8_case(4096, 4096, 4096),
    "linear float8 M=1": lambda: int8_case(1, 4096, 4096, "fp8e4nv"),
    "linear float8 M=4096": lambda: int8_case(4096, 4096, 4096, "fp8e4nv"),
    "linear sm_90 int8 M=1, split": lambda: hopper_int8_case(1, 4096, 4096),
    "linear sm_90 int8 M=16, wide": lambda: hopper_int8_case(16, 28672, 4096),
    "linear sm_90 int8 M=128, split": lambda: hopper_int8_case(128, 4096, 14336),
    "linear sm_90 int8 M=256": lambda: hopper_int8_case(256, 6144, 4096),
    "linear sm_90 int8 M=1024": lambda: hopper_int8_case(1024, 6144, 4096),
    "linear sm_90 int8 M=4096": lambda: hopper_int8_case(4096, 4096, 4096),
    "linear sm_90 float8 M=64": lambda: hopper_int8_case(64, 4096, 4096, "fp8e4nv"),
    "linear sm_90 float8 M=4096": lambda: hopper_int8_case(4096, 4096, 4096, "fp8e4nv"),
    "linear sm_90 blocks M=1": lambda: hopper_int8_case(
        1, 4096, 4096, "fp8e4nv", True, steps_of_sum=1
    ),
    "linear sm_90 blocks M=4096": lambda: hopper_int8_case(4096, 4096, 4096, "fp8e4nv", True),
    "quantize": lambda: quantize_case(4096),
    "quantize, widest": lambda: quantize_case(2**15),
    "quantize float8": lambda: quantize_case(2**14, "fp8e4nv"),
    "norm and quantize": lambda: fused_case(fused_quant._rms_norm_quantize, 2**13),
    "norm and quantize, widest": lambda: fused_case(fused_quant._rms_norm_quantize, 2**14),
    "silu and quantize": lambda: fused_case(fused_quant._silu_and_mul_quantize, 14336, maxnreg=80),
    "silu and quantize, few rows": lambda: fused_case(
        fused_quant._silu_and_mul_quantize, 14336, maxnreg=96
    ),
    "silu and quantize, widest": lambda: fused_case(fused_quant._silu_and_mul_quantize, 2**15),
    "dequantize": dequantize_case,
    "kv write": lambda: kv_case(rotate=False),
    "kv write int8": lambda: kv_case("*i8", rotate=False),
    "rope and kv write": kv_case,
    "rope and kv write int8, norms": lambda: kv_case("*i8", norm=True),
    "rope and kv write float8": lambda: kv_case("*fp8e4nv"),
    "rope and kv write int8, widest": lambda: kv_case("*i8", D=1024),
    "attention decode, split": lambda: attention_case(1, 1, 128, 4),
    "attention decode, many": lambda: attention_case(256, 1, 128, 4),
    "attention decode, int8": lambda: coded_decode_case("int8"),
    "attention decode, int8, split, window": lambda: coded_decode_case("int8", split=4, WINDOW=50),
    "attention decode, float8": lambda: coded_decode_case("float8", SOFT_CAP=True),
    "attention decode, int8, head 64": lambda: coded_decode_case("int8", 64),
    "attention decode, int8, portable": lambda: attention_case(128, 1, 128, 4, pages="*i8"),
    "attention chunk, int8": lambda: attention_case(2, 2048, 128, 4, pages="*i8"),
    "attention chunk, float8, head 256": lambda: attention_case(2, 2048, 256, 2, pages="*fp8e4nv"),
    "attention chunk": lambda: attention_case(2, 2048, 128, 4),
    "attention chunk, page 128": lambda: attention_case(2, 2048, 128, 4, page=128),
    "attention chunk, head 256, window": lambda: attention_case(2, 2048, 256, 2, 1024),
    "attention chunk, head 80": lambda: attention_case(2, 2048, 80, 7),
    "attention hopper": chunk_attention_case,
    "attention hopper, parts": lambda: chunk_attention_case(
        D=80, group=7, page=64, dtype="fp16", split=4
    ),
    "attention hopper, window, soft cap": lambda: chunk_attention_case(
        WINDOWED=True, SOFT_CAP=True
    ),
    "attention hopper, int8": lambda: chunk_attention_case(pages="int8"),
    "attention hopper, float8, window, soft cap": lambda: chunk_attention_case(
        pages="float8", WINDOWED=True, SOFT_CAP=True
    ),
    "attention hopper, int8, one scale, parts": lambda: chunk_attention_case(
        D=80, group=7, page=128, dtype="fp16", split=4, pages="int8", UNIFORM=True
    ),
    "sampling, first": lambda: sampling_case(sampling._scan_chunks),
    "sampling, second": lambda: sampling_case(sampling._pick),
    "norm, early": lambda: norm_case(4096),
    "attention float32": lambda: attention_case(2, 2048, 128, 4, dtype="*fp32"),
}

if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        print(json.dumps({"case": case} | CASES[case]()), flush=True)
