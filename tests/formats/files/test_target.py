"""Checks of the folder or file to write: free disk, mount points. They come before any work."""

import json
import shutil

import pytest
import torch

from formats.checkpoint import CheckpointReader, CheckpointWriter
from formats.convert import convert_checkpoint
from formats.errors import CheckpointError, DiskError
from formats.files import model_writer
from formats.files.model_writer import min_bytes
from formats.files.target import check_is_free
from formats.gguf.writing.export import export_gguf
from formats.save import save_quantized
from formats.scheme import Scheme
from qkernels import QuantLinear

SCHEME = Scheme.parse("w4a16-sym-g64")


@pytest.fixture
def free(monkeypatch):
    """free(n): from now on the disk has n free bytes, and no folder can be staged."""

    def leave(num_bytes):
        usage = shutil.disk_usage("/")._replace(free=num_bytes)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
        monkeypatch.setattr(model_writer, "CheckpointWriter", None)

    return leave


def layers(folder):
    reader = CheckpointReader(folder)
    names = [name for name in reader.entries if name.endswith("_proj.weight")]
    return {
        name.removesuffix(".weight"): QuantLinear.from_float(reader.get(name), SCHEME)
        for name in names
    }


def test_conversion_larger_than_free_space_is_refused_early(quantized_5m, tmp_path, free):
    free(1_000_000)
    wanted = "out: needs 5.* MB or more, but .* has 1.0 MB free .free some, or give a folder on"
    with pytest.raises(DiskError, match=wanted):
        convert_checkpoint(quantized_5m, tmp_path / "deep" / "out", "awq")
    with pytest.raises(DiskError, match="model.gguf: needs .* MB or more"):
        export_gguf(quantized_5m, tmp_path / "model.gguf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("output_format", ["awq", "compressed-tensors"])
def test_conversion_size_bound_is_below_written_size(
    quantized_5m, tmp_path, monkeypatch, output_format
):
    bounds = []
    monkeypatch.setattr(model_writer, "check_has_space", lambda _, least: bounds.append(least))
    done = convert_checkpoint(quantized_5m, tmp_path / "out", output_format)
    assert 0.8 * done.bytes_after < bounds[0] <= done.bytes_after


def test_save_quantized_larger_than_free_space_is_refused_early(docs_5m, tmp_path, free):
    given = layers(docs_5m)
    saved = save_quantized(tmp_path / "fits", docs_5m, given)
    least = min_bytes(CheckpointReader(docs_5m), dict.fromkeys(given, SCHEME))
    assert 0.9 * saved.num_bytes < least <= saved.num_bytes
    free(least - 1)
    with pytest.raises(DiskError, match="out: needs .* or more"):
        save_quantized(tmp_path / "out", docs_5m, given)
    assert [path.name for path in tmp_path.iterdir()] == ["fits"]


def test_loop_of_links_as_target_is_refused(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(CheckpointError, match=r"a: is a link that leads back to itself"):
        check_is_free(tmp_path / "a")


def test_mount_point_as_target_is_refused_with_suggestion(tmp_path, monkeypatch):
    """A volume of a container; a rename cannot replace it."""
    volume, plain = tmp_path / "volume", tmp_path / "plain"
    volume.mkdir()
    plain.mkdir()
    monkeypatch.setattr(type(volume), "is_mount", lambda path: path == volume)
    for given in (volume, tmp_path / "plain" / ".." / "volume"):
        with pytest.raises(CheckpointError, match=r"volume: is a mount point, .*volume/model\)"):
            CheckpointWriter(given)
    for given in (plain, volume / "model"):
        check_is_free(given)
    with CheckpointWriter(volume / "model") as writer:
        writer.add("a", torch.ones(2))
        (plain / "config.json").write_text(json.dumps({}))
        (plain / "tokenizer.json").write_text("{}")
        writer.seal({}, side_files_from=plain)
        writer.publish()
    assert (volume / "model" / "config.json").exists()


@pytest.mark.parametrize("given", [".", "", "../here"])
def test_the_current_folder_is_refused(tmp_path, monkeypatch, given):
    """A rename over it would leave the user's shell in a folder that does not exist."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    with pytest.raises(CheckpointError, match=r"is the current folder, .* \(give a new folder\)"):
        check_is_free(given)
    check_is_free("new")
