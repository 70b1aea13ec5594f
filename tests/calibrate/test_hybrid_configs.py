"""Hybrid models in vLLM: its rules, applied to our configs, find the right float layers.

Its rules, of 0.33.0: gptq_utils.py get_dynamic_override and is_layer_gptq_quantized, quant_utils.py
is_layer_skipped, compressed_tensors/utils.py should_ignore_layer. They know a layer by the name of
the matrix that its members are loaded into, and refuse members that differ.
"""

import json
import re

import pytest

from calibrate.pipeline import quantize_checkpoint
from formats.checkpoint import CheckpointReader
from formats.inspection.inspect import inspect_checkpoint
from formats.quant_config import BLOCK
from formats.scheme import Scheme

NET = "model.layers.0.linear_attn"
# packed_modules_mapping of models/qwen3_next.py and qwen3_5.py
MEMBERS = {
    "qwen3_next": {"in_proj_qkvz": ["in_proj_qkvz"], "in_proj_ba": ["in_proj_ba"]},
    "qwen3_5": {
        "in_proj_qkvz": ["in_proj_qkv", "in_proj_z"],
        "in_proj_ba": ["in_proj_b", "in_proj_a"],
    },
}


def is_gptq_float(block, stored, fused, members):
    for pattern in block["dynamic"]:
        if pattern.startswith("-:") and re.match(pattern[2:], fused):
            return True
    (quantized,) = {any(name in member for name in stored) for member in members}
    return not quantized


def is_awq_float(block, stored, fused, members):
    ignored = block["modules_to_not_convert"]
    if any(name in fused for name in ignored):
        return True
    (skipped,) = {any(name in member for name in ignored) for member in members}
    return skipped


def is_compressed_float(block, stored, fused, members):
    def is_ignored(name):
        return any(
            re.match(each[3:], name) if each.startswith("re:") else each == name
            for each in block["ignore"]
        )

    (ignored,) = {is_ignored(member) for member in members}
    return ignored


CASES = {
    "gptq": ("w4a16-sym-g32", is_gptq_float),
    "awq": ("w4a16-asym-g32", is_awq_float),
    "compressed-tensors": ("w8a8", is_compressed_float),
}


@pytest.mark.parametrize("method", CASES)
@pytest.mark.parametrize("family", MEMBERS)
def test_vllm_reads_float_linears_from_config(tiny_model, tmp_path, family, method):
    scheme, is_float = CASES[method]
    target = tmp_path / "out"
    quantize_checkpoint(
        tiny_model(family),
        target,
        scheme=Scheme.parse(scheme),
        recipe="rtn",
        output_format=method,
        progress=False,
    )
    block = json.loads((target / "config.json").read_text())[BLOCK]
    entries = CheckpointReader(target).entries.items()
    coded = (name for name, entry in entries if not entry.dtype.is_floating_point)
    stored = {name.rpartition(".")[0] for name in coded}
    for fused, members in MEMBERS[family].items():
        members = [f"{NET}.{member}" for member in members]
        assert is_float(block, stored, f"{NET}.{fused}", members) == (fused == "in_proj_ba")
    assert not is_float(block, stored, f"{NET}.out_proj", [f"{NET}.out_proj"])
    verdict = next(each for each in inspect_checkpoint(target).loads_in if each.program == "vLLM")
    assert verdict.answer == "yes" and "gated delta nets; not run here" in verdict.reason
