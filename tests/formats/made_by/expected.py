"""Golden folders, and the weights that the tool which wrote one sees in it."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.formats.made_by.makers.digest import digest

FOLDERS = sorted(path.parent for path in Path(__file__).parent.glob("*/made.json"))
# parts of experts' names that tools write for Mixtral, and the family's
MIXTRAL = {
    ".mlp.": ".block_sparse_moe.",
    ".gate_proj": ".w1",
    ".up_proj": ".w3",
    ".down_proj": ".w2",
}


def family_names(folder: Path, names: list[str]) -> dict[str, str]:
    """Map a linear's name in the folder to its name in the family."""
    config = json.loads((folder / "config.json").read_text())
    found = {name: name for name in names}
    if config["model_type"] == "mixtral":
        for name in names:
            if ".experts." in name:
                for part, own in MIXTRAL.items():
                    found[name] = found[name].replace(part, own)
    return found


def expected_weights(folder: Path) -> dict[str, torch.Tensor]:
    """[N, K] of each linear by its name in the family, of a folder that holds them."""
    weights = load_file(folder / "expected.tensors")
    names = family_names(folder, list(weights))
    return {names[name]: weight_NK for name, weight_NK in weights.items()}


def expected_digests(folder: Path) -> dict[str, str]:
    """A digest of each linear's weight by its name in the family."""
    if not (folder / "expected.json").exists():
        return {name: digest(t) for name, t in expected_weights(folder).items()}
    digests = json.loads((folder / "expected.json").read_text())
    names = family_names(folder, list(digests))
    return {names[name]: text for name, text in digests.items()}
