"""Tiny checkpoints for the formats tests: two layers, 64 wide, built without calibrate."""

import functools
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from formats.codecs import awq, compressed_tensors, gptq
from formats.in_memory.packed import PackedWeight
from formats.in_memory.weights import round_to_nearest, with_activation
from formats.quant_config import BLOCK, QuantConfig
from formats.scheme import QuantSpec, Scheme

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
ENCODE = {"gptq": gptq.encode, "awq": awq.encode, "compressed-tensors": compressed_tensors.encode}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "tie_word_embeddings": False,
}


def _float_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    tensors = {"model.embed_tokens.weight": random(40, 64)}
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        for local, shape in SHAPES.items():
            tensors[f"{prefix}.{local}.weight"] = random(*shape)
        for local in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{local}.weight"] = random(64)
    return {**tensors, "model.norm.weight": random(64), "lm_head.weight": random(40, 64)}


@pytest.fixture
def float_model() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(tensors, config) of a float model, both free to be changed."""
    return _float_tensors(), dict(CONFIG)


@functools.cache
def _quantized(
    method: str, name: str, kv_cache: str | None
) -> tuple[dict[str, torch.Tensor], QuantConfig]:
    """Tensors and quantization block of the float model in a scheme; rounding takes 0.1 s."""
    scheme, state, schemes = Scheme.parse(name), {}, {}
    for full, tensor in _float_tensors().items():
        module = full.removesuffix(".weight")
        if "_proj" not in full:
            state[full] = tensor
            continue
        schemes[module] = scheme
        scale = 0.5 if scheme.activation and not scheme.activation.dynamic else None
        packed = with_activation(round_to_nearest(tensor, scheme.weight), scheme, scale)
        for field, value in ENCODE[method](packed, module).items():
            state[f"{module}.{field}"] = value
    return state, QuantConfig.of_modules(method, schemes, "test:1", kv_cache=kv_cache)


@pytest.fixture
def model():
    """model(format, scheme, kv_cache) -> (tensors, config), both free to be changed."""

    def make(method: str, name: str, kv_cache: str | None = None):
        state, block = _quantized(method, name, kv_cache)
        tensors = {name: tensor.clone() for name, tensor in state.items()}
        return tensors, {**CONFIG, BLOCK: block.to_dict()}

    return make


@functools.cache
def _gptq() -> tuple[dict[str, torch.Tensor], QuantConfig]:
    spec = QuantSpec(bits=4, symmetric=True, group_size=32)
    tensors = {}
    for name, tensor in _float_tensors().items():
        module = name.removesuffix(".weight")
        if "_proj" not in name:
            tensors[name] = tensor
            continue
        for field, value in gptq.encode(PackedWeight.from_float(tensor, spec)).items():
            tensors[f"{module}.{field}"] = value
    return tensors, QuantConfig(scheme=Scheme(weight=spec), quantizer="test:1")


@pytest.fixture
def gptq_model() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(tensors, config) of the same model in 4 bits, groups of 32, both free to be changed."""
    tensors, block = _gptq()
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    return copies, {**CONFIG, BLOCK: block.to_dict()}


@pytest.fixture
def write_folder(tmp_path: Path) -> Callable[..., Path]:
    """write_folder(tensors, config, num_shards=1) -> a model folder, written without our writer."""

    def write(
        tensors: dict[str, torch.Tensor], config: dict[str, Any], num_shards: int = 1
    ) -> Path:
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "tokenizer.json").write_text("{}")
        if num_shards == 1:
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            return folder
        names, weight_map = list(tensors), {}
        for number in range(num_shards):
            shard = {name: tensors[name] for name in names[number::num_shards]}
            file_name = f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors"
            save_file(shard, folder / file_name, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(shard, file_name))
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder

    return write


@pytest.fixture
def raw_safetensors() -> Callable[..., bytes]:
    """raw_safetensors(header, data) -> the bytes of a file, however wrong."""

    def build(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return struct.pack("<Q", len(text) if length is None else length) + text + data

    return build
