"""Quantize a model with another tool, calibrated on given windows of token ids.

    PYTHON examples/other_quantizers.py TOOL MODEL OUT --windows windows.json --group-size 64

PYTHON is the interpreter of an environment with the tool; nothing of this project is imported.
`compare_recipes.py` runs this script.
"""

import argparse
import json
import os
from pathlib import Path

import torch


def tokens(ids: list[int]) -> dict[str, torch.Tensor]:
    """Return a batch of one window that attends to all tokens, the padding token included."""
    ids_1S = torch.tensor([ids])
    return {"input_ids": ids_1S, "attention_mask": torch.ones_like(ids_1S)}


def llm_compressor(arguments: argparse.Namespace, windows: list[list[int]]) -> None:
    """Quantize with llm-compressor's GPTQModifier, into compressed-tensors."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights = {
        "num_bits": arguments.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": arguments.group_size,
    }
    recipe = GPTQModifier(
        ignore=["lm_head"],
        config_groups={"group_0": {"targets": ["Linear"], "weights": weights}},
    )
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    oneshot(
        model=model,
        dataset=DataLoader([tokens(ids) for ids in windows], batch_size=None),
        recipe=recipe,
        max_seq_length=max(map(len, windows)),
        num_calibration_samples=len(windows),
    )
    model.save_pretrained(arguments.out, save_compressed=True)
    AutoTokenizer.from_pretrained(arguments.model).save_pretrained(arguments.out)


def gptqmodel(arguments: argparse.Namespace, windows: list[list[int]]) -> None:
    """Quantize with GPTQModel's default GPTQ settings, into the GPTQ format."""
    # It wants two workers, but counts half of the cores.
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", str(max(2, (os.cpu_count() or 1) // 2)))
    from gptqmodel import GPTQModel, QuantizeConfig

    config = QuantizeConfig(
        bits=arguments.bits,
        group_size=arguments.group_size,
        pack_impl="original",
        offload_to_disk=False,
    )
    model = GPTQModel.load(arguments.model, config, device=arguments.device, dtype=torch.float16)
    data = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in windows]
    model.quantize(data, batch_size=1, calibration_data_min_length=1)
    model.save(arguments.out)


def auto_round(arguments: argparse.Namespace, windows: list[list[int]]) -> None:
    """Quantize with AutoRound (default iterations, or --iterations), into the GPTQ format."""
    from auto_round import AutoRound

    options = {} if arguments.iterations is None else {"iters": arguments.iterations}
    if arguments.device != "cuda":  # its default
        options["device_map"] = arguments.device
    if arguments.no_compile or arguments.device == "cpu":  # minutes on a CPU
        options["enable_torch_compile"] = False
    rounder = AutoRound(
        arguments.model,
        bits=arguments.bits,
        group_size=arguments.group_size,
        sym=True,
        nsamples=len(windows),
        seqlen=len(windows[0]),
        dataset=[tokens(ids) for ids in windows],  # bare ids: it masks the padding token
        **options,
    )
    out = Path(arguments.out)
    rounder.quantize_and_save(output_dir=str(out), format="auto_gptq")
    if not (out / "config.json").is_file():  # it may write into a folder of its own inside
        (inner,) = [path.parent for path in out.glob("*/config.json")]
        for path in inner.iterdir():
            path.rename(out / path.name)
        inner.rmdir()


TOOLS = {"llm-compressor": llm_compressor, "gptqmodel": gptqmodel, "auto-round": auto_round}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("--windows", required=True, help="JSON: lists of token ids")
    parser.add_argument("--bits", type=int, choices=(2, 3, 4, 8), default=4)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--iterations", type=int, help="of AutoRound; default: its own")
    parser.add_argument("--no-compile", action="store_true", help="AutoRound without torch.compile")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    windows = json.loads(Path(arguments.windows).read_text())
    TOOLS[arguments.tool](arguments, windows)


if __name__ == "__main__":
    main()
