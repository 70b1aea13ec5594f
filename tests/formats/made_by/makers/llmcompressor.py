"""Folders of llm-compressor; compressed-tensors, whose format it writes, says what is in them."""

import json
from pathlib import Path

import torch
from makers.float_models import LENGTH, WINDOWS, windows
from makers.golden import Golden, Weights
from safetensors.torch import load_file

KINDS = {"gptq": "GPTQModifier", "rtn": "QuantizationModifier"}


def llmcompressor(
    source: Path, target: Path, modifier: str, layout: str | None = None, **options: object
) -> Weights:
    """`layout`: how codes are stored; None: as the library chooses."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers import quantization
    from transformers import AutoModelForCausalLM

    data = Dataset.from_dict(
        {"input_ids": windows().tolist(), "attention_mask": [[1] * LENGTH] * WINDOWS}
    )
    kind = getattr(quantization, KINDS[modifier])
    # routers, and gates of shared experts, stay in float
    recipe = kind(
        targets="Linear",
        ignore=["lm_head", "re:.*mlp.gate$", "re:.*shared_expert_gate$"],
        **options,
    )
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16)
    oneshot(
        model=model,
        dataset=data,
        recipe=recipe,
        max_seq_length=LENGTH,
        num_calibration_samples=WINDOWS,
    )
    model.save_pretrained(target, save_compressed=True, quantization_format=layout)
    return decompressed(target)


def decompressed(folder: Path) -> Weights:
    """[N, K] of each linear by compressed-tensors, without a model that could lose experts."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.utils import match_name

    block = json.loads((folder / "config.json").read_text())["quantization_config"]
    groups = [
        (
            QuantizationScheme.model_validate(group),
            BaseCompressor.get_value_from_registry(group.get("format") or block["format"]),
        )
        for group in block["config_groups"].values()
    ]
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    local: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, field = name.rpartition(".")
        local.setdefault(module, {})[field] = tensor
    found = {}
    for module, fields in local.items():
        if "weight_scale" in fields:
            scheme, compressor = next(
                (scheme, compressor)
                for scheme, compressor in groups
                if any(
                    target == "Linear" or match_name(module, target) for target in scheme.targets
                )
            )
            found[module] = compressor.decompress(fields, scheme)["weight"]
    return found


def weights(bits: int, *, symmetric: bool = True, type: str = "int") -> dict[str, object]:
    """A scheme in groups of 32, since presets have groups of 128."""
    return {
        "num_bits": bits,
        "type": type,
        "symmetric": symmetric,
        "strategy": "group",
        "group_size": 32,
    }


def inputs(type: str) -> dict[str, object]:
    return {"num_bits": 8, "type": type, "symmetric": True, "strategy": "token", "dynamic": True}


def in_groups(modifier: str, weights: object, inputs: object = None) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": weights}
    if inputs is not None:
        group["input_activations"] = inputs
    return {"modifier": modifier, "config_groups": {"group_0": group}}


STATIC = {
    "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
    "inputs": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor"},
}
# a layout for each group
MIXED = {
    "modifier": "rtn",
    "config_groups": {
        "group_0": {"targets": ["re:.*self_attn.*"], "weights": weights(4)},
        "group_1": {
            "targets": ["re:.*gate_proj", "re:.*up_proj"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
            "input_activations": inputs("float"),
        },
        "group_2": {
            "targets": ["re:.*down_proj"],
            "weights": weights(8, symmetric=False),
        },
    },
}
KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
# name -> options, model
OPTIONS: dict[str, tuple[dict[str, object], str]] = {
    "w4a16": (in_groups("gptq", weights(4)), "llama"),
    "w4a16-asym": (in_groups("gptq", weights(4, symmetric=False)), "llama"),
    "w8a16": (in_groups("rtn", weights(8)), "llama"),
    "w4a8": (in_groups("rtn", weights(4), inputs("int")), "llama"),
    "w4a8-packed": (
        {**in_groups("rtn", weights(4), inputs("int")), "layout": "pack-quantized"},
        "llama",
    ),
    "w4afp8": (in_groups("rtn", weights(4), inputs("float")), "llama"),
    "w8a8": ({"modifier": "rtn", "scheme": "W8A8"}, "llama"),
    "w8a8-static": (in_groups("rtn", **STATIC), "llama"),
    "fp8": ({"modifier": "rtn", "scheme": "FP8_DYNAMIC"}, "llama"),
    "fp8-static": ({"modifier": "rtn", "scheme": "FP8"}, "llama"),
    "fp8-block": ({"modifier": "rtn", "scheme": "FP8_BLOCK"}, "wide"),
    "fp8-kv": ({"modifier": "rtn", "scheme": "FP8_DYNAMIC", "kv_cache_scheme": KV}, "llama"),
    "mixed": (MIXED, "llama"),
    "mxfp8": ({"modifier": "rtn", "scheme": "MXFP8"}, "llama"),
    "mxfp8a16": ({"modifier": "rtn", "scheme": "MXFP8A16"}, "llama"),
    "mxfp4": ({"modifier": "rtn", "scheme": "MXFP4"}, "llama"),
    "mxfp4a16": ({"modifier": "rtn", "scheme": "MXFP4A16"}, "llama"),
    "nvfp4": ({"modifier": "rtn", "scheme": "NVFP4"}, "llama"),
    "nvfp4a16": ({"modifier": "rtn", "scheme": "NVFP4A16"}, "llama"),
    "mixtral-w4a16": (in_groups("rtn", weights(4)), "mixtral"),
    "mixtral-fp8": ({"modifier": "rtn", "scheme": "FP8_DYNAMIC"}, "mixtral"),
    "qwen3-moe-w4a16": (in_groups("rtn", weights(4)), "qwen3_moe"),
    "qwen3-5-moe-w4a16": (in_groups("rtn", weights(4)), "qwen3_5_moe"),
    "qwen3-moe-nvfp4": ({"modifier": "rtn", "scheme": "NVFP4"}, "qwen3_moe"),
}
# inputs stay in 16 bits, so that tests compute the model's logits with the expected weights
WITH_LOGITS = ("mixtral-w4a16", "qwen3-5-moe-w4a16", "qwen3-moe-nvfp4")
FOLDERS = {
    f"llmcompressor-{name}": Golden(
        distribution="llmcompressor",
        also=("compressed-tensors",),
        write=llmcompressor,
        options=options,
        model=model,
        whole=name in WITH_LOGITS,
    )
    for name, (options, model) in OPTIONS.items()
}
