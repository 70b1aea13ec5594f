"""Tiny models with states and an MTP layer below `mtp.`, as Qwen3-Next and Qwen3.5 have it."""

import json

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.conftest import make_tiny
from tests.tiny_families import TINY, TINY_FAMILIES

C = 64
FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
ENDS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")


def layer_alone(family):
    """transformers' model of one layer with attention, whose output norm and head are the last."""
    name, extra = TINY_FAMILIES[family]
    make_config = getattr(transformers, name)
    usual = {key: value for key, value in TINY.items() if hasattr(make_config(), key)}
    alone = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    torch.manual_seed(11)
    config = make_config(**{**usual, **extra, **alone})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def make_hybrid_mtp(folder, family, agreement=0.0):
    """A model whose MTP layer is random. Returns the folder.

    `agreement`: how much of the output of each block is left out, and how far the projection passes
    the embedding on; then the next token follows mostly from the last, for the model and the layer.
    """
    make_tiny(folder, *TINY_FAMILIES[family])
    state = load_file(folder / "model.safetensors")
    layer_alone(family).save_pretrained(folder / "alone")
    alone = load_file(folder / "alone" / "model.safetensors")
    generator = torch.Generator().manual_seed(3)

    def noise(*shape):
        return torch.randn(shape, generator=generator)

    projection = noise(C, 2 * C) * (2 * C) ** -0.5 * (1 - agreement)
    projection[:, :C] += torch.eye(C) * bool(agreement)
    mtp = {
        name.replace("model.layers.0.", "mtp.layers.0."): value
        for name, value in alone.items()
        if name.startswith("model.layers.0.")
    }
    for tensors in (state, mtp):
        for name, value in tensors.items():
            if name.endswith(ENDS):
                tensors[name] = value * (1 - agreement)
    mtp |= {
        "mtp.fc.weight": projection,
        "mtp.pre_fc_norm_embedding.weight": 0.2 * noise(C) * (not agreement),
        "mtp.pre_fc_norm_hidden.weight": 0.2 * noise(C),
        "mtp.norm.weight": state["model.norm.weight"] if agreement else 0.2 * noise(C),
    }
    tensors = {name: value.clone() for name, value in (state | mtp).items()}
    save_file(tensors, folder / "model.safetensors")
    for file in (folder / "alone").iterdir():
        file.unlink()
    (folder / "alone").rmdir()
    if family != "qwen3_next":  # its config.json states no number
        path = folder / "config.json"
        values = json.loads(path.read_text()) | {"mtp_num_hidden_layers": 1}
        path.write_text(json.dumps(values))
    return folder
