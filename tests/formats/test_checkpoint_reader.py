"""The reader against damaged and hostile folders: each is a CheckpointError that names the file."""

import json

import pytest
import torch
from safetensors.torch import save_file

from formats.architecture.stored_form.float_blocks import PowerOfTwo
from formats.checkpoint import CheckpointReader, read_header, read_json
from formats.errors import CheckpointError
from formats.files.tensor_entry import header_of


def entry(dtype: str = "F32", shape=(2, 2), offsets=(0, 16)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize("num_shards", [1, 3])
def test_tensors_round_trip_bitwise(float_model, write_folder, num_shards):
    tensors, config = float_model
    reader = CheckpointReader(write_folder(tensors, config, num_shards))
    assert reader.config == config
    assert reader.entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(reader.get(name), tensor), name
        assert reader.entries[name].shape == tuple(tensor.shape)
        assert reader.entries[name].num_bytes == tensor.nbytes
    assert "model.norm.weight" in reader
    assert "model.norm.bias" not in reader
    children = reader.children("model.layers.1")
    assert "mlp.up_proj.weight" in children
    assert len(children) == 9


def test_layer_1_is_not_parent_of_layer_10(write_folder, float_model):
    tensors, config = float_model
    tensors["model.layers.10.mlp.up_proj.weight"] = torch.zeros(1)
    reader = CheckpointReader(write_folder(tensors, config))
    assert not any(name.startswith("0.") for name in reader.children("model.layers.1"))
    assert len(reader.children("model.layers.1")) == 9


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x10\x00\x00",
        b"\x10\x00\x00\x00\x00\x00\x00\x00{}",
        b"\xff\xff\xff\xff\xff\xff\xff\xff{}",
        b"\x00\x00\x00\x00\x00\x00\x00\x80" + b"{}" * 50,
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    ],
)
def test_file_that_is_not_safetensors_is_refused(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read_header(path)


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (b"not json", b""),
        (b"\xff\xfe", b""),
        (b"[1, 2]", b""),
        (b"[" * 50_000, b""),
        ({"a": 1}, b""),
        ({"a": {"dtype": "F32"}}, b""),
        ({"a": entry(dtype="F31")}, bytes(16)),
        ({"a": entry(dtype=["F32"])}, bytes(16)),
        ({"a": entry(dtype="F16")}, bytes(16)),
        ({"a": entry(shape=(3, 2))}, bytes(16)),
        ({"a": entry(shape=(-2, -2))}, bytes(16)),
        ({"a": entry(shape=(2.0, 2))}, bytes(16)),
        ({"a": entry(shape=("2", 2))}, bytes(16)),
        ({"a": entry(offsets=(-16, 0))}, bytes(16)),
        ({"a": entry(offsets=(16, 0))}, bytes(16)),
        ({"a": entry(offsets=(0, 16, 32))}, bytes(16)),
        ({"a": entry(), "b": entry()}, bytes(16)),
        ({"a": entry(), "b": entry(offsets=(8, 24))}, bytes(24)),
        ({"a": entry(), "b": entry(offsets=(20, 36))}, bytes(36)),
        ({"a": entry()}, bytes(15)),
        ({"a": entry()}, bytes(17)),
        ({"a": entry(shape=(2**40, 2**40), offsets=(0, 2**82))}, bytes(16)),
    ],
)
def test_header_not_matching_data_is_refused(tmp_path, raw_safetensors, header, data):
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw_safetensors(header, data))
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read_header(path)


def test_duplicate_name_in_header_is_refused(tmp_path, raw_safetensors):
    first, second = json.dumps(entry()), json.dumps(entry(offsets=(16, 32)))
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw_safetensors(f'{{"a": {first}, "a": {second}}}'.encode(), bytes(32)))
    with pytest.raises(CheckpointError, match="damaged"):
        read_header(path)


def test_valid_headers_are_accepted(tmp_path, raw_safetensors):
    path = tmp_path / "model.safetensors"
    header = {
        "__metadata__": {"format": "pt"},
        "b": entry(offsets=(16, 32)),
        "a": entry(),
        "empty": entry(shape=(0, 7), offsets=(16, 16)),
        "scalar": entry(dtype="I64", shape=(), offsets=(32, 40)),
    }
    path.write_bytes(raw_safetensors(header, bytes(40)))
    assert {e.name: e.num_bytes for e in read_header(path).values()} == {
        "b": 16,
        "a": 16,
        "empty": 0,
        "scalar": 8,
    }


@pytest.mark.parametrize("cut", [1, 100, 5000])
def test_truncated_shard_is_detected_before_reading_tensors(float_model, write_folder, cut):
    folder = write_folder(*float_model, num_shards=2)
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-cut])
    with pytest.raises(CheckpointError, match="model-00002.*truncated"):
        CheckpointReader(folder)


def edit_index(folder, change) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    "file_name",
    [
        "../secret.safetensors",
        "/etc/passwd",
        "sub/../../secret.safetensors",
        "sub//model.safetensors",
        "..",
        ".",
        "",
        7,
        None,
        "a\0b",
    ],
)
def test_index_path_outside_folder_is_refused(float_model, write_folder, file_name):
    folder = write_folder(*float_model, num_shards=2)
    save_file({"x": torch.zeros(1)}, folder.parent / "secret.safetensors")
    edit_index(folder, lambda index: index["weight_map"].update({"x": file_name}))
    with pytest.raises(CheckpointError, match="not the name of a file in the folder"):
        CheckpointReader(folder)


def test_index_may_list_files_in_sub_folders(float_model, write_folder):
    folder = write_folder(*float_model, num_shards=2)
    want = {name: entry.read() for name, entry in CheckpointReader(folder).entries.items()}
    (folder / "sub").mkdir()
    files = sorted(folder.glob("*.safetensors"))
    files[1].rename(folder / "sub" / files[1].name)
    edit_index(
        folder,
        lambda index: index.update(
            weight_map={
                name: f"sub/{file}" if file == files[1].name else file
                for name, file in index["weight_map"].items()
            }
        ),
    )
    found = CheckpointReader(folder).entries
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name].read(), want[name]) for name in want)


@pytest.mark.parametrize("weight_map", [None, {}, [], "x"])
def test_index_without_weight_map_is_refused(float_model, write_folder, weight_map):
    folder = write_folder(*float_model, num_shards=2)
    edit_index(folder, lambda index: index.update({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="weight_map"):
        CheckpointReader(folder)


def test_index_entry_missing_in_shard_is_refused(float_model, write_folder):
    folder = write_folder(*float_model, num_shards=2)
    file_name = "model-00001-of-00002.safetensors"
    edit_index(folder, lambda index: index["weight_map"].update({"ghost": file_name}))
    with pytest.raises(CheckpointError, match="ghost"):
        CheckpointReader(folder)


def test_missing_shard_is_named(float_model, write_folder):
    folder = write_folder(*float_model, num_shards=3)
    (folder / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00003-of-00003.safetensors: not found"):
        CheckpointReader(folder)


def test_name_in_two_shards_is_refused(float_model, write_folder):
    folder = write_folder(*float_model, num_shards=2)
    shard = folder / "model-00002-of-00002.safetensors"
    tensors = {name: CheckpointReader(folder).get(name) for name in read_header(shard)}
    name = next(iter(read_header(folder / "model-00001-of-00002.safetensors")))
    save_file({**tensors, name: torch.zeros(3)}, shard)
    with pytest.raises(CheckpointError, match="is in two shards") as caught:
        CheckpointReader(folder)
    assert name in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff", b"[" * 100_000])
def test_config_not_a_json_object_is_refused(float_model, write_folder, content):
    folder = write_folder(*float_model)
    (folder / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        CheckpointReader(folder)


def test_folder_without_model_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="not a folder"):
        CheckpointReader(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"config\.json: not found"):
        CheckpointReader(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json: is not a regular file"):
        read_json(tmp_path / "config.json")
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="is not a regular file"):
        read_header(tmp_path / "model.safetensors")


def test_unknown_tensor_is_named(float_model, write_folder):
    with pytest.raises(CheckpointError, match="'nothing'"):
        CheckpointReader(write_folder(*float_model)).get("nothing")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_unsupported_weight_files_are_named(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="model.safetensors: not found"):
        CheckpointReader(tmp_path)
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=f"no model.safetensors, but {name} .write"):
        CheckpointReader(tmp_path)
    (tmp_path / "gptq_model-4bit-128g.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="but gptq_model-4bit-128g.safetensors .rename it"):
        CheckpointReader(tmp_path)


def test_dangling_link_is_reported_missing(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").symlink_to("../blobs/gone")
    with pytest.raises(CheckpointError, match="model.safetensors: not found"):
        CheckpointReader(tmp_path)


def test_exponents_are_read_as_powers_of_two_in_blocks(tmp_path):
    """Bytes that would be no number as float32."""
    exponents = torch.tensor([[128, 128, 128, 127]], dtype=torch.uint8)
    file = tmp_path / "model.safetensors"
    save_file({"scale": exponents.view(torch.float8_e8m0fnu)}, file)
    stored = read_header(file)["scale"]
    found = PowerOfTwo(**{**header_of(stored), "dtype": torch.float32})
    runs = list(found.blocks(8))
    assert [begin for begin, _ in runs] == [0, 2]
    assert torch.equal(torch.cat([values for _, values in runs]), torch.tensor([2.0, 2, 2, 1]))
    assert torch.equal(found.rows(0, 1), torch.tensor([[2.0, 2, 2, 1]]))
