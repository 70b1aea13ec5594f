"""Folders of GPTQModel. It needs GPTQMODEL_CPU_WORKERS=2 where there are few cores."""

from pathlib import Path

import torch
from makers.float_models import LENGTH, windows
from makers.golden import Golden, Weights
from makers.linears import linears


def gptqmodel(source: Path, target: Path, **options: object) -> Weights:
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    model = GPTQModel.load(
        str(source),
        # no folder of this machine in the file
        QuantizeConfig(pack_impl="original", offload_to_disk=False, **options),
        device="cpu",
        dtype=torch.float16,
    )
    data = [{"input_ids": w.tolist(), "attention_mask": [1] * LENGTH} for w in windows()]
    model.quantize(data, batch_size=1, calibration_data_min_length=1)
    model.save(str(target))
    # Its default on a CPU is bfloat16, to which it would round the scales.
    loaded = GPTQModel.load(str(target), backend=BACKEND.TORCH, device="cpu", dtype=torch.float16)
    return linears(loaded.model.to(torch.float16))


MODELS = {"mixtral-w4": "mixtral", "qwen3-moe-w4": "qwen3_moe"}
FOLDERS = {
    f"gptqmodel-{name}": Golden(
        distribution="gptqmodel", write=gptqmodel, options=options, model=MODELS.get(name, "llama")
    )
    for name, options in {
        "w4-asym": {"bits": 4, "group_size": 32, "sym": False},
        "mixtral-w4": {"bits": 4, "group_size": 32},
        "qwen3-moe-w4": {"bits": 4, "group_size": 32},
        "w4": {"bits": 4, "group_size": 32},
        "act-order": {
            "bits": 4,
            "group_size": 32,
            "desc_act": True,
            "act_group_aware": False,
        },
        "w3": {"bits": 3, "group_size": 32},
        "w8-asym": {"bits": 8, "group_size": 64, "sym": False},
    }.items()
}
