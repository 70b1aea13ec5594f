"""Small checkpoints that other tools wrote (made_by/make.py) are read as those tools read them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from formats.checkpoint import CheckpointReader
from formats.inspection.inspect import inspect_checkpoint
from formats.layouts import decode_dense, layout_of, quantized_modules, tensor_names
from formats.quant_config import QuantConfig, find_block
from tests.formats.inspection.findings import of_weights
from tests.formats.made_by.makers.digest import digest

FOLDERS = sorted(path.parent for path in (Path(__file__).parent / "made_by").glob("*/made.json"))


def expected_of(folder):
    """A digest of each linear's weight; some folders hold the weights."""
    if (folder / "expected.json").exists():
        return json.loads((folder / "expected.json").read_text())
    return {name: digest(t) for name, t in load_file(folder / "expected.tensors").items()}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_weight_is_the_one_its_tool_sees(folder):
    reader = CheckpointReader(folder)
    config = QuantConfig.from_dict(find_block(folder, reader.config))
    expected = expected_of(folder)
    made = json.loads((folder / "made.json").read_text())
    dtype = getattr(torch, made.get("dtype", "float32"))  # of the tool's own arithmetic
    modules = quantized_modules(reader.entries)
    assert sorted(modules) == sorted(expected) and len(modules) == 7
    for module in modules:
        names = tensor_names(module, layout_of(config), reader.entries)
        tensors = {field: reader.get(name) for field, name in names.items()}
        found = decode_dense(module, tensors, config).weight_NK
        assert digest(found.to(dtype)) == expected[module], module


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_doctor_finds_nothing_wrong(folder):
    found = inspect_checkpoint(folder)
    options = json.loads((folder / "made.json").read_text())["options"]
    # what vLLM refuses, and says so
    remarked = options.get("desc_act", False) or options.get("sym") is False
    assert [problem.severity for problem in of_weights(found)] == ["warning"] * remarked
    assert found.loads_in[0].answer in ("yes", "slow")


def test_there_are_files_of_several_tools():
    assert len({folder.name.rpartition("-")[0] for folder in FOLDERS}) >= 4
