"""Folders of HQQ."""

import json
from pathlib import Path

import torch
from makers.golden import Golden, Weights
from makers.linears import projections
from safetensors.torch import save_file


def hqq(source: Path, target: Path, **options: object) -> Weights:
    """HQQ's own layers; config.json has the block that transformers 4 wrote, 5.23 writes none."""
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
    from transformers import AutoModelForCausalLM, HqqConfig

    model = AutoModelForCausalLM.from_pretrained(source, torch_dtype=torch.float16)
    found = {}
    for name, module in projections(model).items():
        layer = HQQLinear(
            module, BaseQuantizeConfig(**options), compute_dtype=torch.float16, device="cpu"
        )
        model.set_submodule(name, layer)
        found[name] = layer.dequantize()
    state = {n: t.contiguous() for n, t in model.state_dict().items()}
    target.mkdir()
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    block = HqqConfig(**options).to_dict()
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": block}))
    return found


FOLDERS = {
    f"hqq-{name}": Golden(
        distribution="hqq", write=hqq, options=options, model="narrow", whole=True
    )
    for name, options in {
        "w4": {"nbits": 4, "group_size": 32, "axis": 1},
        "w3": {"nbits": 3, "group_size": 32, "axis": 0},
    }.items()
}
