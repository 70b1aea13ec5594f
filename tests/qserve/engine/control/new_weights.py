"""Other weights of a model: float tensors, or a folder of them."""

import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

LAYER = re.compile(r"\b(?:layers|h|blocks)\.\d")


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a model."""
    return load_file(folder / "model.safetensors")


def changed(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a model with the last dim of its layers' matrices in reverse."""
    return {
        name: tensor.flip(-1).contiguous() if LAYER.search(name) and tensor.ndim > 1 else tensor
        for name, tensor in stored(folder).items()
    }


def written(tensors: dict[str, torch.Tensor], like: Path, folder: Path) -> Path:
    """A model folder with these tensors and the other files of `like`."""
    shutil.copytree(like, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(tensors, folder / "model.safetensors")
    return folder
