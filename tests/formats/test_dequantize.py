"""Quantized checkpoints as floats: each tool's own numbers, in a folder that transformers loads."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from calibrate.pipeline import quantize_checkpoint
from formats import float_view
from formats.checkpoint import SINGLE, CheckpointReader
from formats.dequantize import dequantize_checkpoint
from formats.errors import CheckpointError, DiskError, InputError
from formats.files import target as target_module
from formats.quant_config import BLOCK
from formats.scheme import Scheme
from tests.formats.made_by.expected import FOLDERS, expected_digests
from tests.formats.made_by.makers.digest import digest
from tests.qserve.model.variants import TOKENS, logits, relative
from tests.tiny_families import STACKED_EXPERTS
from tests.tiny_vision import write_tiny_vision

each_folder = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def floats_of(folder, target, **options):
    dequantize_checkpoint(folder, target, **options)
    return CheckpointReader(target)


@each_folder
def test_weights_are_those_that_the_tool_sees(folder, tmp_path):
    made = json.loads((folder / "made.json").read_text())
    dtype = getattr(torch, made.get("dtype", "float32"))
    reader = floats_of(folder, tmp_path / "floats", dtype="float32")
    expected = expected_digests(folder)
    for module, digested in expected.items():
        assert digest(reader.get(f"{module}.weight").to(dtype)) == digested, module
    others = {name for name in reader.entries if name.rpartition(".")[0] not in expected}
    assert not [name for name in others if "scale" in name or "zero" in name or "qweight" in name]
    assert all(entry.dtype == torch.float32 for entry in reader.entries.values())
    assert BLOCK not in reader.config and reader.config["dtype"] == "float32"


@pytest.mark.exhaustive
@each_folder
def test_transformers_loads_every_tensor(folder, tmp_path):
    from transformers import AutoModelForCausalLM

    floats_of(folder, tmp_path / "floats")
    _, found = AutoModelForCausalLM.from_pretrained(
        tmp_path / "floats", dtype="auto", output_loading_info=True
    )
    assert not {key: names for key, names in found.items() if names}


@pytest.mark.exhaustive
def test_vision_part_is_kept(tmp_path):
    from transformers import AutoModelForImageTextToText

    source = write_tiny_vision(tmp_path / "source", "qwen3_vl")
    quantized, target = tmp_path / "quantized", tmp_path / "floats"
    quantize_checkpoint(
        source, quantized, scheme=Scheme.parse("w8a8-fp8"), recipe="rtn", progress=False
    )
    floats_of(quantized, target)
    assert BLOCK not in json.loads((target / "config.json").read_text())
    model, found = AutoModelForImageTextToText.from_pretrained(
        target, dtype="auto", output_loading_info=True
    )
    assert not {key: names for key, names in found.items() if names}
    kept, want = (CheckpointReader(each).other_parts for each in (target, source))
    assert kept.keys() == want.keys() and len(kept) > 10
    assert all(torch.equal(kept[name].read(), want[name].read()) for name in want)


@pytest.mark.parametrize(
    "name",
    [
        STACKED_EXPERTS[0],
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in STACKED_EXPERTS[1:]),
    ],
)
def test_transformers_loads_experts_that_were_quantized_one_by_one(name, tiny_model, tmp_path):
    from transformers import AutoModelForCausalLM

    source, quantized, target = tiny_model(name), tmp_path / "quantized", tmp_path / "floats"
    quantize_checkpoint(
        source,
        quantized,
        scheme=Scheme.parse("w8a16-sym-g32"),
        recipe="rtn",
        progress=False,
        quality_windows=0,
    )
    floats_of(quantized, target, dtype="float32")
    model, found = AutoModelForCausalLM.from_pretrained(
        target, dtype=torch.float32, output_loading_info=True
    )
    assert not {key: names for key, names in found.items() if names}
    with torch.no_grad():
        result = model.eval()(torch.tensor([TOKENS])).logits[0]
    assert relative(result, logits(quantized)) < 1e-4
    stored, decoded = load_file(source / "model.safetensors"), load_file(target / SINGLE)
    assert {n: t.shape for n, t in decoded.items()} == {n: t.shape for n, t in stored.items()}


def test_stack_with_a_quantized_and_a_float_expert(tmp_path, tiny_model):
    """Half of the experts are decoded to another dtype than the rest has."""
    source, quantized, target = tiny_model("granite_moe"), tmp_path / "q", tmp_path / "floats"
    quantize_checkpoint(
        source,
        quantized,
        scheme=Scheme.parse("w8a16-sym-g32"),
        ignore=[r"re:.*experts\.[0-2]\..*"],
        recipe="rtn",
        progress=False,
        quality_windows=0,
    )
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    floats_of(quantized, target)
    name = "model.layers.0.block_sparse_moe.output_linear.weight"
    found, want = (load_file(each / SINGLE)[name] for each in (target, source))
    assert found.dtype == torch.float32 and torch.equal(found[:3], want[:3])
    assert 0 < relative(found[3:], want[3:]) < 0.01


def test_dtype_of_config_json_is_kept(tmp_path):
    folder = next(each for each in FOLDERS if each.name == "llmcompressor-fp8-block")
    stated = getattr(torch, CheckpointReader(folder).config["dtype"])
    reader = floats_of(folder, tmp_path / "floats")
    assert {entry.dtype for entry in reader.entries.values()} == {stated}


def test_quantized_head_is_decoded_only_when_it_is_read(tmp_path, tiny_model, monkeypatch):
    folder, scheme = tmp_path / "quantized", Scheme.parse("w8a16-sym-g32")
    whole = {"quantize_head": scheme, "quantize_embedding": scheme}
    quantize_checkpoint(
        tiny_model("llama"), folder, scheme=scheme, recipe="rtn", quality_windows=0, **whole
    )
    decoded, decode = [], float_view.decode_dense

    def counted(module, *args):
        decoded.append(module)
        return decode(module, *args)

    monkeypatch.setattr(float_view, "decode_dense", counted)
    reader, source = CheckpointReader(folder, as_floats=True), CheckpointReader(tiny_model("llama"))
    assert "model.embed_tokens" in reader.decoded and not decoded
    for module in ("model.embed_tokens", "lm_head"):
        assert reader.entries[f"{module}.weight"].shape == reader.get(f"{module}.weight").shape
    assert decoded == ["model.embed_tokens", "lm_head"]
    weight = source.get("model.embed_tokens.weight").float()
    found = reader.get("model.embed_tokens.weight").float()
    assert torch.linalg.norm(found - weight) < 0.01 * torch.linalg.norm(weight)


def test_scales_of_the_kv_cache_are_left_out(tmp_path):
    folder = next(each for each in FOLDERS if each.name == "llmcompressor-fp8-kv")
    assert any("k_scale" in name for name in CheckpointReader(folder).entries)
    reader = floats_of(folder, tmp_path / "floats")
    assert not any("_scale" in name for name in reader.entries)


def test_float_model_other_dtypes_and_large_numbers_are_refused(tmp_path, docs_5m):
    target = tmp_path / "floats"
    with pytest.raises(CheckpointError, match="is a float model already.*use it as it is"):
        dequantize_checkpoint(docs_5m, target)
    folder = next(each for each in FOLDERS if each.name == "llmcompressor-fp8")
    with pytest.raises(InputError, match="dtype: expected one of bfloat16.*'int8'"):
        dequantize_checkpoint(folder, target, dtype="int8")
    changed = tmp_path / "changed"
    shutil.copytree(folder, changed)
    file = changed / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("q_proj.weight_scale"))
    tensors[name] = torch.full_like(tensors[name], 1e4)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"q_proj.weight: exceeds.*float16.*bfloat16"):
        dequantize_checkpoint(changed, target, dtype="float16")
    assert not target.exists()


def test_free_disk_is_compared_with_the_floats(tmp_path, monkeypatch):
    folder = next(each for each in FOLDERS if each.name == "llmcompressor-w4a16")
    reader = CheckpointReader(folder)
    free = 2 * reader.num_bytes
    usage = shutil._ntuple_diskusage(free, 0, free)
    monkeypatch.setattr(target_module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DiskError):
        dequantize_checkpoint(folder, tmp_path / "floats", dtype="float32")
    assert not list(tmp_path.iterdir())
