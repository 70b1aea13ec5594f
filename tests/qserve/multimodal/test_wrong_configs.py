"""Wrong values in the config.json of a vision-language model are named when it is loaded."""

import json
import shutil

import pytest

from formats.errors import InputError
from qserve import LLM

WRONG = [
    (
        "lfm2_vl",
        "vision_config.num_attention_heads",
        -1,
        "_heads: expected a positive",
    ),
    ("lfm2_vl", "vision_config.num_attention_heads", 3, "cannot build the vision tower: embed_dim"),
    ("llama4", "vision_config.patch_size", 0, "cannot build the vision tower: integer division"),
    ("llama4", "image_token_index", -1, "expected a token id"),
    (
        "kimi_k25",
        "vision_config.num_attention_heads",
        0,
        "_heads: expected a positive",
    ),
]


@pytest.mark.parametrize(("family", "key", "value", "words"), WRONG)
def test_wrong_values_are_named(vision, tmp_path, family, key, value, words):
    folder = tmp_path / "model"
    shutil.copytree(vision(family).folder, folder)
    config = json.loads((folder / "config.json").read_text())
    *parents, last = key.split(".")
    block = config
    for parent in parents:
        block = block[parent]
    block[last] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=rf"config\.json.*{words}"):
        LLM(folder, device="cpu", max_model_len=64)
