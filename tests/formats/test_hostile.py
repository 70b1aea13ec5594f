"""Files that a stranger made to hurt: each is one typed error, soon, and in little memory.

Nothing of ours unpickles or runs code from a model folder: tests/test_architecture.py reads that in
the sources.
"""

import contextlib
import json
import os
import tracemalloc

import pytest
import torch
from safetensors.torch import save_file

from formats.checkpoint import CheckpointReader, read_header, read_json
from formats.convert import convert_checkpoint
from formats.errors import CheckpointError, InputError
from formats.inspection.inspect import inspect_checkpoint
from formats.layouts import LAYOUTS, decode_linear, quantized_modules, tensor_names
from formats.quant_config import BLOCK, QuantConfig
from tests.formats.limits import cpu_seconds

MEGABYTE = 2**20


@contextlib.contextmanager
def refused(match: str | None = None, megabytes: float = 40):
    """The block raises an InputError within a second of work and a bounded memory."""
    tracemalloc.start()
    try:
        with cpu_seconds(1), pytest.raises(InputError, match=match) as caught:
            yield
        assert tracemalloc.get_traced_memory()[1] < megabytes * MEGABYTE
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    finally:
        tracemalloc.stop()


def tensor(shape=(2, 2), dtype="F32", begin=0, end=16):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def twice(name: str) -> bytes:
    one = json.dumps(tensor())
    return f'{{"{name}": {one}, "{name}": {one}}}'.encode()


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (b"", b""),
        (b"{", b""),
        (b"[]", b""),
        (b"[" * 100_000, b""),
        (b'{"a":' * 50_000, b""),
        (b'{"a": ' + b"9" * 10_000 + b"}", b""),
        (b"\xff\xfe", b""),
        ({"a": 3}, b""),
        ({"a": None}, b""),
        ({"a": {}}, b""),
        ({"a": tensor()}, b"\0" * 15),
        ({"a": tensor()}, b"\0" * 17),
        ({"a": tensor(shape=(-2, -2))}, b"\0" * 16),
        ({"a": tensor(shape=(-1,), end=-4)}, b""),
        ({"a": tensor(shape=(2**62, 2**62))}, b"\0" * 16),
        ({"a": tensor(shape=(2**32, 2**32), end=0)}, b""),
        ({"a": tensor(shape=(0, 2**62), end=0)}, b""),
        ({"a": tensor(shape=[1] * 100, end=4)}, b"\0" * 4),
        ({"a": tensor(shape=[2.0, 2])}, b"\0" * 16),
        ({"a": tensor(shape=["2", 2])}, b"\0" * 16),
        ({"a": tensor(shape=[True] * 4)}, b"\0" * 16),
        ({"a": {**tensor(), "shape": "22"}}, b"\0" * 16),
        ({"a": {**tensor(), "shape": None}}, b"\0" * 16),
        ({"a": tensor(dtype="F4096")}, b"\0" * 16),
        ({"a": tensor(dtype=["F32"])}, b"\0" * 16),
        ({"a": tensor(begin=16, end=0)}, b"\0" * 16),
        ({"a": tensor(begin=-16, end=0)}, b"\0" * 16),
        ({"a": {**tensor(), "data_offsets": [0]}}, b"\0" * 16),
        ({"a": {**tensor(), "data_offsets": "ab"}}, b"\0" * 16),
        ({"a": tensor(), "b": tensor()}, b"\0" * 16),
        ({"a": tensor(), "b": tensor(begin=8, end=24)}, b"\0" * 24),
        ({"a": tensor(), "b": tensor(begin=20, end=36)}, b"\0" * 36),
        (twice("a"), b"\0" * 16),
        ({"\ud800": tensor()}, b"\0" * 16),
        ({"\x1b[2J": tensor()}, b"\0" * 16),
    ],
)
def test_malformed_safetensors_header_is_refused(tmp_path, raw_safetensors, header, data):
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw_safetensors(header, data))
    with refused("model.safetensors"):
        read_header(path)


@pytest.mark.parametrize("length", [9, 10**6, 2**40, 2**63, 2**64 - 1])
def test_header_length_beyond_file_is_refused(tmp_path, raw_safetensors, length):
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw_safetensors(b"{}", length=length))
    with refused("truncated", megabytes=1):
        read_header(path)


def sparse(path, size: int, start: bytes = b""):
    with path.open("wb") as file:
        file.write(start)
        file.truncate(size)
    return path


def test_header_of_100_mb_is_refused(tmp_path):
    size = 10**8
    with refused("is not a safetensors file", megabytes=1):
        read_header(sparse(tmp_path / "m.safetensors", size + 8, size.to_bytes(8, "little")))


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors.index.json", "quantize_config.json"]
)
def test_json_of_100_mb_is_refused(tmp_path, name):
    with refused("the limit is", megabytes=1):
        read_json(sparse(tmp_path / name, 10**8, b'{"a": "'))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\0",
        b"[" * 10**6,
        b"[1]",
        b'{"a": ' + b"1" * 10**5 + b"}",
        b'{"a": "\xff"}',
        b'{"a": ["\\ud800"]}',
    ],
)
def test_invalid_json_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text)
    with refused("config.json"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_pipe_instead_of_file_is_refused(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with refused("is not a regular file"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize(
    "entry",
    ["../outside.safetensors", "/etc/passwd", "a/../../b", "..", ".", "", "sub/x", None, 3, ["x"]],
)
def test_index_path_outside_folder_is_refused(tmp_path, entry):
    save_file({"a": torch.zeros(1)}, tmp_path / "outside.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    index = {"weight_map": {"a": entry}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with refused():
        CheckpointReader(folder)
    assert not inspect_checkpoint(folder).ok


def test_index_entry_with_null_byte_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    index = {"weight_map": {"a": "model\0.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with refused():
        CheckpointReader(tmp_path)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
}


def group(**values):
    return {**COMPRESSED, "config_groups": {"g": {"targets": ["Linear"], "weights": values}}}


ABSURD = [None, "4", 4.0, 4.5, True, -4, 0, 1, 5, 64, 2**70, [4], {}]


@pytest.mark.parametrize(
    "block",
    [
        *({**GPTQ, "bits": bits} for bits in ABSURD),
        *({**AWQ, "bits": bits} for bits in ABSURD if bits is not None),
        *(group(**{**WEIGHTS, "num_bits": bits}) for bits in ABSURD if bits != 5),
        *({**GPTQ, "group_size": size} for size in (None, "x", 0, -2, 7, 2**70, 1.5, [32], True)),
        *({**AWQ, "group_size": size} for size in (None, "x", 0, -2, 7, 2**70, 1.5, [32], True)),
        *(group(**{**WEIGHTS, "group_size": size}) for size in (None, 0, -2, 7, 2**70, "x", True)),
        {**GPTQ, "checkpoint_format": ["gptq"]},
        {**GPTQ, "dynamic": {"-:" + "(" * 500: {}}},
        {**GPTQ, "dynamic": {str(i): {} for i in range(20_000)}},
        {**GPTQ, "dynamic": {f"-:.*{'a?' * 300}{i}": {} for i in range(2_000)}},
        {**AWQ, "version": "gemv_fast"},
        {**AWQ, "modules_to_not_convert": "lm_head"},
        {**COMPRESSED, "config_groups": []},
        {**COMPRESSED, "config_groups": {"g": None}},
        {**COMPRESSED, "config_groups": {"g": {"targets": "Linear", "weights": WEIGHTS}}},
        {**COMPRESSED, "config_groups": {"g": {"targets": [], "weights": WEIGHTS}}},
        {**COMPRESSED, "ignore": ["re:" + "(a" * 200]},
        {**COMPRESSED, "ignore": ["re:(a)\\1"]},
        {**COMPRESSED, "ignore": [3]},
        {**COMPRESSED, "format": "nvfp4-pack-quantized"},
        {**COMPRESSED, "kv_cache_scheme": {"num_bits": 3}},
        {**COMPRESSED, "kv_cache_scheme": {"num_bits": 8, "type": "bf16"}},
        {**COMPRESSED, "kv_cache_scheme": {"num_bits": 8, "type": ["int"]}},
        {**COMPRESSED, "kv_cache_scheme": {"num_bits": 8, "symmetric": False}},
        {**COMPRESSED, "transform_config": {"config_groups": {"R1": {}}}},
        group(**{**WEIGHTS, "strategy": ["group"]}),
        group(**{**WEIGHTS, "strategy": "block", "block_structure": [0, 0]}),
        {"quant_method": {}},
        {"quant_method": "gptq" * 10},
    ],
)
def test_malformed_quantization_config_is_refused(block):
    with refused():
        QuantConfig.from_dict(block)


@pytest.mark.parametrize("key", ["dynamic", "ignore"])
@pytest.mark.parametrize(
    "pattern", [r"(.*)*(.*)*(.*)*x", r"(a+)+$", r"([a-z._0-9]+)*!", "(m|mo|.)*#"]
)
def test_backtracking_pattern_is_bounded(key, pattern):
    block = {**GPTQ, "dynamic": {f"-:{pattern}": {}}}
    if key == "ignore":
        block = {**COMPRESSED, "ignore": [f"re:{pattern}"]}
    with cpu_seconds(2):
        config = QuantConfig.from_dict(block)
        for layer in range(32):
            try:
                scheme = config.scheme_for(f"model.layers.{layer}.self_attn.{'a' * 40}")
                assert scheme is not None
            except CheckpointError as error:
                assert "too long" in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("qweight", torch.zeros(8, 64, dtype=torch.int64)),
        ("qweight", torch.zeros(0, 64, dtype=torch.int32)),
        ("qweight", torch.zeros(8, 0, dtype=torch.int32)),
        ("qweight", torch.zeros((), dtype=torch.int32)),
        ("qweight", torch.zeros(7, 64, dtype=torch.int32)),
        ("qzeros", torch.zeros(2, 8)),
        ("qzeros", torch.zeros(2**10, 8, dtype=torch.int32)),
        ("scales", torch.ones(2, 64, dtype=torch.int8)),
        ("scales", torch.ones(2, 64).to(torch.float8_e4m3fn)),
        ("scales", torch.full((2, 64), float("nan"))),
        ("scales", torch.ones(2, 64, dtype=torch.bool)),
        ("g_idx", torch.full((64,), 2**31 - 1, dtype=torch.int32)),
        ("g_idx", torch.full((64,), -1, dtype=torch.int32)),
        ("g_idx", torch.zeros(64, dtype=torch.float32)),
        ("g_idx", torch.zeros(2, 32, dtype=torch.int32)),
    ],
)
def test_invalid_tensor_is_refused_by_name(gptq_model, write_folder, tmp_path, field, value):
    tensors, config = gptq_model
    name = "model.layers.0.self_attn.q_proj"
    tensors[f"{name}.{field}"] = value
    folder = write_folder(tensors, config)
    reader = CheckpointReader(folder)
    assert name in quantized_modules(reader.entries)
    found = {
        local: reader.get(full)
        for local, full in tensor_names(name, LAYOUTS["gptq"], reader.entries).items()
    }
    with refused(name):
        decode_linear(name, found, QuantConfig.from_dict(config[BLOCK]))
    with refused(name):
        convert_checkpoint(folder, tmp_path / "out", "compressed-tensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    assert not inspect_checkpoint(folder).ok


def test_inspect_time_is_bounded_for_many_tensor_names(float_model, write_folder):
    tensors, config = float_model
    for number in range(3000):
        tensors[f"model.layers.{number}.{'x.' * 40}weight"] = torch.zeros(1)
    folder = write_folder(tensors, config)
    with cpu_seconds(3):
        assert not inspect_checkpoint(folder).ok
