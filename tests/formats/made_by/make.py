"""Write small checkpoints with other tools, and beside each the weights that its tool sees in it.

    python tests/formats/made_by/make.py TOOL... [--folder tests/formats/made_by]

Each tool needs its own environment; the versions that wrote what is committed stand in made.json.
GPTQModel needs GPTQMODEL_CPU_WORKERS=2 where there are few cores.
Everything is random but seeded: the model has one layer of 64 features.
"""

import argparse
import hashlib
import importlib.metadata
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
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
# for tools whose folders need no more
NARROW = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
WINDOWS, LENGTH = 16, 64
KEPT = ("config.json", "quantize_config.json", "hf_quant_config.json")


def float_model(folder: Path, **changes: object) -> None:
    """A random Llama and a tokenizer of one word for each token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**CONFIG, **changes})).to(torch.float16)
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
        n.removesuffix(".weight"): t.float()
        for n, t in loaded.state_dict().items()
        if n.endswith("_proj.weight")
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


def autoround_float(source: Path, target: Path, scheme: str) -> dict[str, torch.Tensor]:
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


def modelopt(
    source: Path, target: Path, recipe: str, kv_cache: bool = False
) -> dict[str, torch.Tensor]:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16)
    config = in_groups_of(32, getattr(mtq, recipe))
    if kv_cache:
        config["quant_cfg"] += mtq.FP8_KV_CFG["quant_cfg"]
    mtq.quantize(model, config, lambda m: [m(window[None]) for window in windows()])
    with torch.inference_mode():
        export_hf_checkpoint(model, dtype=torch.float16, export_dir=target)
    (file,) = target.glob("*.safetensors")
    tensors = load_file(file)
    names = [name.removesuffix(".weight_scale") for name in tensors if "weight_scale" in name]
    names = [name for name in names if not name.endswith("_2")]
    return {name: modelopt_weight(tensors, name) for name in names}


def in_groups_of(size: int, value: object) -> object:
    """A recipe of modelopt with groups of 128 inputs made smaller."""
    if isinstance(value, dict):
        return {
            k: size if k == -1 and v == 128 else in_groups_of(size, v) for k, v in value.items()
        }
    return [in_groups_of(size, each) for each in value] if isinstance(value, list) else value


def modelopt_weight(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """[N, K] by modelopt's own arithmetic where it has some, and by its packing for 4-bit ints."""
    from modelopt.torch.export.quant_utils import from_quantized_weight
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    weight, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"]
    if weight.dtype == torch.float8_e4m3fn:
        return from_quantized_weight(weight, scale, "fp8", torch.float32)
    if f"{name}.weight_scale_2" in tensors:
        shape = torch.Size((weight.shape[0], 2 * weight.shape[1]))
        return NVFP4QTensor(shape, torch.float32, weight).dequantize(
            torch.float32,
            scale=scale,
            double_scale=tensors[f"{name}.weight_scale_2"],
            block_sizes={-1: 16},
        )
    # pack_int4_in_uint8: two outputs in a byte, in two's complement
    codes = torch.stack([weight & 15, weight >> 4], 1).flatten(0, 1).to(torch.int8)
    codes = torch.where(codes > 7, codes - 16, codes).float()
    whole = codes * scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)
    return whole * tensors.get(f"{name}.pre_quant_scale", torch.ones(1)).float()


def quark(source: Path, target: Path, scheme: str) -> dict[str, torch.Tensor]:
    from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16).eval()
    config = LLMTemplate.get("llama").get_config(scheme=scheme, exclude_layers=["lm_head"])
    quantizer = ModelQuantizer(config)
    model = quantizer.quantize_model(model, DataLoader(list(windows()), batch_size=4))
    model = quantizer.freeze(model)
    expected = {
        name: module.get_quant_weight(module.weight).detach().float()
        for name, module in model.named_modules()
        if name.endswith("_proj")
    }
    export_safetensors(model, str(target))
    return expected


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


def by_transformers(source: Path, target: Path, config: object) -> torch.nn.Module:
    """The model as transformers quantizes it while it loads, saved and read again."""
    from transformers import AutoModelForCausalLM

    settings = {"torch_dtype": torch.float16, "device_map": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config, **settings)
    model.save_pretrained(target)
    return AutoModelForCausalLM.from_pretrained(target, **settings)


def projections(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    return {name: module for name, module in model.named_modules() if name.endswith("_proj")}


def bitsandbytes(source: Path, target: Path, **options: object) -> dict[str, torch.Tensor]:
    import bitsandbytes as bnb
    from transformers import BitsAndBytesConfig

    model = by_transformers(source, target, BitsAndBytesConfig(**options))
    found = {}
    for name, module in projections(model).items():
        weight = module.weight
        if isinstance(module, bnb.nn.Linear4bit):
            found[name] = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
        else:
            found[name] = bnb.functional.int8_vectorwise_dequant(weight.data, weight.SCB)
    return found


def torchao(source: Path, target: Path, kind: str, **options: object) -> dict[str, torch.Tensor]:
    from torchao import quantization
    from transformers import TorchAoConfig

    if "group_size" in options:
        name = "weight_granularity" if "Dynamic" in kind else "granularity"
        options[name] = quantization.PerGroup(options.pop("group_size"))
    if "weight_dtype" in options:
        options["weight_dtype"] = getattr(torch, options["weight_dtype"])
    config = TorchAoConfig(getattr(quantization, kind)(**options))
    model = by_transformers(source, target, config)
    return {name: module.weight.dequantize() for name, module in projections(model).items()}


def torchao_tiles(source: Path, target: Path, group_size: int) -> dict[str, torch.Tensor]:
    """torchao's layout of one CUDA kernel, written without a GPU.

    Only the permutation is written out here, as PyTorch documents `_convert_weight_to_int4pack`;
    padding, scales, codes, files and the arithmetic of the expected weights are torchao's.
    """
    from torchao import quantization
    from torchao.quantization.quant_primitives import _dequantize_affine_tinygemm
    from torchao.quantization.quantize_.workflows.int4 import int4_tile_packed_to_4d_tensor as tiles
    from transformers import AutoModelForCausalLM, TorchAoConfig

    torch.cuda.get_device_capability = lambda *_: (8, 0)
    library = torch.library.Library("aten", "IMPL")
    library.impl("_convert_weight_to_int4pack", pack_tiles, "CPU")
    dense, expected = [], {}
    quantize, from_hp = tiles._quantize_affine_tinygemm, tiles.Int4TilePackedTo4dTensor.from_hp

    def quantized(weight, block_size, scale, zero, *arguments, **options):
        codes = quantize(weight, block_size, scale, zero, *arguments, **options)
        dense.append(
            _dequantize_affine_tinygemm(codes, block_size, scale, zero, torch.int32, 0, 15)
        )
        return codes

    def packed(*arguments, **options):
        made = from_hp(*arguments, **options)
        expected[made.qdata.numpy().tobytes()] = dense.pop()
        return made

    tiles.Int4TilePackedTo4dTensor.from_hp = packed
    tiles._quantize_affine_tinygemm = quantized
    config = quantization.Int4WeightOnlyConfig(
        group_size=group_size, int4_packing_format="tile_packed_to_4d"
    )
    model = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=TorchAoConfig(config), dtype=torch.bfloat16, device_map="cpu"
    )
    model.save_pretrained(target)
    found = {}
    for name, module in projections(model).items():
        whole, (N, K) = expected[module.weight.qdata.numpy().tobytes()], module.weight.shape
        found[name] = whole[:N, :K].to(torch.bfloat16)
    return found


def pack_tiles(pairs: torch.Tensor, inner_tiles: int) -> torch.Tensor:
    """uint8 [N, K / 2], even inputs in the high half -> int32 [N / 8, K / 16T, 32, T / 2]."""
    rows, pairs_per_row = pairs.shape
    bytes_per_tile = 8 * inner_tiles
    words = torch.zeros(rows // 8, pairs_per_row // bytes_per_tile, 32, inner_tiles // 2)
    words = words.to(torch.int64)
    for tile in range(words.shape[1]):
        for lane in range(32):
            for word in range(words.shape[3]):
                first = tile * bytes_per_tile + 16 * word + lane % 4
                own = pairs[lane // 4 :: 8].long()
                for place, column in enumerate((first, first + 4, first + 8, first + 12)):
                    byte = own[:, column]
                    words[:, tile, lane, word] |= byte >> 4 << 4 * place
                    words[:, tile, lane, word] |= (byte & 15) << 4 * place + 16
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def hqq(source: Path, target: Path, **options: object) -> dict[str, torch.Tensor]:
    """HQQ's own layers; config.json has the block that transformers 4 wrote, 5.23 writes none."""
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
    from transformers import AutoModelForCausalLM, HqqConfig

    model = AutoModelForCausalLM.from_pretrained(source, torch_dtype=torch.float16)
    found = {}
    for name, module in projections(model).items():
        layer = HQQLinear(
            module, BaseQuantizeConfig(**options), compute_dtype=torch.float16, device="cpu"
        )
        model.set_submodule(name, layer)
        found[name] = layer.dequantize()
    state = {n: t.contiguous() for n, t in model.state_dict().items()}
    target.mkdir()
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    block = HqqConfig(**options).to_dict()
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": block}))
    return found


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
    **{
        f"auto-round-{name}": ("auto-round", autoround_float, {"scheme": scheme})
        for name, scheme in (
            ("fp8-static", "FP8_STATIC"),
            ("mxfp4", "MXFP4"),
            ("nvfp4", "NVFP4"),
            ("mxfp8", "MXFP8"),
        )
    },
    "llmcompressor-mxfp8": ("llmcompressor", llmcompressor, {"modifier": "rtn", "scheme": "MXFP8"}),
    "modelopt-fp8": (
        "nvidia-modelopt",
        modelopt,
        {"recipe": "FP8_DEFAULT_CFG", "kv_cache": True},
    ),
    "modelopt-nvfp4": ("nvidia-modelopt", modelopt, {"recipe": "NVFP4_DEFAULT_CFG"}),
    "modelopt-awq": ("nvidia-modelopt", modelopt, {"recipe": "INT4_AWQ_CFG"}),
    "quark-fp8": ("amd-quark", quark, {"scheme": "fp8"}),
    "quark-mxfp4": ("amd-quark", quark, {"scheme": "mxfp4"}),
    "autoawq-w4": (
        "autoawq",
        autoawq,
        {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"},
    ),
    "bitsandbytes-nf4": (
        "bitsandbytes",
        bitsandbytes,
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    ),
    "bitsandbytes-fp4": (
        "bitsandbytes",
        bitsandbytes,
        {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_quant_storage": "bfloat16"},
    ),
    "bitsandbytes-int8": ("bitsandbytes", bitsandbytes, {"load_in_8bit": True}),
    "torchao-int8": ("torchao", torchao, {"kind": "Int8DynamicActivationInt8WeightConfig"}),
    "torchao-int4": (
        "torchao",
        torchao,
        {"kind": "IntxWeightOnlyConfig", "weight_dtype": "int4", "group_size": 32},
    ),
    "torchao-tiles": ("torchao", torchao_tiles, {"group_size": 32}),
    "torchao-fp8": ("torchao", torchao, {"kind": "Float8WeightOnlyConfig"}),
    "hqq-w4": ("hqq", hqq, {"nbits": 4, "group_size": 32, "axis": 1}),
    "hqq-w3": ("hqq", hqq, {"nbits": 3, "group_size": 32, "axis": 0}),
}
NARROW_TOOLS = ("bitsandbytes", "torchao", "hqq")


def digest(weight_NK: torch.Tensor) -> str:
    """SHA-256 of a weight's float16 numbers, row by row, in which no zero is negative."""
    halves = weight_NK.detach().to(torch.float16) + 0.0
    return hashlib.sha256(halves.contiguous().numpy().tobytes()).hexdigest()


def make(name: str, folder: Path) -> None:
    """One folder: the files that readers need, the expected weights, who made them."""
    distribution, tool, options = TOOLS[name]
    target = folder / name
    with tempfile.TemporaryDirectory() as work:
        source, made = Path(work) / "float", Path(work) / "made"
        float_model(source, **(NARROW if distribution in NARROW_TOOLS else {}))
        expected = tool(source, made, **dict(options))
        place = folder_of(made)
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        tensors, metadata = {}, {}
        for file in place.glob("*.safetensors"):
            tensors |= load_file(file)
            with safe_open(file, framework="pt") as opened:
                metadata |= opened.metadata() or {}
        # torchao's says what each tensor is; it reads no file without
        metadata = metadata if distribution == "torchao" else {"format": "pt"}
        save_file(tensors, target / "model.safetensors", metadata=metadata)
        for file in KEPT:
            if (place / file).exists():
                shutil.copyfile(place / file, target / file)
    assert len(expected) == 7, sorted(expected)
    if distribution in NARROW_TOOLS:  # tests compute logits with these weights
        halves = {n: t.to(torch.float16).contiguous() for n, t in expected.items()}
        save_file(halves, target / "expected.tensors")
    else:
        digests = {name: digest(weight_NK) for name, weight_NK in sorted(expected.items())}
        (target / "expected.json").write_text(json.dumps(digests, indent=1))
    # the arithmetic of some tools rounds more coarsely than ours
    dtypes = {str(t.dtype).removeprefix("torch.") for t in expected.values()}
    dtype = {"dtype": "bfloat16"} if dtypes == {"bfloat16"} else {}
    versions = {d: importlib.metadata.version(d) for d in (distribution, "torch", "transformers")}
    (target / "made.json").write_text(
        json.dumps({"versions": versions, "options": options, **dtype}, indent=1)
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
