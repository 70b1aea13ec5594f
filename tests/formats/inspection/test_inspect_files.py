"""Damage to the files of a folder: shards, index, links, what is left over."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from formats.checkpoint import CheckpointReader
from formats.errors import CheckpointError
from formats.inspection.inspect import inspect_checkpoint
from tests.formats.inspection.findings import problem_of


def shard(folder: Path, number: int) -> Path:
    return folder / f"model-{number:05d}-of-00003.safetensors"


def test_truncated_shard_is_one_error_beside_other_findings(gptq_model, write_folder):
    folder = write_folder(*gptq_model, num_shards=3)
    shard(folder, 2).write_bytes(shard(folder, 2).read_bytes()[:-10])
    found = inspect_checkpoint(folder)
    problem_of(found, "error", "model-00002-of-00003", "truncated")
    assert found.total_bytes > 0


def test_missing_shard_is_one_error(gptq_model, write_folder):
    folder = write_folder(*gptq_model, num_shards=3)
    shard(folder, 3).unlink()
    problem_of(inspect_checkpoint(folder), "error", "model-00003-of-00003", "not found")


def edit_index(folder: Path, change) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def test_wrong_total_size_is_a_warning(gptq_model, write_folder):
    folder = write_folder(*gptq_model, num_shards=3)
    edit_index(folder, lambda index: index["metadata"].update(total_size=1))
    problem_of(inspect_checkpoint(folder), "warning", "index.json", "total_size of 1 bytes")


def test_index_disagreeing_with_shards_is_reported(gptq_model, write_folder):
    folder = write_folder(*gptq_model, num_shards=3)
    edit_index(folder, lambda index: index["weight_map"].update(ghost=shard(folder, 1).name))
    problem_of(inspect_checkpoint(folder), "error", "ghost", "does not contain it")
    edit_index(folder, lambda index: index["weight_map"].pop("ghost"))
    edit_index(folder, lambda index: index["weight_map"].pop("model.norm.weight"))
    found = inspect_checkpoint(folder)
    problem_of(found, "warning", "model.norm.weight", "does not list it there")


def test_empty_index_is_reported(gptq_model, write_folder):
    folder = write_folder(*gptq_model, num_shards=3)
    edit_index(folder, lambda index: index["weight_map"].clear())
    problem_of(inspect_checkpoint(folder), "error", "index.json", "has no weight_map")


def test_git_lfs_pointer_is_reported(gptq_model, write_folder):
    """A clone without Git LFS has such a text instead of the file."""
    folder = write_folder(*gptq_model)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 10494472\n"
    (folder / "model.safetensors").write_text(pointer)
    problem_of(inspect_checkpoint(folder), "error", "model.safetensors", "pointer of Git LFS")


def test_index_path_outside_folder_is_refused(gptq_model, write_folder):
    folder = write_folder(*gptq_model, num_shards=3)
    edit_index(folder, lambda index: index["weight_map"].update(x="../x.safetensors"))
    problem_of(
        inspect_checkpoint(folder), "error", "index.json", "not the name of a file in the folder"
    )


def test_missing_index_is_an_error_and_shards_are_read(gptq_model, write_folder):
    folder = write_folder(*gptq_model, num_shards=3)
    (folder / "model.safetensors.index.json").unlink()
    found = inspect_checkpoint(folder)
    problem_of(found, "error", "index.json", "not found for 3 shards")
    assert len(found.linears) == 14


def test_tensor_in_two_shards_is_reported(gptq_model, write_folder):
    folder = write_folder(*gptq_model, num_shards=3)
    tensors, _ = gptq_model
    name = "model.norm.weight"
    reader = CheckpointReader(folder)
    files = [shard(folder, number) for number in (1, 2, 3)]
    target = next(file for file in files if file != reader.entries[name].file)
    inside = {n: tensors[n] for n, e in reader.entries.items() if e.file == target}
    save_file({**inside, name: tensors[name]}, target, metadata={"format": "pt"})
    texts = [str(p) for p in inspect_checkpoint(folder).problems]
    assert any(name in text and "is in both" in text for text in texts)


def test_unreferenced_files_are_warnings(gptq_model, write_folder):
    folder = write_folder(*gptq_model)
    left_over = folder.parent / f".{folder.name}.partial"
    left_over.mkdir()
    problem_of(inspect_checkpoint(folder), "warning", ".partial", "killed run")
    left_over.rmdir()
    save_file({"x": torch.zeros(1)}, folder / "adapter.safetensors")
    problem_of(inspect_checkpoint(folder), "warning", "adapter.safetensors", "not listed")


def test_missing_format_metadata_is_a_warning(gptq_model, write_folder):
    tensors, config = gptq_model
    folder = write_folder(tensors, config)
    save_file(tensors, folder / "model.safetensors")
    problem_of(inspect_checkpoint(folder), "warning", "model.safetensors", "format 'pt'")


def test_folder_without_weights_is_reported(float_model, write_folder):
    folder = write_folder(*float_model)
    (folder / "model.safetensors").unlink()
    problem_of(inspect_checkpoint(folder), "error", "model.safetensors", "not found")


def test_dangling_tokenizer_link_is_reported(gptq_model, write_folder):
    folder = write_folder(*gptq_model)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("../../blobs/gone")
    problem_of(inspect_checkpoint(folder), "error", "tokenizer.json", "is a link to nothing")


def test_missing_tokenizer_is_a_warning(gptq_model, write_folder):
    folder = write_folder(*gptq_model)
    (folder / "tokenizer.json").unlink()
    found = inspect_checkpoint(folder)
    problem_of(found, "warning", str(folder), "has no tokenizer: none of tokenizer.json, tokeni")
    assert len(found.problems) == 1 and found.ok and found.loads_in[0].answer == "yes"
    (folder / "tokenizer.model").touch()
    assert inspect_checkpoint(folder).problems == ()


def test_truncated_tokenizer_is_an_error(gptq_model, write_folder):
    folder = write_folder(*gptq_model)
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"vo')
    found = inspect_checkpoint(folder)
    problem_of(found, "error", "tokenizer.json", "")
    assert len(found.problems) == 1 and not found.ok


def test_unreadable_folder_raises(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)  # root may read all
    with pytest.raises(CheckpointError, match=r"cannot be read: Permission denied"):
        inspect_checkpoint(tmp_path)


def test_missing_folder_raises(tmp_path):
    with pytest.raises(CheckpointError, match="not a folder"):
        inspect_checkpoint(tmp_path / "nothing")
