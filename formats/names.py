"""Names that users type and that several packages offer. Loads no torch.

What they mean stands in formats/layouts.py, formats/kv_cache.py and calibrate/recipe.py.
"""

FORMATS = ("gptq", "awq", "compressed-tensors")
# of an 8-bit KV cache's numbers -> compressed-tensors' type
KV_CACHES = {"int8": "int", "fp8": "float"}
RECIPES = (
    "rtn",
    "imatrix",
    "gptq",
    "gptaq",
    "awq",
    "smoothquant",
    "rotate",
    "awq+gptq",
    "awq+gptaq",
    "smoothquant+gptq",
    "rotate+gptq",
    "rotate+awq+gptq",
    "autoround",
)
