"""Folders of Quark."""

from pathlib import Path

import torch
from makers.float_models import windows
from makers.golden import Golden, Weights


def quark(source: Path, target: Path, scheme: str) -> Weights:
    from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16).eval()
    config = LLMTemplate.get("llama").get_config(scheme=scheme, exclude_layers=["lm_head"])
    quantizer = ModelQuantizer(config)
    model = quantizer.quantize_model(model, DataLoader(list(windows()), batch_size=4))
    model = quantizer.freeze(model)
    expected = {
        name: module.get_quant_weight(module.weight).detach().float()
        for name, module in model.named_modules()
        if name.endswith("_proj")
    }
    export_safetensors(model, str(target))
    return expected


FOLDERS = {
    f"quark-{scheme}": Golden(distribution="amd-quark", write=quark, options={"scheme": scheme})
    for scheme in ("fp8", "mxfp4")
}
