"""Write small checkpoints with other tools, each with the weights that its tool reads from it.

    python tests/formats/made_by/make.py FOLDER... [--folder tests/formats/made_by]

Each tool needs its own environment; made.json has the versions that wrote the committed
folders. Everything is random but seeded: a model has one layer of few features. Tables of folders
are in makers/, one file per tool.
"""

import argparse
import importlib.metadata
import json
import shutil
import tempfile
from pathlib import Path

import torch
from makers import (
    autoawq,
    autoround,
    bitsandbytes,
    gptqmodel,
    hqq,
    llmcompressor,
    modelopt,
    quark,
    torchao,
)
from makers.digest import digest
from makers.float_models import float_model
from makers.golden import Golden, Weights
from makers.linears import folder_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
KEPT = ("config.json", "quantize_config.json", "hf_quant_config.json")
MAKERS = (
    *(gptqmodel, llmcompressor, autoround, modelopt, quark, autoawq, bitsandbytes),
    *(torchao, hqq),
)
FOLDERS: dict[str, Golden] = {name: row for maker in MAKERS for name, row in maker.FOLDERS.items()}


def make(name: str, folder: Path) -> None:
    """One folder: the files that readers need, the expected weights, who made them."""
    golden, target = FOLDERS[name], folder / name
    with tempfile.TemporaryDirectory() as work:
        source, made = Path(work) / "float", Path(work) / "made"
        float_model(source, golden.model)
        expected = golden.write(source, made, **golden.options)
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        copy_files(folder_of(made), target, golden)
    write_expected(target, expected, golden)
    # the arithmetic of some tools rounds more coarsely than ours
    dtypes = {str(t.dtype).removeprefix("torch.") for t in expected.values()}
    dtype = {"dtype": "bfloat16"} if dtypes == {"bfloat16"} else {}
    distributions = (golden.distribution, *golden.also, "torch", "transformers")
    versions = {name: importlib.metadata.version(name) for name in distributions}
    text = json.dumps({"versions": versions, "options": golden.options, **dtype}, indent=1)
    (target / "made.json").write_text(text)


def copy_files(place: Path, target: Path, golden: Golden) -> None:
    """The weights in one file, and the configs."""
    tensors, metadata = {}, {}
    for file in place.glob("*.safetensors"):
        tensors |= load_file(file)
        with safe_open(file, framework="pt") as opened:
            metadata |= opened.metadata() or {}
    metadata = metadata if golden.metadata else {"format": "pt"}
    save_file(tensors, target / "model.safetensors", metadata=metadata)
    for file in KEPT:
        if (place / file).exists():
            shutil.copyfile(place / file, target / file)


def write_expected(target: Path, expected: Weights, golden: Golden) -> None:
    if golden.whole:
        halves = {n: t.to(torch.float16).contiguous() for n, t in expected.items()}
        save_file(halves, target / "expected.tensors")
    else:
        digests = {name: digest(weight_NK) for name, weight_NK in sorted(expected.items())}
        (target / "expected.json").write_text(json.dumps(digests, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", metavar="FOLDER", nargs="+", choices=[*FOLDERS, "all"])
    parser.add_argument("--folder", type=Path, default=HERE)
    arguments = parser.parse_args()
    for name in FOLDERS if "all" in arguments.names else arguments.names:
        make(name, arguments.folder)


if __name__ == "__main__":
    main()
