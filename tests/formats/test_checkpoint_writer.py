"""The checkpoint writer: the target's name does not exist before the checkpoint is complete."""

import errno
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from formats.checkpoint import CheckpointReader, CheckpointWriter
from formats.convert import convert_checkpoint
from formats.errors import CheckpointError
from formats.files import folder_lock

ROOT = Path(__file__).parents[2]
CONFIG = {"architectures": ["LlamaForCausalLM"]}


def tensors() -> dict[str, torch.Tensor]:
    return {f"t{i}": torch.full((10 + i,), float(i)) for i in range(7)}  # 40 to 64 bytes


def write(target: Path, source: Path, max_shard_bytes: int = 10**9) -> None:
    with CheckpointWriter(target, max_shard_bytes=max_shard_bytes) as writer:
        for name, tensor in tensors().items():
            writer.add(name, tensor)
        writer.seal(CONFIG, side_files_from=source)
        writer.publish()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "tokenizer.json").write_text('{"a": 1}')
    (folder / "config.json").write_text("{}")
    (folder / "notes.txt").write_text("not for the target")
    return folder


def test_single_shard_has_no_index_and_side_files_are_copied(tmp_path, source):
    write(tmp_path / "out", source)
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"config.json", "model.safetensors", "tokenizer.json"}
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"a": 1}'
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == CONFIG


def test_shards_stay_below_limit_and_index_is_correct(tmp_path, source):
    write(tmp_path / "out", source, max_shard_bytes=130)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 2
    names = {}
    for number, path in enumerate(shards, 1):
        assert path.name == f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert sum(file.get_tensor(name).nbytes for name in file.keys()) <= 130  # noqa: SIM118
            names.update(dict.fromkeys(file.keys(), path.name))
    assert index["weight_map"] == names
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors().values())
    reader = CheckpointReader(tmp_path / "out")
    for name, tensor in tensors().items():
        assert torch.equal(reader.get(name), tensor)


def test_tensor_larger_than_the_limit_gets_its_own_shard(tmp_path, source):
    write(tmp_path / "out", source, max_shard_bytes=1)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 7
    assert CheckpointReader(tmp_path / "out").entries.keys() == tensors().keys()


def test_shared_storage_views_are_written_separately(tmp_path, source):
    whole = torch.arange(32).float()
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.add("left", whole[:16])
        writer.add("right", whole[16:])
        writer.add("turned", whole.view(4, 8).t())
        writer.seal(CONFIG, side_files_from=source)
        writer.publish()
    reader = CheckpointReader(tmp_path / "out")
    assert torch.equal(reader.get("right"), whole[16:])
    assert torch.equal(reader.get("turned"), whole.view(4, 8).t())


def test_written_files_follow_umask(tmp_path, source):
    write(tmp_path / "out", source)
    modes = {oct(path.stat().st_mode & 0o777) for path in (tmp_path / "out").iterdir()}
    plain = tmp_path / "plain"
    plain.touch()
    assert modes == {oct(plain.stat().st_mode & 0o777)}


def test_nonempty_target_is_refused_and_unchanged(tmp_path, source):
    target = tmp_path / "out"
    target.mkdir()
    (target / "precious").write_text("x")
    with pytest.raises(CheckpointError, match="not empty"):
        CheckpointWriter(target)
    with pytest.raises(CheckpointError, match="precious: is not a folder"):
        CheckpointWriter(target / "precious")
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".partial")] == []
    assert (target / "precious").read_text() == "x"


def test_unwritable_target_is_an_input_error(tmp_path, source):
    with pytest.raises(CheckpointError, match="out: cannot be created: Not a directory"):
        CheckpointWriter(source / "notes.txt" / "out")
    with (
        pytest.raises(CheckpointError, match="out: cannot be written"),
        CheckpointWriter(tmp_path / "out", max_shard_bytes=1) as writer,
    ):
        writer.add("a", torch.zeros(4))
        writer.staging.rename(tmp_path / "gone")
        writer.add("b", torch.zeros(4))


@pytest.mark.parametrize("kind", ["empty folder", "link", "nested"])
def test_targets_where_plain_rename_fails(tmp_path, source, kind):
    target = real = tmp_path / "out"
    if kind == "nested":
        target = real = tmp_path / "a" / "b" / "out"
    else:
        real.mkdir()
    if kind == "link":
        target = tmp_path / "link"
        target.symlink_to(real)
    write(target, source)
    assert CheckpointReader(real).entries.keys() == tensors().keys()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_exception_leaves_no_files(tmp_path, source, error):
    with (
        pytest.raises(error),
        CheckpointWriter(tmp_path / "out", max_shard_bytes=100) as writer,
    ):
        for name, tensor in tensors().items():
            writer.add(name, tensor)
        writer.seal(CONFIG, side_files_from=source)
        raise error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


KILLED = """
import os, signal, sys, torch
from pathlib import Path
from formats.checkpoint import CheckpointWriter
with CheckpointWriter(sys.argv[1], max_shard_bytes=100) as writer:
    for i in range(7):
        writer.add(f"t{i}", torch.full((10 + i,), float(i)))
    if sys.argv[2] == "sealed":
        writer.seal({}, side_files_from=Path(sys.argv[1]).parent)
        os.rename = Path.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        writer.publish()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("moment", ["adding", "sealed"])
def test_killed_run_leaves_no_folder_and_the_next_run_succeeds(tmp_path, source, moment):
    target = tmp_path / "out"
    run = subprocess.run(
        [sys.executable, "-c", KILLED, str(target), moment],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == -signal.SIGKILL
    assert not target.exists()
    assert (tmp_path / ".out.partial").is_dir()
    write(target, source)
    assert CheckpointReader(target).entries.keys() == tensors().keys()
    assert not (tmp_path / ".out.partial").exists()


def test_concurrent_run_to_same_target_is_refused(tmp_path, source):
    target = tmp_path / "out"
    with CheckpointWriter(target) as writer:
        writer.add("a", torch.zeros(4))
        with pytest.raises(CheckpointError, match="out: another run is writing it.*wait"):
            CheckpointWriter(target)
        writer.seal(CONFIG, side_files_from=source)
        with pytest.raises(CheckpointError, match="another run is writing it"):
            CheckpointWriter(target)
        writer.publish()
    assert CheckpointReader(target).entries.keys() == {"a"}
    with pytest.raises(CheckpointError, match="already exists and is not empty"):
        CheckpointWriter(target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_target_is_unlocked_after_failed_run(tmp_path, source):
    with pytest.raises(RuntimeError), CheckpointWriter(tmp_path / "out"):
        raise RuntimeError
    write(tmp_path / "out", source)
    assert CheckpointReader(tmp_path / "out").entries.keys() == tensors().keys()


def test_late_lock_is_rejected(tmp_path, source, monkeypatch):
    """Between the making of the folder and its lock, the run that held it published it."""
    target, locks = tmp_path / "out", []
    real = folder_lock.lock

    def late(descriptor):
        if not locks:
            (tmp_path / ".out.partial" / "config.json").touch()
            (tmp_path / ".out.partial").rename(target)
        locks.append(real(descriptor))

    monkeypatch.setattr(folder_lock, "lock", late)
    with pytest.raises(CheckpointError, match="already exists and is not empty"):
        CheckpointWriter(target)
    assert len(locks) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_file_system_without_locks(tmp_path, source, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    write(tmp_path / "out", source)
    assert CheckpointReader(tmp_path / "out").entries.keys() == tensors().keys()


def test_finished_checkpoint_is_kept_if_rename_fails(tmp_path, source):
    target = tmp_path / "out"
    with (
        pytest.raises(
            CheckpointError,
            match=r"out: cannot rename the finished.*not empty.*in .*\.out\.partial",
        ),
        CheckpointWriter(target) as writer,
    ):
        writer.add("a", torch.ones(4))
        writer.seal(CONFIG, side_files_from=source)
        target.mkdir()
        (target / "precious").write_text("x")
        writer.publish()
    assert (target / "precious").read_text() == "x"
    assert torch.equal(CheckpointReader(tmp_path / ".out.partial").get("a"), torch.ones(4))


@pytest.mark.parametrize("step", ["seal", "write_text", "publish"])
def test_full_disk_is_an_input_error_at_every_step(tmp_path, source, step, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    places = {"seal": "shutil.copyfile", "write_text": "pathlib.Path.write_bytes"}
    with (
        pytest.raises(
            CheckpointError, match="out: cannot be written.*No space.*free space on the disk"
        ),
        CheckpointWriter(tmp_path / "out") as writer,
    ):
        writer.add("a", torch.ones(4))
        if step == "publish":
            writer.seal(CONFIG, side_files_from=source)
        monkeypatch.setattr(places.get(step, "os.fsync"), full)
        writer.seal(CONFIG, side_files_from=source) if step != "publish" else writer.publish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_duplicate_tensor_name_raises(tmp_path):
    with CheckpointWriter(tmp_path / "out", max_shard_bytes=1) as writer:
        writer.add("a", torch.zeros(4))
        with pytest.raises(ValueError, match="twice"):
            writer.add("a", torch.zeros(4))


@pytest.mark.parametrize("what", ["link", "mode"])
def test_unreadable_side_file_is_refused_early(
    tmp_path, gptq_model, write_folder, monkeypatch, what
):
    """A link of a hub cache whose blob is missing, and a file of another user."""
    folder = write_folder(*gptq_model)
    path = folder / "tokenizer.json"
    path.unlink(missing_ok=True)
    if what == "link":
        path.symlink_to("../blobs/gone")
    else:
        path.write_text("{}")
        opened = Path.open

        def refuse(self, *arguments, **options):
            if self == path:
                raise PermissionError(errno.EACCES, "Permission denied")
            return opened(self, *arguments, **options)

        monkeypatch.setattr(Path, "open", refuse)
    text = {"link": "is a link to nothing", "mode": "cannot be read: Permission denied"}[what]
    monkeypatch.setattr(CheckpointReader, "get", None)  # no tensor is read
    with pytest.raises(CheckpointError, match=f"tokenizer.json: {text}"):
        convert_checkpoint(folder, tmp_path / "out", "awq")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["elsewhere in the folder", "blobs of the hub's cache"])
def test_linked_side_files_are_copied_and_folders_skipped(tmp_path, source, place):
    if place == "elsewhere in the folder":
        (source / "tokenizer.json").rename(source / "blob")
        (source / "tokenizer.json").symlink_to("blob")
    else:
        (tmp_path / "models--a--b" / "snapshots").mkdir(parents=True)
        (tmp_path / "models--a--b" / "blobs").mkdir()
        source = source.rename(tmp_path / "models--a--b" / "snapshots" / "0123")
        (source / "tokenizer.json").rename(tmp_path / "models--a--b" / "blobs" / "4567")
        (source / "tokenizer.json").symlink_to("../../blobs/4567")
    (source / "vocab.json").mkdir()
    write(tmp_path / "out", source)
    assert not (tmp_path / "out" / "tokenizer.json").is_symlink()
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"a": 1}'
    assert not (tmp_path / "out" / "vocab.json").exists()


@pytest.mark.parametrize("link", ["a file", "a folder", "a file of another model's cache"])
def test_link_to_private_file_is_refused_early(tmp_path, source, link):
    """A hostile folder would have its text published with the model."""
    private = tmp_path / "blobs" / "private"
    private.parent.mkdir()
    private.write_text("secret")
    name = "merges.txt"
    if link == "a folder":
        (source / "modules.json").write_text('[{"path": "1_Pooling"}]')
        (private.parent / "config.json").write_text('"secret"')
        (source / "1_Pooling").symlink_to(private.parent)
        name = "config.json"
    else:
        (source / "merges.txt").symlink_to("../blobs/private" if link != "a file" else private)
    with pytest.raises(CheckpointError, match=f"{name}: is a link out of the model's folder"):
        write(tmp_path / "out", source)
    assert not list((tmp_path / "out").glob("*"))


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o400])
def test_copied_files_keep_group_and_other_permissions(tmp_path, source, mode):
    (source / "tokenizer.json").chmod(mode)
    write(tmp_path / "out", source)
    found = stat.S_IMODE((tmp_path / "out" / "tokenizer.json").stat().st_mode)
    assert found & 0o077 == mode & 0o077 and found & 0o600 == 0o600


def test_sentence_transformers_files_are_copied(tmp_path, source):
    """modules.json, what it lists in folders of its own, and nothing from elsewhere."""
    modules = [{"path": p} for p in ("", "1_Pooling", "2_Normalize", "../beside", "..")]
    (source / "modules.json").write_text(json.dumps(modules))
    (source / "config_sentence_transformers.json").write_text("{}")
    for name in ("1_Pooling/config.json", "1_Pooling/pytorch_model.bin", "3_Other/config.json"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("{}")
    for outside in (source.parent / "beside" / "config.json", source.parent / "other.json"):
        outside.parent.mkdir(exist_ok=True)
        outside.write_text("{}")
    target = tmp_path / "there" / "out"
    target.parent.mkdir()
    write(target, source)
    files = {str(path.relative_to(target)) for path in target.rglob("*")}
    new = {
        "modules.json",
        "config_sentence_transformers.json",
        "1_Pooling",
        "1_Pooling/config.json",
    }
    assert new <= files
    assert not any("bin" in name or "Other" in name for name in files)
    assert not {"beside", "other.json"} & {path.name for path in target.parent.iterdir()}
    assert (target / "1_Pooling").stat().st_mode & 0o100


@pytest.mark.parametrize("size", [0, -1, "5GB"])
def test_invalid_shard_size_is_refused(tmp_path, size):
    with pytest.raises(
        CheckpointError, match="max_shard_bytes: expected a number of bytes.* found"
    ):
        CheckpointWriter(tmp_path / "out", max_shard_bytes=size)
    assert list(tmp_path.iterdir()) == []
