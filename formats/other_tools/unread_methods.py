"""Quantization formats of other tools that are not supported, with a description of each.

`quant_method` of config.json -> (tool, its format). The remedy is the same for all: quantize the
float model, since no supported format can store their numbers. Needs no torch.
"""

METHODS: dict[str, tuple[str, str]] = {
    "exl3": ("ExLlamaV3", "trellis-coded weights after Hadamard rotations"),
    "exl2": ("ExLlamaV2", "weights of 2 to 8 bits mixed within a linear, with reordered inputs"),
    "fbgemm_fp8": ("FBGEMM", "float8 weights with inputs clipped at a stored bound"),
    "quanto": ("optimum-quanto", "int2 to int8 and float8 weights as quanto's own tensors"),
    "aqlm": ("AQLM", "sums of vectors from learned codebooks"),
    "vptq": ("VPTQ", "vectors from learned codebooks"),
    "eetq": ("EETQ", "int8 weights interleaved for one CUDA kernel"),
    "spqr": ("SpQR", "3-bit weights plus a sparse matrix of outliers"),
    "higgs": ("HIGGS", "vectors of a grid after Hadamard rotations"),
    "bitnet": ("BitNet", "ternary weights of models that were trained so"),
    "fp_quant": ("FP-Quant", "4-bit floats after Hadamard rotations of the inputs"),
    "fouroversix": ("Four Over Six", "NVFP4 weights with scales to 4 or to 6"),
    "sinq": ("SINQ", "integer weights with scales of rows and of columns"),
    "metal": ("transformers' Metal backend", "affine weights packed for Apple GPUs"),
    "qqq": ("QQQ", "4-bit weights with scales of two levels and 8-bit inputs"),
    "qoq": ("QServe of MIT", "4-bit weights with scales of two levels and 8-bit inputs"),
    "marlin": ("the first Marlin kernel", "GPTQ codes interleaved for one CUDA kernel"),
    "bitblas": ("BitBLAS", "codes interleaved for its own kernels"),
    "paroquant": ("ParoQuant", "4-bit weights after rotations of pairs of inputs"),
    "squeezellm": ("SqueezeLLM", "a table of values for each output"),
    "quip": ("QuIP#", "lattice codebooks after Hadamard rotations"),
    "deepspeedfp": ("DeepSpeed", "custom 6- and 8-bit floats"),
    "mlx": ("MLX", "affine weights packed for Apple GPUs"),
}
REMEDY = (
    "quantize the float model with qserve quantize MODEL; `qserve convert` does not read this"
    " format"
)
# keys of MLX's block, which has no quant_method; the third is optional
MLX_KEYS, MLX_MODE = {"group_size", "bits"}, "mode"


def describe(method: object, keys: set[str]) -> str:
    """Describe a format for an error; "" if unknown. `keys` are the keys of its block."""
    if method is None and keys - {MLX_MODE} == MLX_KEYS:
        method = "mlx"
    if not isinstance(method, str) or method.lower() not in METHODS:
        return ""
    tool, form = METHODS[method.lower()]
    return f"is a format of {tool} ({form}), which is not supported"
