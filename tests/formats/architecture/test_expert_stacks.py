"""Quantized experts in one tensor per projection are read as a linear per expert, or refused."""

import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from calibrate.pipeline import quantize_checkpoint
from formats.checkpoint import CheckpointReader
from formats.errors import CheckpointError
from formats.inspection.inspect import inspect_checkpoint
from formats.quant_config import BLOCK
from formats.scheme import Scheme
from tests.formats.inspection.findings import of_weights
from tests.qserve.model.test_expert_names import stacked
from tests.qserve.model.variants import edited, logits, relative
from tests.tiny_vision import write_tiny_vision

FP8 = torch.float8_e4m3fn
SIZE = 8  # of a block
EXPERT = ".mlp.experts."
LEAVES = ("gate_proj", "up_proj", "down_proj")


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


def test_float8_expert_stacks_read_as_per_expert_linears(tiny_model, tmp_path):
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


def of_step(state, change):
    """`change` of three stacks of a layer, each of one linear, with the names of Qwen's experts."""
    apart = {}
    for name in [name for name in state if re.search(r"\.moe\.\w+_proj\.weight", name)]:
        for expert, tensor in enumerate(state.pop(name)):
            own = name.replace(".moe.", f".moe{EXPERT.removeprefix('.mlp')}{expert}.")
            apart[own.replace(".moe.", ".mlp.")] = tensor.clone()
    change(apart)
    return apart


def step_apart(state):
    """Float8 codes and scales of blocks of each expert's linears."""
    found = of_step(state, coded)
    state |= {name.replace(".mlp.", ".moe."): tensor for name, tensor in found.items()}


def step_stacked(leave_out=""):
    """Float8 codes and scales of blocks in three stacks, as Step-3.5-Flash-FP8 has them."""

    def change(state):
        found, stacks = of_step(state, coded), {}
        for name, tensor in found.items():
            stack = re.sub(r"\.mlp\.experts\.\d+\.", ".moe.", name)
            stacks.setdefault(stack, []).append(tensor.view(torch.uint8))
        for name, tensors in stacks.items():
            dtype = torch.float32 if name.endswith("_scale_inv") else FP8
            if not (leave_out and name.endswith(leave_out)):
                state[name] = torch.stack(tensors).view(dtype)

    return change


def step_block(config):
    block(SIZE)(config)
    config[BLOCK]["modules_to_not_convert"] += ["moe.gate", "share_expert", "layers.0.mlp"]


def test_three_float8_expert_stacks_read_as_per_expert_linears(tiny_model, tmp_path):
    source = tiny_model("step")
    want = edited(source, tmp_path / "apart", step_apart, step_block)
    found = edited(source, tmp_path / "stacked", step_stacked(), step_block)
    assert "model.layers.1.moe.up_proj.weight_scale_inv" in load_file(found / "model.safetensors")
    same_linears(found, want, read_elsewhere=True)
    assert relative(logits(found), logits(source)) < 0.2


def test_float8_stack_without_scales_is_refused(tiny_model, tmp_path):
    source = tiny_model("step")
    change = step_stacked(leave_out="up_proj.weight_scale_inv")
    folder = edited(source, tmp_path / "stacked", change, step_block)
    with pytest.raises(CheckpointError, match=r"found .*up_proj\.weight torch\.float8"):
        CheckpointReader(folder)


@pytest.mark.parametrize(
    ("rest", "size", "words"),
    [
        ("_weight_scale_2", SIZE, "found torch.float8_e4m3fn"),
        ("_scale_inv", 24, "in blocks of 24"),
    ],
)
def test_unsupported_stacks_raise_one_error(tiny_model, tmp_path, rest, size, words):
    folder = edited(tiny_model("qwen3_moe"), tmp_path / "stacked", stack_codes(rest), block(size))
    with pytest.raises(CheckpointError) as error:
        CheckpointReader(folder)
    assert "mlp.experts." in error.value.subject and words in error.value.problem
    assert "quantize the float model" in error.value.remedy
    found = inspect_checkpoint(folder)
    assert error.value.problem in {problem.text for problem in found.problems}
    assert found.loads_in[0].answer == "no"


def test_unsupported_stack_error_names_found_tensors(tiny_model, tmp_path):
    def change(state):
        stacked(state)
        for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
            if EXPERT in name:
                state[f"{name}_weight_scale"] = torch.ones(state[name].shape[:2])
                state[name] = state[name][..., ::2].to(torch.uint8)

    folder = edited(tiny_model("qwen3_moe"), tmp_path / "stacked", change, block(SIZE))
    with pytest.raises(CheckpointError, match=r"torch.uint8 \[.*_proj_weight_scale"):
        CheckpointReader(folder)


def quantized(source, folder, scheme):
    """The tiny mixture rounded in compressed-tensors, a linear per expert."""
    quantize_checkpoint(
        source,
        folder,
        scheme=Scheme.parse(scheme),
        output_format="compressed-tensors",
        quality_windows=0,
        progress=False,
    )
    return folder


def stack_fields(ends):
    """Stack every field of experts' linears; `ends`: what follows the stack's name, by field."""

    def change(state):
        for stem in {name.split(EXPERT)[0] for name in state if EXPERT in name}:
            for stack, leaves in (("gate_up_proj", LEAVES[:2]), ("down_proj", LEAVES[2:])):
                for field, end in ends.items():
                    found = popped(state, f"{stem}{EXPERT}", leaves, field)
                    if found is not None:
                        state[f"{stem}{EXPERT}{stack}{end}"] = found

    return change


def popped(state, stem, leaves, field):
    """One field of all experts, removed from `state`: [E, ...]; None: there is none."""
    experts, dtype = [], None
    while f"{stem}{len(experts)}.{leaves[0]}.{field}" in state:
        parts = [state.pop(f"{stem}{len(experts)}.{leaf}.{field}") for leaf in leaves]
        dtype = parts[0].dtype
        experts.append(torch.cat([part.view(torch.uint8) for part in parts]))
    return torch.stack(experts).view(dtype) if experts else None


COMPRESSED = ("weight_packed", "weight_scale", "weight_zero_point", "weight_global_scale")
COMPRESSED_ENDS = {
    "module": {field: f".{field}" for field in (*COMPRESSED, "weight_shape")},
    "parameter": {field: field.removeprefix("weight") for field in (*COMPRESSED, "weight_shape")},
}


@pytest.mark.parametrize("ends", COMPRESSED_ENDS)
@pytest.mark.parametrize("scheme", ["w4a16-sym-g32", "w4a16-asym-g32", "w4a16-nvfp4"])
def test_compressed_tensors_expert_stacks_read_as_per_expert_linears(
    tiny_model, tmp_path, scheme, ends
):
    """Names as llm-compressor repacks experts, and as compressed-tensors names a parameter's."""
    want = quantized(tiny_model("qwen3_moe"), tmp_path / "apart", scheme)
    found = edited(want, tmp_path / "stacked", stack_fields(COMPRESSED_ENDS[ends]))
    same_linears(found, want)


def as_modelopt(state):
    """NVFP4 as NVIDIA's tool names it: a factor instead of a divisor."""
    for name in [name for name in state if name.endswith(".weight_packed")]:
        state[name.removesuffix("_packed")] = state.pop(name)
    for name in [name for name in state if name.endswith(".weight_global_scale")]:
        factor = name.replace("weight_global_scale", "weight_scale_2")
        state[factor] = (1 / state.pop(name)).reshape(())


def modelopt_block(config):
    config[BLOCK] = {
        **{"quant_method": "modelopt", "quant_algo": "NVFP4"},
        "config_groups": {
            "group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}
        },
        "ignore": ["lm_head", "model.layers.*.mlp.gate"],
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("numbers", ["experts", "one"])
def test_modelopt_nvfp4_expert_stacks_read_as_per_expert_linears(tiny_model, tmp_path, numbers):
    """With a factor for each expert, and with one for all."""

    def alike(state):
        as_modelopt(state)
        for name in [name for name in state if EXPERT in name and name.endswith("weight_scale_2")]:
            expert = name.split(EXPERT)[1].split(".")[0]
            state[name] = torch.tensor(0.001 * (1 + int(expert) * (numbers == "experts")))

    def stack(state):
        alike(state)
        factors = {n: state.pop(n) for n in list(state) if EXPERT in n and "weight_scale_2" in n}
        stack_fields({"weight": "", "weight_scale": "_weight_scale"})(state)
        for stem in {name.split(EXPERT)[0] for name in factors}:
            own = [factors[f"{stem}{EXPERT}{e}.down_proj.weight_scale_2"] for e in range(6)]
            for name in ("gate_up_proj", "down_proj"):
                found = torch.stack(own) if numbers == "experts" else own[0].clone()
                state[f"{stem}{EXPERT}{name}_weight_scale_2"] = found

    source = quantized(tiny_model("qwen3_moe"), tmp_path / "source", "w4a16-nvfp4")
    want = edited(source, tmp_path / "apart", alike, modelopt_block)
    same_linears(edited(source, tmp_path / "stacked", stack, modelopt_block), want)


def same_linears(found, want, *, read_elsewhere=False):
    """Each linear decodes to the same weight, and the models compute the same."""
    apart, entries = CheckpointReader(want).entries, CheckpointReader(found).entries
    assert {name for name in apart if not name.endswith("weight_shape")} <= entries.keys()
    for name, entry in entries.items():
        assert torch.equal(
            entry.read().reshape(-1).view(torch.uint8),
            apart[name].read().reshape(-1).view(torch.uint8),
        ), name
    inspection = inspect_checkpoint(found)
    assert not of_weights(inspection)
    ours, *others = (verdict.answer for verdict in inspection.loads_in)
    assert ours in ("yes", "slow")
    assert read_elsewhere == bool({"yes", "slow"}.intersection(others))
    assert torch.equal(logits(found), logits(want))


def test_transposed_expert_stack_raises_one_error(tiny_model, tmp_path):
    """As Model Optimizer writes experts of Llama 4 and gpt-oss."""

    def change(state):
        as_modelopt(state)
        stack_fields({"weight": "", "weight_scale": "_weight_scale"})(state)
        for name in [name for name in state if name.endswith(("_proj", "_proj_weight_scale"))]:
            state[name] = state[name].view(torch.uint8).transpose(1, 2).contiguous()

    source = quantized(tiny_model("qwen3_moe"), tmp_path / "source", "w4a16-nvfp4")
    folder = edited(source, tmp_path / "stacked", change, modelopt_block)
    with pytest.raises(CheckpointError, match=r"expected a linear per expert, or codes .*uint8"):
        CheckpointReader(folder)


def test_stack_named_by_config_is_read(tiny_model, tmp_path):
    """Patterns for `experts.gate_up_proj` mean the linears of its experts."""
    want = quantized(tiny_model("qwen3_moe"), tmp_path / "apart", "w4a16-sym-g32")

    def targets(config):
        (group,) = config[BLOCK]["config_groups"].values()
        stacks = [rf"re:.*\.experts\.{stack}$" for stack in ("gate_up_proj", "down_proj")]
        group["targets"] = ["re:.*self_attn.*", *stacks]

    ends = COMPRESSED_ENDS["module"]
    same_linears(edited(want, tmp_path / "stacked", stack_fields(ends), targets), want)


def test_qwen3_vl_moe_float_stacks_are_read_in_either_axis_order(tmp_path):
    """transformers writes [E, N, K]; published files have [E, K, N], which it also reads."""
    source = write_tiny_vision(tmp_path / "source", "qwen3_vl_moe")
    target = tmp_path / "published"
    shutil.copytree(source, target)
    state = load_file(target / "model.safetensors")
    stacks = [name for name in state if ".experts." in name]
    state |= {name: state[name].transpose(1, 2).contiguous() for name in stacks}
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForImageTextToText.from_pretrained(target, dtype=torch.float32)
    wanted = model.model.language_model.layers[1].mlp.experts
    for folder in (source, target):
        reader = CheckpointReader(folder)
        gate, up, down = (
            reader.get(f"model.layers.1.mlp.experts.3.{leaf}.weight") for leaf in LEAVES
        )
        assert torch.equal(torch.cat([gate, up]), wanted.gate_up_proj[3])
        assert torch.equal(down, wanted.down_proj[3])


def test_qwen3_vl_moe_quantized_stacks_are_refused(tmp_path):
    folder = write_tiny_vision(tmp_path / "model", "qwen3_vl_moe")
    state = load_file(folder / "model.safetensors")
    state |= {name: state[name].to(FP8) for name in state if ".experts." in name}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="tensor of unknown dimension order"):
        CheckpointReader(folder)
