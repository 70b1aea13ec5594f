"""A tiny model with a layer for drafts that is often right: it and the model say much alike."""

import json
import shutil

import torch
from safetensors.torch import load_file, save_file

from tests.conftest import make_tiny
from tests.tiny_families import TINY_FAMILIES

C, LAYERS, PREFIX = 64, 3, "model.layers.3."


def make_mtp(folder, tokenizer_from=None, *, agreement=0.0, family="glm4_moe", **config):
    """A model of 3 layers whose fourth, of the same kind, is for drafts. Returns the folder.

    `agreement` 0: everything is random. Else attention and feed-forwards add so much less, and
    eh_proj passes the embedding on: then the next token follows mostly from the last, for both.
    """
    name, extra = TINY_FAMILIES[family]
    extra = {**extra, "num_hidden_layers": LAYERS + 1, "first_k_dense_replace": 1, **config}
    make_tiny(folder, name, extra)
    state = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)

    def noise(*shape):
        return torch.randn(shape, generator=generator)

    vocab = state["model.embed_tokens.weight"].shape[0]
    projection = noise(C, 2 * C) * (2 * C) ** -0.5
    if agreement:
        projection = projection * (1 - agreement)
        projection[:, :C] += torch.eye(C)
        for key, value in state.items():
            if key.endswith(("o_proj.weight", "down_proj.weight")):
                state[key] = value * (1 - agreement)
    norm, table = (lambda: 1 + 0.2 * noise(C)), state["model.embed_tokens.weight"]
    state |= {
        f"{PREFIX}eh_proj.weight": projection,
        f"{PREFIX}enorm.weight": torch.ones(C) if agreement else norm(),
        f"{PREFIX}hnorm.weight": norm(),
        f"{PREFIX}shared_head.norm.weight": state["model.norm.weight"] if agreement else norm(),
        f"{PREFIX}embed_tokens.weight": table.clone() if agreement else noise(vocab, C) / 8,
        f"{PREFIX}shared_head.head.weight": (
            state["lm_head.weight"].clone() if agreement else noise(vocab, C) / 8
        ),
    }
    save_file({k: v.clone() for k, v in state.items()}, folder / "model.safetensors")
    path = folder / "config.json"
    values = json.loads(path.read_text()) | {"num_hidden_layers": LAYERS}
    path.write_text(json.dumps(values | {"num_nextn_predict_layers": 1}))
    for file in () if tokenizer_from is None else tokenizer_from.glob("token*"):
        shutil.copy(file, folder)
    return folder
