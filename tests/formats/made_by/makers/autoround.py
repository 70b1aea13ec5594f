"""Folders of AutoRound."""

from pathlib import Path

import torch
from makers.float_models import LENGTH, WINDOWS, windows
from makers.golden import Golden, Weights
from makers.linears import folder_of, linears
from makers.llmcompressor import decompressed
from safetensors.torch import load_file

# GPTQModel reads other formats; its plain kernels do not round the weights to bfloat16
KERNELS = {"auto_gptq": ("GPTQConfig", "torch"), "auto_awq": ("AwqConfig", "torch_awq")}


def rounded(source: Path, target: Path, form: str, **options: object) -> Path:
    """Quantize and return the folder with config.json."""
    from auto_round import AutoRound

    rounder = AutoRound(
        str(source),
        nsamples=WINDOWS,
        seqlen=LENGTH,
        dataset=[w[None] for w in windows()],
        device_map="cpu",
        **options,
    )
    rounder.quantize_and_save(output_dir=str(target), format=form)
    return folder_of(target)


def autoround(source: Path, target: Path, form: str, **options: object) -> Weights:
    import transformers

    folder = rounded(source, target, form, iters=4, batch_size=4, **options)
    settings = {"dtype": torch.float16, "device_map": "cpu"}
    if form in KERNELS:
        config, kernel = KERNELS[form]
        settings["quantization_config"] = getattr(transformers, config)(bits=4, backend=kernel)
    return linears(transformers.AutoModelForCausalLM.from_pretrained(folder, **settings))


def autoround_compressed(source: Path, target: Path, **options: object) -> Weights:
    """Its export for llm-compressor's readers."""
    return decompressed(rounded(source, target, "llm_compressor", iters=0, **options))


def autoround_float(source: Path, target: Path, scheme: str) -> Weights:
    """Its formats with float numbers, decompressed by compressed-tensors, whose names they have."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import preset_name_to_scheme

    folder = rounded(source, target, "auto_round", scheme=scheme, iters=0)
    (file,) = folder.glob("*.safetensors")
    tensors, expected = load_file(file), {}
    names = [name.removesuffix(".weight_scale") for name in tensors if "weight_scale" in name]
    layout = {"MXFP8": "mxfp8-quantized"}.get(scheme, f"{scheme.lower()}-pack-quantized")
    for name in names:
        local = {k.removeprefix(f"{name}."): t for k, t in tensors.items() if k.startswith(name)}
        if scheme == "FP8_STATIC":
            scale = local["weight_scale"].float().reshape(-1, 1)
            expected[name] = local["weight"].float() * scale
            continue
        if local["weight_scale"].dtype == torch.uint8:
            local["weight_scale"] = local["weight_scale"].clone()
        compressor = BaseCompressor.get_value_from_registry(layout)
        preset = preset_name_to_scheme(scheme, ["Linear"])
        expected[name] = compressor.decompress(local, preset)["weight"]
    return expected


# bits that differ from the rest, and a linear in float
MIXED = {
    **{f"model.layers.0.self_attn.{name}_proj": {"bits": 8} for name in "qkv"},
    "model.layers.0.mlp.down_proj": {"bits": 8, "group_size": 64},
    "model.layers.0.self_attn.o_proj": {"bits": 16},
}
# 0.16.1 does not find Mixtral's experts in float files of transformers 5
EXPERTS = {"qwen3-moe-w4": "qwen3_moe"}
FOLDERS = {
    **{
        f"auto-round-{name}": Golden(
            distribution="auto-round",
            write=autoround,
            options=options,
            model=EXPERTS.get(name, "llama"),
        )
        for name, options in {
            "qwen3-moe-w4": {"form": "auto_round", "bits": 4, "group_size": 32},
            "w4": {"form": "auto_round", "bits": 4, "group_size": 32},
            "w2": {"form": "auto_round", "bits": 2, "group_size": 32},
            "w3": {"form": "auto_round", "bits": 3, "group_size": 32},
            "w8": {"form": "auto_round", "bits": 8, "group_size": 32},
            "w4-asym": {"form": "auto_round", "bits": 4, "group_size": 32, "sym": False},
            "mixed": {"form": "auto_round", "bits": 4, "group_size": 32, "layer_config": MIXED},
            "gptq": {"form": "auto_gptq", "bits": 4, "group_size": 32},
            "awq": {"form": "auto_awq", "bits": 4, "group_size": 32, "sym": False},
            "zeros-as-they-are": {
                "form": "auto_round:gptqmodel",
                "bits": 4,
                "group_size": 32,
                "sym": False,
            },
        }.items()
    },
    **{
        f"auto-round-{scheme.lower().replace('_', '-')}": Golden(
            distribution="auto-round", write=autoround_float, options={"scheme": scheme}
        )
        for scheme in ("FP8_STATIC", "MXFP4", "NVFP4", "MXFP8")
    },
    **{
        f"auto-round-llmcompressor-{name}": Golden(
            distribution="auto-round",
            also=("compressed-tensors",),
            write=autoround_compressed,
            options=options,
        )
        for name, options in {
            "w4a16": {"scheme": "W4A16", "group_size": 32},
            "w8a8": {"scheme": "INT8"},
            "fp8": {"scheme": "FP8_STATIC"},
            "nvfp4": {"scheme": "NVFP4"},
            "mxfp4": {"scheme": "MXFP4"},
        }.items()
    },
}
