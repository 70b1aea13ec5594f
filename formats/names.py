"""Names that users type and that several packages offer. Loads no torch.

Their rows are in formats/scheme.py, formats/layouts.py, formats/codecs/kv_cache.py and
calibrate/recipe.py. Tests compare the names with the rows.
"""

from typing import Literal, get_args

# a group size may follow: "w4a16-sym-g64", "w8a16-sym-channel"
SchemeName = Literal[
    "w4a16-sym",
    "w4a16-asym",
    "w8a16-sym",
    "w8a16-asym",
    "w2a16-sym",
    "w2a16-asym",
    "w3a16-sym",
    "w3a16-asym",
    "w6a16-sym",
    "w6a16-asym",
    "w4a8",
    "w4a8-fp8",
    "w8a8",
    "w8a8-static",
    "w8a8-fp8",
    "w8a8-fp8-static",
    "w8a8-fp8-block",
    "w8a16-fp8",
    "w4a16-mxfp4",
    "w4a16-nvfp4",
]
FormatName = Literal["gptq", "awq", "compressed-tensors"]
FORMATS: tuple[FormatName, ...] = get_args(FormatName)
GGUF = "gguf"  # written as one file, not as a folder (formats/gguf/writing)
# types of GGUF's blocks, and mixes of them (formats/gguf/schemes.py)
GGUF_TYPES = (
    *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k"),
    *("q4_k_m", "q5_k_m"),
)
FLOAT = "float"  # a format of `convert`: codes become floats (formats/dequantize.py)
FLOAT_DTYPES = ("bfloat16", "float16", "float32")
AUTO_GROUPS = "auto"  # as a group size: the largest that fits every linear
# number format of an 8-bit KV cache -> the type that compressed-tensors calls it
KV_CACHES = {"int8": "int", "fp8": "float"}
RecipeName = Literal[
    "rtn",
    "imatrix",
    "gptq",
    "gptaq",
    "gptaq+refine",
    "awq",
    "smoothquant",
    "rotate",
    "awq+gptq",
    "awq+gptaq",
    "smoothquant+gptq",
    "rotate+gptq",
    "rotate+awq+gptq",
    "autoround",
]
RECIPES: tuple[RecipeName, ...] = get_args(RecipeName)
# models whose layers `qserve bench quantize` measures (calibrate/bench_sizes.py)
BENCH_SHAPES = ("llama-3-8b", "qwen3-30b-a3b")
