"""Linears of a GGUF file that stay in their blocks: loaded, inspected, and as exact as floats."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from formats.checkpoint import CheckpointReader
from formats.compatibility.rules import OURS
from formats.families import FAMILIES
from formats.gguf.block_types import BY_NAME
from formats.gguf.container import StoredTensor, read_gguf
from formats.gguf.entries import schemes_of
from formats.gguf.names import Presented
from formats.inspection.inspect import inspect_checkpoint
from qkernels import QuantLinear
from qserve.cli import main
from qserve.commands.check_invariance import InvarianceConfig, compare
from qserve.config import EngineConfig
from qserve.llm import LLM

IDS = list(range(5, 45))
TYPES = {"Q4_K": 17, "Q6_K": 4, "Q5_K": 3, "Q4_1": 3, "Q5_1": 1}  # of the file's 28 linears


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The folders that are made for GGUF files are below this home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="module")
def file(home, docs_5m, tmp_path_factory) -> Path:
    """The bundled model in Q4_K_M, with some linears of each other type that stays in blocks."""
    path = tmp_path_factory.mktemp("packed") / "mix.gguf"
    flags = ["--scheme", "q4_k_m", "--recipe", "rtn", "--quality-windows", "0"]
    for pattern, name in (
        ("layers.0.mlp", "q5_k"),
        ("layers.1.mlp", "q4_1"),
        ("layers.1.self_attn.q_proj", "q5_1"),
    ):
        flags += ["--override", f"{pattern}={name}"]
    assert main(["quantize", str(docs_5m), "-o", str(path), *flags]) == 0
    names = [each.type.name for name, each in read_gguf(path).tensors.items() if "blk" in name]
    assert {kind: n for kind, n in Counter(names).items() if kind != "F32"} == TYPES
    return path


def logits(model: Path, dtype: str) -> torch.Tensor:
    return LLM(str(model), device="cpu", max_model_len=128, dtype=dtype).logits(IDS).float()


def test_packed_blocks_equal_file_bytes(file):
    reader, stored = CheckpointReader(file), read_gguf(file).tensors
    data = file.read_bytes()
    name = "model.layers.2.mlp.down_proj"
    assert f"{name}.weight" not in reader.entries
    at = stored["blk.2.ffn_down.weight"]
    found = reader.get(f"{name}.weight_blocks")
    assert found.numpy().tobytes() == data[at.offset : at.offset + at.num_bytes]
    assert reader.entries[f"{name}.weight_blocks"].num_bytes == at.num_bytes
    floats = CheckpointReader(file, in_blocks=False)
    assert f"{name}.weight" in floats and f"{name}.weight_blocks" not in floats


@pytest.fixture(scope="module")
def dequantized(file, docs_5m, tmp_path_factory) -> Path:
    """Write the model of a GGUF file in float32, and return its folder."""
    folder = tmp_path_factory.mktemp("floats") / "model"
    shutil.copytree(docs_5m, folder)
    reader = CheckpointReader(file, as_floats=True)
    tensors = {name: reader.get(name).contiguous() for name in reader.entries}
    for each in folder.glob("*.safetensors*"):
        each.unlink()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_logits_equal_dequantized_weights(file, dequantized, dtype, most):
    """In bfloat16 4-bit codes stay packed on a CPU, with scales and minima in bfloat16."""
    want, found = logits(dequantized, dtype), logits(file, dtype)
    assert float((found - want).norm() / want.norm()) < most


def test_inspect_and_log_name_packed_types(file):
    inspection = inspect_checkpoint(file)
    assert not [each for each in inspection.problems if each.severity == "error"]
    schemes = Counter(linear.scheme for linear in inspection.linears)
    assert schemes == {kind.lower(): number for kind, number in TYPES.items()}
    ours = [each for each in inspection.loads_in if each.program == OURS]
    assert [each.answer for each in ours] == ["yes"], ours
    assert inspection.bits_per_weight < 5.6
    summary = CheckpointReader(file).gguf_summary
    for kind, number in TYPES.items():
        assert f"{number} {kind} run packed" in summary
    assert "dequantized" not in summary


def test_batch_invariance_covers_every_block_type(file):
    """5- and 6-bit types, too, whose kernels `--kernel` names w8a16."""
    llm = LLM(str(file), device="cpu", max_model_len=128, batch_invariant=True)
    layers = [m for m in llm.engine.runner.decoder.modules() if isinstance(m, QuantLinear)]
    kernels = {layer.prepared_weight.kernel for layer in layers}
    assert kernels == {"fixed_order"}


@pytest.mark.exhaustive
def test_requests_have_the_same_bits_in_any_batch(file):
    engine = EngineConfig(model=str(file), device="cpu", max_model_len=96, batch_invariant=True)
    config = InvarianceConfig(num_requests=6, max_input_len=60, output_len=6)
    assert [each for each in compare(engine, config) if each.bits_differ] == []


@pytest.mark.parametrize(
    ("kind", "name", "outputs", "scheme"),
    [
        ("Q4_K", "model.layers.0.self_attn.q_proj", 64, "q4_k"),
        ("Q4_K", "model.layers.0.block_sparse_moe.experts.3.w1", 64, "q4_k"),
        ("Q8_0", "model.layers.0.block_sparse_moe.experts.3.w1", 64, "w8a16-sym-g32"),
        ("Q6_K", "lm_head", 72, "q6_k"),
        ("Q6_K", "model.layers.0.self_attn.q_proj", 70, "None"),
    ],
)
def test_blocks_without_kernel_are_dequantized(kind, name, outputs, scheme):
    """Kernels take outputs divisible by 8."""
    shape = (outputs, 256)
    stored = StoredTensor(name="t", type=BY_NAME[kind], shape=shape, file=Path("m"), offset=0)
    found = {f"{name}.weight": Presented(name=f"{name}.weight", stored=stored, shape=shape)}
    assert str(schemes_of(found, FAMILIES["MixtralForCausalLM"])[name]) == scheme


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="runs the kernels of a GPU")
def test_gpu_logits_equal_dequantized_weights(file, dequantized):
    found, want = (
        LLM(str(model), device="cuda", max_model_len=128, dtype="bfloat16").logits(IDS).float()
        for model in (file, dequantized)
    )
    assert float((found - want).norm() / want.norm()) < 2e-2
