"""GGUF files of gpt-oss, whose checkpoints have the experts of a layer in one tensor per matrix."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from formats.checkpoint import CheckpointReader
from formats.codecs import mxfp4
from formats.errors import InputError
from formats.gguf.container import read_gguf
from formats.gguf.writing.export import export_gguf
from qserve.llm import LLM
from tests.conftest import make_tiny
from tests.formats.gguf.mixture_cases import GPT_OSS
from tests.tiny_families import TINY_FAMILIES

IDS = list(range(5, 45))
YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "truncate": False},
    "original_max_position_embeddings": 16,
}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Folders of GGUF files are made below this home."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def make(folder, different):
    family, usual, _ = GPT_OSS
    config_class, extra = TINY_FAMILIES[family]
    return make_tiny(folder, config_class, {**extra, **usual, **different})


def logits(path):
    return LLM(str(path), device="cpu", dtype="float32", max_model_len=64).logits(IDS)


@pytest.mark.parametrize("rope", [None, YARN], ids=["plain", "yarn"])
def test_file_logits_equal_source(tmp_path, rope):
    source = make(tmp_path / "source", {"rope_parameters": rope} if rope else {})
    file = tmp_path / "model.gguf"
    export_gguf(source, file)
    assert read_gguf(file).metadata["general.architecture"] == "gpt-oss"
    found, want = CheckpointReader(file), CheckpointReader(source)
    stacks = {}
    for name in want.entries:
        if ".experts." in name:
            stacks[name] = want.get(name).float()
        else:
            assert torch.equal(found.get(name).float(), want.get(name).float()), name
    assert len(stacks) == 8
    for name, stack in stacks.items():
        stem, leaf = name.split("gate_up_proj" if "gate_up" in name else "down_proj")
        for number, matrix in enumerate(stack):
            parts = {"down_proj": slice(None)}
            if "gate_up" in name:
                parts = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
            for part, outputs in parts.items():
                kind = "bias" if leaf else "weight"
                value = found.get(f"{stem}{number}.{part}.{kind}").float()
                assert torch.equal(value, (matrix if leaf else matrix.t())[outputs]), part
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        expected = model.eval()(torch.tensor([IDS])).logits[0]
    assert torch.allclose(logits(file), expected, atol=2e-3, rtol=0)


def test_mxfp4_expert_codes_are_unchanged(tmp_path):
    """Neighbours share a byte in the checkpoint, numbers 16 apart in the file."""
    source, file = make(tmp_path / "source", {}), tmp_path / "model.gguf"
    state = load_file(source / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    wanted = {}
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        E, K, N = state.pop(name).shape
        blocks = torch.randint(256, (E, N, K // 32, 16), generator=generator).to(torch.uint8)
        scales = torch.randint(121, 125, (E, N, K // 32), generator=generator).to(torch.uint8)
        state[f"{name}_blocks"], state[f"{name}_scales"] = blocks, scales
        wanted[name] = [mxfp4.decode(*each) for each in zip(blocks, scales, strict=True)]
    save_file(state, source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (source / "config.json").write_text(json.dumps(config))
    exported = export_gguf(source, file)
    assert exported.types["MXFP4"] == 6
    found = CheckpointReader(file, as_floats=True)
    for name, experts in wanted.items():
        stem = name.rpartition(".")[0]
        for number, weight in enumerate(experts):
            rows = weight.dequantize()
            if "gate_up" in name:
                parts = {"gate_proj": rows[0::2], "up_proj": rows[1::2]}
            else:
                parts = {"down_proj": rows}
            for part, want in parts.items():
                value = found.get(f"{stem}.{number}.{part}.weight")
                assert torch.equal(value.float(), want.float()), (name, number)
    assert torch.allclose(logits(file), logits(source), atol=2e-3, rtol=0)


@pytest.mark.parametrize(
    ("different", "words"),
    [
        ({"swiglu_limit": 0.5}, "swiglu_limit: is 0.5, but gpt_oss in GGUF has 7.0"),
        ({"attention_bias": False}, "attention_bias: is False, but gpt-oss in GGUF has True"),
        ({"rope_parameters": YARN | {"truncate": True}}, "truncate: expected false"),
    ],
)
def test_values_hard_coded_in_llama_cpp_are_enforced(tmp_path, different, words):
    source = make(tmp_path / "source", different)
    with pytest.raises(InputError, match=words):
        export_gguf(source, tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()
