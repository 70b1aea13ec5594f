"""Attention to compile, and what writes its pages."""

import math
from dataclasses import replace

import triton.language as tl
from offline import (
    BF16,
    compile_kernel,
    compiled_kernel,
    dump,
    facts,
    most_waits_in_product_loops,
)
from triton.experimental.gluon import language as gl

from qkernels.attention import rope_write_kv as kv_cache
from qkernels.attention import sm90_decode_8bit as coded_decode
from qkernels.attention import sm90_prefill as attention_hopper
from qkernels.attention import triton_paged as paged_attention
from qkernels.attention.config import default_attention_config
from qkernels.operands.split_k_triton import PartialsFormat


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
    tile = default_attention_config(
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
        "INPUTS_READY": True,
        "PDL": True,
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


def kv_case(
    pages: str = BF16, rotate: bool = True, norm: bool = False, D: int = 128, parts: int = 0
) -> dict:
    kernel = kv_cache._rope_write_kv
    heads = 2 if parts else max(1, kv_cache.ELEMENTS_OF_PROGRAM // D)
    read = "*fp32" if parts else BF16
    pointers = {"k_ptr": read, "v_ptr": read, "slots_ptr": "*i64"}
    pointers |= {"k_pages_ptr": pages, "v_pages_ptr": pages}
    if rotate:
        pointers |= {"q_ptr": read, "q_out_ptr": BF16}
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
        "INPUTS_READY": True,
        "SMALLEST": -128.0,
        "LARGEST": 127.0,
        "MIN_SCALE": 1e-10,
        "INTERPRETED": False,
        "SUM": PartialsFormat(parts=parts, dtype=tl.bfloat16),
        "PDL": True,
    }
    constants |= {
        name: None for name in kernel.arg_names if name.endswith("_ptr") and name not in pointers
    }
    scalars = {name: "i32" for name in kernel.arg_names if name.startswith("stride_")}
    options = {"num_warps": max(1, heads * D // 256), "launch_pdl": True}
    return compile_kernel(kernel, pointers, scalars | {"eps": "fp32"}, constants, options)


ATTENTION = {
    "kv write": lambda: kv_case(rotate=False),
    "kv write int8": lambda: kv_case("*i8", rotate=False),
    "rope and kv write": kv_case,
    "rope and kv write int8, norms": lambda: kv_case("*i8", norm=True),
    "rope of parts and kv write int8, norms": lambda: kv_case("*i8", norm=True, parts=5),
    "rope of most parts and kv write": lambda: kv_case(parts=16),
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
    "attention float32": lambda: attention_case(2, 2048, 128, 4, dtype="*fp32"),
}
