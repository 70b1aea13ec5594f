"""Folders of AutoRound."""

from pathlib import Path

import torch
from makers.float_models import LENGTH, WINDOWS, windows
from makers.golden import Golden, Weights
from makers.linears import folder_of, linears
from safetensors.torch import load_file


def autoround(source: Path, target: Path, form: str, **options: object) -> Weights:
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM

    rounder = AutoRound(
        str(source),
        iters=4,
        nsamples=WINDOWS,
        seqlen=LENGTH,
        batch_size=4,
        dataset=[w[None] for w in windows()],
        device_map="cpu",
        **options,
    )
    rounder.quantize_and_save(output_dir=str(target), format=form)
    loaded = AutoModelForCausalLM.from_pretrained(folder_of(target), torch_dtype=torch.float16)
    return linears(loaded)


def autoround_float(source: Path, target: Path, scheme: str) -> Weights:
    """Its formats with float numbers, decompressed by compressed-tensors, whose names they have."""
    from auto_round import AutoRound
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import preset_name_to_scheme

    rounder = AutoRound(
        str(source),
        scheme=scheme,
        iters=0,
        nsamples=WINDOWS,
        seqlen=LENGTH,
        dataset=[w[None] for w in windows()],
        device_map="cpu",
    )
    rounder.quantize_and_save(output_dir=str(target), format="auto_round")
    (file,) = folder_of(target).glob("*.safetensors")
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


FOLDERS = {
    **{
        f"auto-round-{name}": Golden(distribution="auto-round", write=autoround, options=options)
        for name, options in {
            "w4": {"form": "auto_round", "bits": 4, "group_size": 32},
            "awq": {"form": "auto_awq", "bits": 4, "group_size": 32, "sym": False},
        }.items()
    },
    **{
        f"auto-round-{scheme.lower().replace('_', '-')}": Golden(
            distribution="auto-round", write=autoround_float, options={"scheme": scheme}
        )
        for scheme in ("FP8_STATIC", "MXFP4", "NVFP4", "MXFP8")
    },
}
