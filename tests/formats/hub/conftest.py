"""A hub on loopback and an empty cache, instead of the real ones."""

import json

import pytest

from tests import local_hub
from tests.local_hub import Repo

CONFIG = json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}).encode()
# Files of a usual repository: what is needed, and what is not.
NEEDED = {
    "config.json": CONFIG,
    "generation_config.json": b"{}",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"template",
    "additional_chat_templates/rag.jinja": b"rag",
    "vocab.txt": b"a",
    "preprocessor_config.json": b"{}",
}
WEIGHTS = b"w" * (2 * local_hub.LARGE)
NOT_NEEDED = {
    ".gitattributes": b"",
    "README.md": b"# model",
    "modeling_custom.py": b"raise SystemExit",
    "pytorch_model.bin": b"pickle",
    "pytorch_model.bin.index.json": b"{}",
    "consolidated.00.pth": b"pickle",
    "consolidated.safetensors": b"twice",
    "original/params.json": b"{}",
    "original/model.safetensors": b"twice",
    "onnx/config.json": b"{}",
    "onnx/model.onnx": b"twice",
    "model-Q4_K_M.gguf": b"twice",
    "trainer_state.json": b"{}",
}


def index(*names: str) -> bytes:
    return json.dumps({"weight_map": {f"t{i}": name for i, name in enumerate(names)}}).encode()


@pytest.fixture
def hub(tmp_path):
    whole = {**NEEDED, **NOT_NEEDED, "model.safetensors": WEIGHTS}
    with local_hub.in_place_of_the_hub({"org/model": Repo(files=whole)}, tmp_path / "home") as hub:
        yield hub
