"""Folders of Model Optimizer."""

from pathlib import Path

import torch
from makers.float_models import windows
from makers.golden import Golden, Weights
from safetensors.torch import load_file


def modelopt(source: Path, target: Path, recipe: str, kv_cache: bool = False) -> Weights:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16)
    config = in_groups_of(32, getattr(mtq, recipe))
    if kv_cache:
        config["quant_cfg"] += mtq.FP8_KV_CFG["quant_cfg"]
    mtq.quantize(model, config, lambda m: [m(window[None]) for window in windows()])
    with torch.inference_mode():
        export_hf_checkpoint(model, dtype=torch.float16, export_dir=target)
    (file,) = target.glob("*.safetensors")
    tensors = load_file(file)
    names = [name.removesuffix(".weight_scale") for name in tensors if "weight_scale" in name]
    names = [name for name in names if not name.endswith("_2")]
    return {name: modelopt_weight(tensors, name) for name in names}


def in_groups_of(size: int, value: object) -> object:
    """A recipe of modelopt with groups of 128 inputs made smaller."""
    if isinstance(value, dict):
        return {
            k: size if k == -1 and v == 128 else in_groups_of(size, v) for k, v in value.items()
        }
    return [in_groups_of(size, each) for each in value] if isinstance(value, list) else value


def modelopt_weight(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """[N, K] by modelopt's own arithmetic where it has some, and by its packing for 4-bit ints."""
    from modelopt.torch.export.quant_utils import from_quantized_weight
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    weight, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"]
    if weight.dtype == torch.float8_e4m3fn:
        return from_quantized_weight(weight, scale, "fp8", torch.float32)
    if f"{name}.weight_scale_2" in tensors:
        shape = torch.Size((weight.shape[0], 2 * weight.shape[1]))
        return NVFP4QTensor(shape, torch.float32, weight).dequantize(
            torch.float32,
            scale=scale,
            double_scale=tensors[f"{name}.weight_scale_2"],
            block_sizes={-1: 16},
        )
    # pack_int4_in_uint8: two outputs in a byte, in two's complement
    codes = torch.stack([weight & 15, weight >> 4], 1).flatten(0, 1).to(torch.int8)
    codes = torch.where(codes > 7, codes - 16, codes).float()
    whole = codes * scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)
    return whole * tensors.get(f"{name}.pre_quant_scale", torch.ones(1)).float()


FOLDERS = {
    f"modelopt-{name}": Golden(distribution="nvidia-modelopt", write=modelopt, options=options)
    for name, options in {
        "fp8": {"recipe": "FP8_DEFAULT_CFG", "kv_cache": True},
        "nvfp4": {"recipe": "NVFP4_DEFAULT_CFG"},
        "awq": {"recipe": "INT4_AWQ_CFG"},
    }.items()
}
