"""A small writer of GGUF files, as the format's description has it, for tests of the reader."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from formats.checkpoint import CheckpointReader

F32, F16, Q8_0, Q4_0, Q3_K = 0, 1, 8, 2, 11
UINT32, FLOAT32, BOOL, STRING, ARRAY = 4, 6, 7, 8, 9
# type and struct code of the items of a list
ITEM_TYPES = {
    bool: (BOOL, "<?"),
    int: (UINT32, "<I"),
    float: (FLOAT32, "<f"),
    str: (STRING, ""),
}
ALIGNMENT = 32


def string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def value(found: Any) -> bytes:
    """Type and bytes of a metadata value."""
    if isinstance(found, bool):
        return struct.pack("<I?", BOOL, found)
    if isinstance(found, int):
        return struct.pack("<II", UINT32, found)
    if isinstance(found, float):
        return struct.pack("<If", FLOAT32, found)
    if isinstance(found, str):
        return struct.pack("<I", STRING) + string(found)
    kind, code = ITEM_TYPES[type(found[0])]
    items = b"".join(string(x) if kind == STRING else struct.pack(code, x) for x in found)
    return struct.pack("<IIQ", ARRAY, kind, len(found)) + items


def blocks(weight: torch.Tensor, kind: int) -> bytes:
    """A tensor's bytes: floats, or codes in blocks of 32 with a float16 scale. Q3_K is zeros."""
    if kind == Q3_K:
        return bytes(weight.numel() // 256 * 110)
    if kind in (F32, F16):
        return weight.to(torch.float32 if kind == F32 else torch.float16).numpy().tobytes()
    most = 127 if kind == Q8_0 else 7
    rows = weight.float().reshape(-1, 32)
    scales = (rows.abs().amax(-1, keepdim=True) / most).half()
    codes = (rows / scales.float().clamp(min=1e-8)).round().clamp(-most, most).to(torch.int8)
    if kind == Q4_0:
        low, high = (codes + 8).to(torch.uint8).chunk(2, -1)
        codes = low | high << 4
    data = torch.cat([scales.view(torch.uint8).reshape(-1, 2), codes.view(torch.uint8)], -1)
    return data.numpy().tobytes()


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[torch.Tensor, int]]
) -> Path:
    """Write one file; `tensors`: name -> (weight, type)."""
    pairs = b"".join(string(key) + value(found) for key, found in metadata.items())
    described, data = b"", b""
    for name, (weight, kind) in tensors.items():
        shape = list(weight.shape)[::-1]
        described += string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        described += struct.pack("<IQ", kind, len(data))
        found = blocks(weight.contiguous(), kind)
        data += found + bytes(-len(found) % ALIGNMENT)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)) + pairs + described
    path.write_bytes(head + bytes(-len(head) % ALIGNMENT) + data)
    return path


NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def pairs_together(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k in the order of llama.cpp: i and i + half of a head are neighbours."""
    rows = weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2)
    return rows.reshape(weight.shape)


def llama_tensors(folder: Path, kind: int) -> dict[str, tuple[torch.Tensor, int]]:
    """Tensors of a Llama folder under llama.cpp's names; matrices of layers have the type."""
    reader = CheckpointReader(folder)
    heads = reader.config["num_attention_heads"]
    kv_heads = reader.config["num_key_value_heads"]
    found = {
        "token_embd.weight": (reader.get("model.embed_tokens.weight"), F32),
        "output_norm.weight": (reader.get("model.norm.weight"), F32),
    }
    if not reader.config["tie_word_embeddings"]:
        found["output.weight"] = (reader.get("lm_head.weight"), F32)
    for layer in range(reader.config["num_hidden_layers"]):
        for ours, theirs in NAMES.items():
            weight = reader.get(f"model.layers.{layer}.{ours}.weight").float()
            if theirs in ("attn_q", "attn_k"):
                weight = pairs_together(weight, heads if theirs == "attn_q" else kv_heads)
            found[f"blk.{layer}.{theirs}.weight"] = (weight, kind if weight.ndim == 2 else F32)
    return found


def llama_metadata(folder: Path) -> dict[str, Any]:
    """Metadata of a Llama folder with a byte-level BPE tokenizer, or without a tokenizer."""
    config = json.loads((folder / "config.json").read_text())
    found = {
        "general.architecture": "llama",
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": float(np.float32(config["rms_norm_eps"])),
        "llama.attention.key_length": config["head_dim"],
        "llama.attention.value_length": config["head_dim"],
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": config["head_dim"],
    }
    path = folder / "tokenizer.json"
    if not path.exists():
        return found
    tokenizer = json.loads(path.read_text())
    added = {each["content"] for each in tokenizer["added_tokens"]}
    vocabulary = {**tokenizer["model"]["vocab"]}
    vocabulary |= {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
    texts = sorted(vocabulary, key=vocabulary.get)
    merges = tokenizer["model"]["merges"]
    return found | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [3 if text in added else 1 for text in texts],
        "tokenizer.ggml.merges": [" ".join(m) if isinstance(m, list) else m for m in merges],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.chat_template": (folder / "chat_template.jinja").read_text(),
    }
