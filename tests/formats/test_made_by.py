"""Small checkpoints that other tools wrote (made_by/make.py) are read as those tools read them."""

import json

import pytest
import torch

from formats.checkpoint import CheckpointReader
from formats.convert import convert_checkpoint
from formats.errors import InputError
from formats.inspection.inspect import inspect_checkpoint
from formats.layouts import decode_dense, layout_of, quantized_modules, tensor_names
from formats.quant_config import QuantConfig, find_block
from tests.formats.inspection.findings import of_weights
from tests.formats.made_by.expected import FOLDERS, expected_digests
from tests.formats.made_by.makers.digest import digest

ALL = ("gptq", "awq", "compressed-tensors")
INTEGERS = ("gptq", "compressed-tensors")
CT = ("compressed-tensors",)
# folder -> formats that hold its weights and the rounding of its inputs
CONVERTED = {
    "auto-round-fp8-static": CT,
    "auto-round-awq": ALL,
    "auto-round-gptq": ALL,
    "auto-round-llmcompressor-fp8": CT,
    "auto-round-llmcompressor-w4a16": ALL,
    "auto-round-llmcompressor-w8a8": INTEGERS,
    "auto-round-mixed": INTEGERS,
    "auto-round-qwen3-moe-w4": ALL,
    "auto-round-w2": INTEGERS,
    "auto-round-w3": INTEGERS,
    "auto-round-w4": ALL,
    "auto-round-w4-asym": ALL,
    "auto-round-w8": INTEGERS,
    "auto-round-zeros-as-they-are": ALL,
    "autoawq-w4": ALL,
    "bitsandbytes-int8": INTEGERS,
    "gptqmodel-mixtral-w4": ALL,
    "gptqmodel-qwen3-moe-w4": ALL,
    "gptqmodel-w3": INTEGERS,
    "gptqmodel-w4": ALL,
    "gptqmodel-w4-asym": ALL,
    "gptqmodel-w8-asym": INTEGERS,
    "llmcompressor-fp8": CT,
    "llmcompressor-fp8-block": CT,
    "llmcompressor-fp8-kv": CT,
    "llmcompressor-fp8-static": CT,
    "llmcompressor-mixed": CT,
    "llmcompressor-mixtral-fp8": CT,
    "llmcompressor-mixtral-w4a16": ALL,
    "llmcompressor-mxfp4a16": CT,
    "llmcompressor-mxfp8a16": CT,
    "llmcompressor-nvfp4a16": CT,
    "llmcompressor-qwen3-5-moe-w4a16": ALL,
    "llmcompressor-qwen3-moe-w4a16": ALL,
    "llmcompressor-w4a16": ALL,
    "llmcompressor-w4a16-asym": ALL,
    "llmcompressor-w4a8": CT,
    "llmcompressor-w4a8-packed": CT,
    "llmcompressor-w4afp8": CT,
    "llmcompressor-w8a16": INTEGERS,
    "llmcompressor-w8a8": INTEGERS,
    "llmcompressor-w8a8-static": CT,
    "modelopt-fp8": CT,
    "quark-fp8": CT,
    "torchao-fp8": CT,
    "torchao-int4": ALL,
    "torchao-int8": INTEGERS,
}
# folder -> linears that the tool was asked to leave in float
IN_FLOAT = {"auto-round-mixed": 1}
# act-order, and zero points in GPTQ's layout: the doctor says so
REFUSED_BY_VLLM = (
    *("auto-round-zeros-as-they-are", "gptqmodel-act-order"),
    *("gptqmodel-w4-asym", "gptqmodel-w8-asym"),
)
each_folder = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def count_linears(config):
    """4 of attention, and 3 of the feed-forward or of each expert, in the only layer."""
    experts = config.get("num_experts", config.get("num_local_experts", 1))
    return 4 + 3 * (experts + ("shared_expert_intermediate_size" in config))


def check_weights(folder, golden):
    """Compare every linear of `folder` with what the tool sees in `golden`; count the quantized."""
    reader = CheckpointReader(folder)
    config = QuantConfig.from_dict(find_block(folder, reader.config))
    expected = expected_digests(golden)
    made = json.loads((golden / "made.json").read_text())
    dtype = getattr(torch, made.get("dtype", "float32"))  # of the tool's own arithmetic
    modules = quantized_modules(reader.entries)
    assert len(expected) == count_linears(reader.config) and {*modules} <= {*expected}
    for module in expected:
        if module not in modules:  # the tool left it in float
            found = reader.get(f"{module}.weight")
        else:
            names = tensor_names(module, layout_of(config), reader.entries)
            tensors = {field: reader.get(name) for field, name in names.items()}
            found = decode_dense(module, tensors, config).weight_NK
        assert digest(found.to(dtype)) == expected[module], module
    return len(modules)


@each_folder
def test_weights_equal_tool_weights(folder):
    quantized = check_weights(folder, folder)
    assert len(expected_digests(folder)) - quantized == IN_FLOAT.get(folder.name, 0)


@each_folder
def test_inspect_finds_no_problems(folder):
    found = inspect_checkpoint(folder)
    remarked = folder.name in REFUSED_BY_VLLM
    assert [problem.severity for problem in of_weights(found)] == ["warning"] * remarked
    assert found.loads_in[0].answer in ("yes", "slow")


@each_folder
@pytest.mark.parametrize("target", ALL)
def test_conversion_preserves_weights_or_is_refused(folder, target, tmp_path):
    converted = tmp_path / "converted"
    if target in CONVERTED.get(folder.name, ()):
        convert_checkpoint(folder, converted, target)
        check_weights(converted, folder)
        assert inspect_checkpoint(converted).loads_in[0].answer in ("yes", "slow")
        return
    with pytest.raises(InputError) as caught:
        convert_checkpoint(folder, converted, target)
    assert "\n" not in str(caught.value) and not converted.exists()


def test_files_of_several_tools_are_tested():
    assert len({folder.name.rpartition("-")[0] for folder in FOLDERS}) >= 4
    assert {*CONVERTED} <= {folder.name for folder in FOLDERS}
