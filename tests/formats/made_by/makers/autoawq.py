"""Folders of AutoAWQ."""

from pathlib import Path

import torch
from makers.float_models import LENGTH, windows
from makers.golden import Golden, Weights
from safetensors.torch import load_file


def autoawq(source: Path, target: Path, **options: object) -> Weights:
    from awq import AutoAWQForCausalLM
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoAWQForCausalLM.from_pretrained(str(source), device_map="cpu")
    model.quantize(
        tokenizer,
        quant_config=options,
        calib_data=windows().tolist(),
        max_calib_seq_len=LENGTH,
        n_parallel_calib_samples=1,
    )
    model.save_quantized(str(target))
    tokenizer.save_pretrained(target)
    (file,) = target.glob("*.safetensors")
    tensors = load_file(file)
    names = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    return {name: awq_weight(tensors, name, options["q_group_size"]) for name in names}


def awq_weight(tensors: dict[str, torch.Tensor], name: str, group_size: int) -> torch.Tensor:
    """[N, K] by AutoAWQ's own arithmetic: its linears run on a GPU alone."""
    from awq.utils.packing_utils import dequantize_gemm

    parts = (tensors[f"{name}.{leaf}"] for leaf in ("qweight", "qzeros", "scales"))
    return dequantize_gemm(*parts, 4, group_size).t()


FOLDERS = {
    "autoawq-w4": Golden(
        distribution="autoawq",
        write=autoawq,
        options={"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"},
    )
}
