"""Tiny float models for the calibrate tests."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

torch.set_num_threads(1)

SHAPES = {  # local name -> [N, K]
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (96, 64),
    "mlp.up_proj": (96, 64),
    "mlp.down_proj": (64, 96),
}


class TinyCheckpoint:
    """A float model to change and to write: `tensors`, `config`."""

    def __init__(self, architecture: str, folder: Path) -> None:
        generator = torch.Generator().manual_seed(0)
        self.folder = folder
        self.config: dict[str, Any] = {
            "architectures": [architecture],
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "vocab_size": 40,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }
        shapes = {"model.embed_tokens.weight": (40, 64), "model.norm.weight": (64,)}
        for layer in range(2):
            prefix = f"model.layers.{layer}"
            shapes |= {f"{prefix}.{name}.weight": shape for name, shape in SHAPES.items()}
            norms = ["input_layernorm", "post_attention_layernorm"]
            if architecture == "Qwen3ForCausalLM":
                norms += ["self_attn.q_norm", "self_attn.k_norm"]
            shapes |= {f"{prefix}.{name}.weight": (64,) for name in norms}
            if architecture == "Qwen2ForCausalLM":
                for name in ("q_proj", "k_proj", "v_proj"):
                    size = SHAPES[f"self_attn.{name}"][0]
                    shapes[f"{prefix}.self_attn.{name}.bias"] = (size,)
        shapes["lm_head.weight"] = (40, 64)
        self.tensors = {
            name: torch.randn(*shape, generator=generator).to(torch.bfloat16)
            for name, shape in shapes.items()
        }

    def write(self) -> Path:
        self.folder.mkdir(exist_ok=True)
        (self.folder / "config.json").write_text(json.dumps(self.config))
        (self.folder / "tokenizer.json").write_text('{"version": "1.0"}')
        save_file(self.tensors, self.folder / "model.safetensors", metadata={"format": "pt"})
        return self.folder


@pytest.fixture
def tiny_checkpoint(tmp_path: Path) -> Callable[..., TinyCheckpoint]:
    """tiny_checkpoint(architecture) -> a model whose `write()` gives its folder, under tmp_path."""

    def make(architecture: str = "LlamaForCausalLM") -> TinyCheckpoint:
        return TinyCheckpoint(architecture, tmp_path / "source")

    return make
