"""The scripts of examples/save_quantized write valid folders from files that others make."""

import ast
import runpy
import sys
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

from formats.checkpoint import CheckpointReader
from formats.inspection.inspect import inspect_checkpoint
from formats.numerics import affine
from formats.scheme import QuantSpec
from qkernels.quant_linear import QuantLinear

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples" / "save_quantized"


def run_example(name, *arguments):
    before, sys.argv = sys.argv, [name, *map(str, arguments)]
    try:
        runpy.run_path(str(EXAMPLES / name))
    finally:
        sys.argv = before


def example_input(name, docs_5m, tmp_path):
    """Write the file that an example reads in addition to the model."""
    reader = CheckpointReader(docs_5m)
    names = [n.removesuffix(".weight") for n in reader.entries if n.endswith("_proj.weight")]
    spec = QuantSpec(bits=4, symmetric=name != "numpy_codes.py")
    if name == "lora_corrected.py":
        rows, columns = reader.entries[f"{names[0]}.weight"].shape
        lora = {"A": torch.rand(4, columns) / 100, "B": torch.rand(rows, 4)}
        tensors = {f"{names[0]}.lora_{key}.weight": value for key, value in lora.items()}
        save_file(tensors, tmp_path / "input.safetensors")
        return tmp_path / "input.safetensors"
    arrays, state = {}, {}
    for module in names:
        weight = reader.get(f"{module}.weight").float()
        scales, zeros = affine.choose_scales(weight, spec, method="absmax")
        codes = affine.quantize(weight, scales, zeros, spec)
        arrays |= {f"{module}.codes": codes.numpy(), f"{module}.scales": scales.numpy()}
        arrays[f"{module}.zeros"] = zeros.numpy()
        if spec.symmetric:
            layer = QuantLinear.from_codes(codes, scales, scheme="w4a16-sym")
            state |= {f"{module}.{key}": value for key, value in layer.state_dict().items()}
    if name == "state_dict.py":
        save_file(state, tmp_path / "input.safetensors")
        return tmp_path / "input.safetensors"
    numpy.savez(tmp_path / "input.npz", **arrays)
    return tmp_path / "input.npz"


@pytest.mark.parametrize(
    "name", ["own_solver.py", "numpy_codes.py", "lora_corrected.py", "state_dict.py"]
)
def test_examples_write_valid_folders(name, docs_5m, tmp_path, capsys):
    inputs = [] if name == "own_solver.py" else [example_input(name, docs_5m, tmp_path)]
    run_example(name, docs_5m, *inputs, tmp_path / "out")
    found = inspect_checkpoint(tmp_path / "out")
    assert found.problems == () and len(found.linears) == 28
    assert {verdict.answer for verdict in found.loads_in} == {"yes"}
    assert "28 linears" in capsys.readouterr().out


def test_numpy_example_reads_the_arrays_of_own_solver(docs_5m, tmp_path):
    arrays = tmp_path / "codes.npz"
    run_example("own_solver.py", docs_5m, tmp_path / "first", arrays)
    run_example("numpy_codes.py", docs_5m, arrays, tmp_path / "second")
    first, second = (load_file(tmp_path / n / "model.safetensors") for n in ("first", "second"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_state_dict_example_reads_the_file_of_its_docstring(docs_5m, tmp_path, monkeypatch):
    lines = ast.get_docstring(ast.parse((EXAMPLES / "state_dict.py").read_text())).splitlines()
    code = "\n".join(line for line in lines if " = " in line or line.startswith("safetensors."))
    file = tmp_path / "layers.safetensors"
    code = code.replace("examples/models/docs-5m", str(docs_5m)).replace(file.name, str(file))
    exec(f"import qkernels, safetensors.torch, transformers\n{code}", {})
    run_example("state_dict.py", docs_5m, file, tmp_path / "out")
    assert len(inspect_checkpoint(tmp_path / "out").linears) == 28


@pytest.fixture(scope="module")
def odd_model(tmp_path_factory):
    """A model of 576 inputs, which groups of 128 do not divide."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 576, "intermediate_size": 192, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, vocab_size=32))
    folder = tmp_path_factory.mktemp("odd") / "model"
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["own_solver.py", "lora_corrected.py"])
def test_examples_accept_sizes_not_divisible_by_128(name, odd_model, tmp_path):
    inputs = [] if name == "own_solver.py" else [tmp_path / "none.safetensors"]
    if inputs:
        module = "model.layers.0.self_attn.o_proj"
        lora = {f"{module}.lora_{key}.weight": torch.zeros(576, 576) for key in "AB"}
        save_file(lora, inputs[0])
    run_example(name, odd_model, *inputs, tmp_path / "out")
    found = inspect_checkpoint(tmp_path / "out")
    assert found.scheme == "w4a16-sym-g64"
    assert all(verdict.answer in ("yes", "slow") for verdict in found.loads_in)


def test_lora_example_accepts_peft_names_and_factors(odd_model, tmp_path):
    module, generator = "model.layers.0.self_attn.o_proj", torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator) / 8 for shape in ((4, 576), (576, 4)))
    file, prefix = tmp_path / "adapter_model.safetensors", f"base_model.model.{module}.lora_"
    save_file({f"{prefix}A.weight": a, f"{prefix}B.weight": b}, file)
    run_example("lora_corrected.py", odd_model, file, tmp_path / "out", 2)
    corrected = CheckpointReader(odd_model).get(f"{module}.weight").float() + 2 * (b @ a)
    right = QuantLinear.from_float(corrected, "w4a16-sym-g64").packed()
    written = CheckpointReader(tmp_path / "out").get(f"{module}.weight_packed")
    assert torch.equal(written, right.words_NW)


def test_lora_example_refuses_unused_adapter(odd_model, tmp_path):
    save_file({"layers.0.self_attn.o_proj.lora_A.weight": torch.ones(4, 576)}, tmp_path / "lora")
    with pytest.raises(SystemExit, match="layers.0.self_attn.o_proj.lora_A.weight is no lora_A or"):
        run_example("lora_corrected.py", odd_model, tmp_path / "lora", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_state_dict_example_keeps_corrected_biases(tiny_model, tmp_path):
    source, module = tiny_model("qwen2"), "model.layers.0.self_attn.q_proj"
    state = {}
    for name in ("q_proj", "k_proj", "v_proj"):
        own = f"model.layers.0.self_attn.{name}"
        weight = CheckpointReader(source).get(f"{own}.weight")
        bias = torch.arange(float(len(weight)))
        layer = QuantLinear.from_float(weight, "w4a16-sym-g32", bias=bias)
        state |= {f"{own}.{key}": value for key, value in layer.state_dict().items()}
    save_file(state, tmp_path / "layers.safetensors")
    run_example("state_dict.py", source, tmp_path / "layers.safetensors", tmp_path / "out")
    written = CheckpointReader(tmp_path / "out").get(f"{module}.bias")
    assert torch.equal(written.float(), torch.arange(float(len(written))))
