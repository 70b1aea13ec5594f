"""Write small checkpoints with other tools, and beside each the weights that its tool sees in it.

    python tests/formats/made_by/make.py TOOL... [--folder tests/formats/made_by]

Each tool needs its own environment; the versions that wrote what is committed stand in made.json.
GPTQModel needs GPTQMODEL_CPU_WORKERS=2 where there are few cores.
Everything is random but seeded: the model has one layer of 64 features.
"""

import argparse
import importlib.metadata
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
WINDOWS, LENGTH = 16, 64
KEPT = ("config.json", "quantize_config.json", "model.safetensors")


def float_model(folder: Path) -> None:
    """A random Llama and a tokenizer of one word for each token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).to(torch.float16)
    model.save_pretrained(folder)
    words = {f"w{number}": number for number in range(CONFIG["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="w0", eos_token="w1", pad_token="w1"
    ).save_pretrained(folder)


def windows() -> torch.Tensor:
    return torch.randint(2, 64, (WINDOWS, LENGTH), generator=torch.Generator().manual_seed(1))


def effective(layer: torch.nn.Module, width: int) -> torch.Tensor:
    """[N, K] of what a linear computes, from its outputs for the unit vectors."""
    with torch.no_grad():
        zero = layer(torch.zeros(1, width, dtype=torch.float16)).float()
        return (layer(torch.eye(width, dtype=torch.float16)).float() - zero).t()


def linears(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What each linear of a loaded model computes, by name."""
    found = {}
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        if leaf.endswith("_proj") and "layers." in name:
            width = 128 if leaf == "down_proj" else 64
            found[name[name.index("model.layers") :]] = effective(module, width)
    return found


def folder_of(target: Path) -> Path:
    """Where config.json is: some tools write into a folder of their own below."""
    return next(target.rglob("config.json")).parent


def gptqmodel(source: Path, target: Path, **options: object) -> dict[str, torch.Tensor]:
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    model = GPTQModel.load(
        str(source),
        # no folder of this machine in the file
        QuantizeConfig(pack_impl="original", offload_to_disk=False, **options),
        device="cpu",
        dtype=torch.float16,
    )
    data = [{"input_ids": w.tolist(), "attention_mask": [1] * LENGTH} for w in windows()]
    model.quantize(data, batch_size=1, calibration_data_min_length=1)
    model.save(str(target))
    # Its default on a CPU is bfloat16, to which it would round the scales.
    loaded = GPTQModel.load(str(target), backend=BACKEND.TORCH, device="cpu", dtype=torch.float16)
    return linears(loaded.model.to(torch.float16))


def llmcompressor(source: Path, target: Path, **options: object) -> dict[str, torch.Tensor]:
    from compressed_tensors.quantization import QuantizationScheme  # noqa: F401 - fails early
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
    from transformers import AutoModelForCausalLM

    kind = {"gptq": GPTQModifier, "rtn": QuantizationModifier}[options.pop("modifier")]
    model = AutoModelForCausalLM.from_pretrained(source, torch_dtype=torch.float16)
    data = Dataset.from_dict(
        {"input_ids": windows().tolist(), "attention_mask": [[1] * LENGTH] * WINDOWS}
    )
    recipe = kind(targets="Linear", ignore=["lm_head"], **options)
    oneshot(
        model=model,
        dataset=data,
        recipe=recipe,
        max_seq_length=LENGTH,
        num_calibration_samples=WINDOWS,
    )
    model.save_pretrained(target, save_compressed=True)
    from transformers import CompressedTensorsConfig

    loaded = AutoModelForCausalLM.from_pretrained(
        target,
        torch_dtype=torch.float16,
        quantization_config=CompressedTensorsConfig(dequantize=True),
    )
    return {
        n.removesuffix(".weight"): t.float() for n, t in loaded.state_dict().items() if "_proj" in n
    }


def autoround(source: Path, target: Path, form: str, **options: object) -> dict[str, torch.Tensor]:
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


def autoawq(source: Path, target: Path, **options: object) -> dict[str, torch.Tensor]:
    from awq import AutoAWQForCausalLM
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoAWQForCausalLM.from_pretrained(str(source), device_map="cpu")
    model.quantize(
        tokenizer,
        quant_config=options,
        calib_data=windows().tolist(),
        max_calib_seq_len=LENGTH,
        n_parallel_calib_samples=1,
    )
    model.save_quantized(str(target))
    tokenizer.save_pretrained(target)
    (file,) = target.glob("*.safetensors")
    tensors = load_file(file)
    names = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    return {name: awq_weight(tensors, name, options["q_group_size"]) for name in names}


def awq_weight(tensors: dict[str, torch.Tensor], name: str, group_size: int) -> torch.Tensor:
    """[N, K] by AutoAWQ's own arithmetic: its linears run on a GPU alone."""
    from awq.utils.packing_utils import dequantize_gemm

    parts = (tensors[f"{name}.{leaf}"] for leaf in ("qweight", "qzeros", "scales"))
    return dequantize_gemm(*parts, 4, group_size).t()


W4G32 = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 32,
}
Make = Callable[..., dict[str, torch.Tensor]]
# folder -> distribution, what makes it, its options
TOOLS: dict[str, tuple[str, Make, dict[str, object]]] = {
    "gptqmodel-w4": ("gptqmodel", gptqmodel, {"bits": 4, "group_size": 32}),
    "gptqmodel-act-order": (
        "gptqmodel",
        gptqmodel,
        {"bits": 4, "group_size": 32, "desc_act": True, "act_group_aware": False},
    ),
    "gptqmodel-w3": ("gptqmodel", gptqmodel, {"bits": 3, "group_size": 32}),
    "gptqmodel-w8-asym": ("gptqmodel", gptqmodel, {"bits": 8, "group_size": 64, "sym": False}),
    "llmcompressor-w4a16": (
        "llmcompressor",
        llmcompressor,
        {
            "modifier": "gptq",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": W4G32}},
        },
    ),
    "llmcompressor-w8a8": ("llmcompressor", llmcompressor, {"modifier": "rtn", "scheme": "W8A8"}),
    "llmcompressor-fp8": (
        "llmcompressor",
        llmcompressor,
        {"modifier": "rtn", "scheme": "FP8_DYNAMIC"},
    ),
    "auto-round-w4": ("auto-round", autoround, {"form": "auto_round", "bits": 4, "group_size": 32}),
    "auto-round-awq": (
        "auto-round",
        autoround,
        {"form": "auto_awq", "bits": 4, "group_size": 32, "sym": False},
    ),
    "autoawq-w4": (
        "autoawq",
        autoawq,
        {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"},
    ),
}


def make(name: str, folder: Path) -> None:
    """One folder: the files that readers need, the expected weights, who made them."""
    distribution, tool, options = TOOLS[name]
    target = folder / name
    with tempfile.TemporaryDirectory() as work:
        source, made = Path(work) / "float", Path(work) / "made"
        float_model(source)
        expected = tool(source, made, **options)
        place = folder_of(made)
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        tensors = {}
        for file in place.glob("*.safetensors"):
            tensors |= load_file(file)
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        for file in KEPT[:2]:
            if (place / file).exists():
                shutil.copyfile(place / file, target / file)
    assert len(expected) == 7, sorted(expected)
    halves = {n: t.to(torch.float16).contiguous() for n, t in expected.items()}
    save_file(halves, target / "expected.tensors")
    versions = {d: importlib.metadata.version(d) for d in (distribution, "torch", "transformers")}
    (target / "made.json").write_text(
        json.dumps({"versions": versions, "options": options}, indent=1)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tools", nargs="+", choices=[*TOOLS, "all"])
    parser.add_argument("--folder", type=Path, default=HERE)
    arguments = parser.parse_args()
    for name in TOOLS if "all" in arguments.tools else arguments.tools:
        make(name, arguments.folder)


if __name__ == "__main__":
    main()
