"""Effective weights of the linears of a loaded model."""

from pathlib import Path

import torch


def effective(layer: torch.nn.Module, width: int) -> torch.Tensor:
    """[N, K] of what a linear computes, from its outputs for the unit vectors."""
    with torch.no_grad():
        zero = layer(torch.zeros(1, width, dtype=torch.float16)).float()
        return (layer(torch.eye(width, dtype=torch.float16)).float() - zero).t()


def linears(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Effective weight of each linear of a loaded model, by name."""
    return {
        name[name.index("model.layers") :]: effective(module, width_of(module))
        for name, module in projections(model).items()
    }


def width_of(layer: torch.nn.Module) -> int:
    """Number of inputs, which tools call differently."""
    return layer.in_features if hasattr(layer, "in_features") else layer.infeatures


def projections(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Linears that are quantized, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if name.endswith(("_proj", ".w1", ".w2", ".w3")) and "layers." in name
    }


def folder_of(target: Path) -> Path:
    """Where config.json is: some tools write into a folder of their own below."""
    return next(target.rglob("config.json")).parent


def by_transformers(source: Path, target: Path, config: object) -> torch.nn.Module:
    """The model as transformers quantizes it while it loads, saved and read again."""
    from transformers import AutoModelForCausalLM

    settings = {"torch_dtype": torch.float16, "device_map": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config, **settings)
    model.save_pretrained(target)
    return AutoModelForCausalLM.from_pretrained(target, **settings)
