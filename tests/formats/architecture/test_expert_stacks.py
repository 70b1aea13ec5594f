"""Quantized experts in one tensor per projection are read as a linear per expert, or refused."""

import pytest
import torch

from formats.checkpoint import CheckpointReader
from formats.errors import CheckpointError
from formats.inspection.inspect import inspect_checkpoint
from formats.quant_config import BLOCK
from tests.formats.inspection.findings import of_weights
from tests.qserve.model.test_expert_names import stacked
from tests.qserve.model.variants import edited, logits

FP8 = torch.float8_e4m3fn
SIZE = 8  # of a block
EXPERT = ".mlp.experts."


def coded(state):
    """Give each linear of an expert float8 codes and random scales of blocks."""
    torch.manual_seed(1)
    for name in [name for name in state if EXPERT in name and name.endswith(".weight")]:
        rows, columns = state[name].shape
        scales = torch.rand(rows // SIZE, columns // SIZE) * 0.01 + 0.001
        spread = scales.repeat_interleave(SIZE, 0).repeat_interleave(SIZE, 1)
        state[name] = (state[name].float() / spread).clamp(-448, 448).to(FP8)
        state[f"{name}_scale_inv"] = scales


def stack_codes(rest):
    """Stack codes and scales as transformers does; `rest` follows the name of the scales."""

    def change(state):
        coded(state)
        codes = {n: t.view(torch.uint8) for n, t in state.items() if n.endswith(".weight")}
        scales = {n[: -len("_scale_inv")]: t for n, t in state.items() if n.endswith("_scale_inv")}
        experts = {n: t for n, t in codes.items() if EXPERT in n}
        for name in [name for name in state if EXPERT in name]:
            del state[name]
        for tensors, end, dtype in ((experts, "", FP8), (scales, rest, torch.float32)):
            part = dict(tensors)
            stacked(part)
            state |= {f"{name}{end}": tensor.view(dtype) for name, tensor in part.items()}

    return change


def block(size):
    def change(config):
        config[BLOCK] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [size, size],
            "modules_to_not_convert": ["lm_head", "self_attn", "mlp.gate"],
        }

    return change


def test_stacks_of_float8_are_the_linears_of_the_experts(tiny_model, tmp_path):
    source = tiny_model("qwen3_moe")
    want = edited(source, tmp_path / "apart", coded, block(SIZE))
    found = edited(source, tmp_path / "stacked", stack_codes("_scale_inv"), block(SIZE))
    apart, entries = CheckpointReader(want).entries, CheckpointReader(found).entries
    assert apart.keys() == entries.keys()
    for name, entry in apart.items():
        same = entry.read().view(torch.uint8) == entries[name].read().view(torch.uint8)
        assert entry.dtype == entries[name].dtype and bool(same.all()), name
    assert not of_weights(inspect_checkpoint(found))
    assert torch.equal(logits(found), logits(want))


@pytest.mark.parametrize(
    ("rest", "size", "words"),
    [
        ("_weight_scale_2", SIZE, "found torch.float8_e4m3fn"),
        ("_scale_inv", 24, "in blocks of 24"),
    ],
)
def test_stacks_that_are_not_read_are_one_error(tiny_model, tmp_path, rest, size, words):
    folder = edited(tiny_model("qwen3_moe"), tmp_path / "stacked", stack_codes(rest), block(size))
    with pytest.raises(CheckpointError) as error:
        CheckpointReader(folder)
    assert "mlp.experts." in error.value.subject and words in error.value.problem
    assert "quantize the float original" in error.value.remedy
    found = inspect_checkpoint(folder)
    assert error.value.problem in {problem.text for problem in found.problems}
    assert found.loads_in[0].answer == "no"


def test_stacks_of_other_codes_name_what_was_found(tiny_model, tmp_path):
    def change(state):
        stacked(state)
        for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
            if EXPERT in name:
                state[f"{name}_weight_scale"] = torch.ones(state[name].shape[:2])
                state[name] = state[name][..., ::2].to(torch.uint8)

    folder = edited(tiny_model("qwen3_moe"), tmp_path / "stacked", change, block(SIZE))
    with pytest.raises(CheckpointError, match=r"torch.uint8 \[.*_proj_weight_scale"):
        CheckpointReader(folder)
