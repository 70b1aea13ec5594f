"""The GPTQ v1 checklist, line by line, on the bundled model's checkpoint, from the raw bytes.

Reads the file with struct, json and numpy alone: a mistake that our reader and writer share must
show.
"""

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from calibrate.pipeline import quantize_checkpoint
from formats.scheme import Scheme

GROUP = 128
NUMPY = {"I32": np.int32, "F16": np.float16, "BF16": np.uint16}
SHAPES = {
    "self_attn.q_proj": (256, 256),
    "self_attn.k_proj": (128, 256),
    "self_attn.v_proj": (128, 256),
    "self_attn.o_proj": (256, 256),
    "mlp.gate_proj": (768, 256),
    "mlp.up_proj": (768, 256),
    "mlp.down_proj": (256, 768),
}
LINEARS = {f"model.layers.{i}.{n}": shape for i in range(4) for n, shape in SHAPES.items()}


def read_raw(path: Path) -> tuple[dict[str, tuple[str, np.ndarray]], dict[str, str]]:
    """(name -> (safetensors dtype, array), metadata) of a safetensors file."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    metadata, data = header.pop("__metadata__", {}), content[8 + length :]
    tensors = {}
    for name, item in header.items():
        begin, end = item["data_offsets"]
        array = np.frombuffer(data[begin:end], dtype=NUMPY[item["dtype"]]).reshape(item["shape"])
        tensors[name] = (item["dtype"], array)
    return tensors, metadata


@pytest.fixture(scope="module")
def written(docs_5m, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("checklist") / "docs-5m-w4a16"
    quantize_checkpoint(
        docs_5m,
        target,
        scheme=Scheme.parse("w4a16-sym"),
        max_shard_bytes=2_000_000,
        progress=False,
        quantizer="qserve-kit:9.9.9",
    )
    return target


@pytest.fixture(scope="module")
def shards(written) -> dict[str, tuple[dict[str, tuple[str, np.ndarray]], dict[str, str]]]:
    return {path.name: read_raw(path) for path in sorted(written.glob("*.safetensors"))}


@pytest.fixture(scope="module")
def tensors(shards) -> dict[str, tuple[str, np.ndarray]]:
    return {name: value for found, _ in shards.values() for name, value in found.items()}


@pytest.fixture(scope="module")
def source(docs_5m) -> dict[str, tuple[str, np.ndarray]]:
    return read_raw(docs_5m / "model.safetensors")[0]


def array(tensors, name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    found_dtype, value = tensors[name]
    assert found_dtype == dtype, name
    assert value.shape == shape, name
    return value


def codes_KN(qweight: np.ndarray) -> np.ndarray:
    words = qweight.view(np.uint32)
    return np.stack([(words >> (4 * i)) & 15 for i in range(8)], axis=1).reshape(-1, words.shape[1])


def test_every_linear_has_exactly_the_four_tensors_and_no_weight(tensors, source):
    expected = {f"{n}.{f}" for n in LINEARS for f in ("qweight", "qzeros", "scales", "g_idx")}
    kept = source.keys() - {f"{name}.weight" for name in LINEARS}
    assert tensors.keys() == expected | kept


@pytest.mark.parametrize("name", LINEARS)
def test_shapes_divide_and_tensors_have_the_layout(tensors, name):
    out_features, in_features = LINEARS[name]
    assert in_features % GROUP == 0
    assert out_features % 32 == 0
    groups = in_features // GROUP
    codes = codes_KN(array(tensors, f"{name}.qweight", "I32", (in_features // 8, out_features)))
    assert codes.min() == 0
    assert codes.max() == 15
    scales = array(tensors, f"{name}.scales", "F16", (groups, out_features))
    assert np.isfinite(scales).all()
    assert np.abs(scales.astype(np.float64)).min() >= 6e-8
    qzeros = array(tensors, f"{name}.qzeros", "I32", (groups, out_features // 8))
    assert (qzeros == 2004318071).all()
    assert (qzeros.view(np.uint32) == 0x77777777).all()
    g_idx = array(tensors, f"{name}.g_idx", "I32", (in_features,))
    assert (g_idx == np.arange(in_features) // GROUP).all()


@pytest.mark.parametrize("name", LINEARS)
def test_codes_and_scales_mean_the_source_weight(tensors, source, name):
    bits = source[f"{name}.weight"][1].astype(np.uint32) << 16
    weight_NK = bits.view(np.float32)
    scales_GN = tensors[f"{name}.scales"][1].astype(np.float32)
    codes = codes_KN(tensors[f"{name}.qweight"][1]).astype(np.float32)
    restored_NK = ((codes - 8) * np.repeat(scales_GN, GROUP, axis=0)).T
    error = np.linalg.norm(restored_NK - weight_NK) / np.linalg.norm(weight_NK)
    assert error < 0.11
    inside = (codes.T > 0) & (codes.T < 15)
    step_NK = np.abs(np.repeat(scales_GN, GROUP, axis=0)).T
    assert (np.abs(restored_NK - weight_NK) <= step_NK * 0.5001)[inside].all()


def test_full_range_scales_use_both_signs(tensors):
    scales = np.concatenate([tensors[f"{name}.scales"][1].ravel() for name in LINEARS])
    assert 0.3 < (scales < 0).mean() < 0.7


def test_other_tensors_equal_source_bitwise(tensors, source):
    kept = [name for name in source if name.removesuffix(".weight") not in LINEARS]
    assert len(kept) == 4 * 2 + 2
    for name in kept:
        dtype, value = source[name]
        assert dtype == "BF16"
        assert (array(tensors, name, dtype, value.shape) == value).all(), name
    assert "lm_head.weight" not in tensors  # tied


def test_both_config_files_have_quantization_config(written, docs_5m):
    config = json.loads((written / "config.json").read_text())
    block = config.pop("quantization_config")
    assert block == {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "checkpoint_format": "gptq",
        "format": "gptq",
        "pack_dtype": "int32",
        "true_sequential": False,
        "meta": {"quantizer": ["qserve-kit:9.9.9"]},
    }
    assert json.loads((written / "quantize_config.json").read_text()) == block
    assert config == json.loads((docs_5m / "config.json").read_text())
    assert config["dtype"] in ("float16", "bfloat16")


def test_shards_have_metadata_and_an_index(written, shards, tensors):
    assert len(shards) > 1
    index = json.loads((written / "model.safetensors.index.json").read_text())
    for file_name, (found, metadata) in shards.items():
        assert metadata == {"format": "pt"}
        assert {n for n, file in index["weight_map"].items() if file == file_name} == found.keys()
    total = sum(value.nbytes for _, value in tensors.values())
    assert index["metadata"]["total_size"] == total


def test_only_tokenizer_and_template_are_copied(written, shards, docs_5m):
    side_files = {path.name for path in docs_5m.iterdir()} - {"config.json", "model.safetensors"}
    for name in side_files - {"README.md"}:
        assert (written / name).read_bytes() == (docs_5m / name).read_bytes()
    ours = {
        "config.json",
        "quantize_config.json",
        "quantization_report.html",
        "quantization_report.json",
        "quality.json",
        "README.md",  # the model card
        "model.safetensors.index.json",
    }
    found = {path.name for path in written.iterdir()}
    assert found == (side_files - {"README.md"}) | ours | shards.keys()
