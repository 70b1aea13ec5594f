"""PEFT folders of random numbers, written without PEFT, and the same merged into float weights."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from formats.checkpoint import CheckpointReader
from formats.peft.lora import adapted_shapes
from formats.peft.routed_experts import expert_shapes
from qserve.model.model_config import family_of

NEUTRAL = {"bias": "none", "use_dora": False, "modules_to_save": None, "inference_mode": True}


def write_adapter(
    model,
    folder,
    *,
    rank=4,
    alpha=8,
    seed=0,
    only=(),
    size=0.3,
    experts=False,
    **config,
) -> Path:
    """An adapter of every linear of a model, or of those whose names end so (`only`).

    `experts`: also of those of routed experts, one after the other.
    """
    reader = CheckpointReader(model)
    family = family_of(reader.config)
    shapes = adapted_shapes(family, reader.config)
    if experts:
        shapes |= expert_shapes(family, reader.config)
    generator = torch.Generator().manual_seed(seed)
    tensors, targets = {}, []
    for module, (outputs, inputs) in shapes.items():
        if only and not module.endswith(tuple(only)):
            continue
        targets.append(module)
        for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            values = torch.randn(shape, generator=generator) * size / shape[1] ** 0.5
            tensors[f"base_model.model.{module}.lora_{part}.weight"] = values
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    stated = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": targets,
        **NEUTRAL,
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(stated))
    return folder


def write_with_peft(model, folder, *, seed=0, size=0.3, **config):
    """PEFT's model with an adapter of random numbers, which it saves in a folder."""
    import peft

    made = peft.get_peft_model(model, peft.LoraConfig(**config)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "lora_" in name:
                weight.normal_(0, size / weight.shape[1] ** 0.5, generator=generator)
    made.save_pretrained(folder)
    return made
