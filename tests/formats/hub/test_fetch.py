"""Downloads from a hub on loopback, and starts from the cache without it."""

import errno
import shutil
import threading
import time
from collections import namedtuple
from pathlib import Path

import pytest

from formats.errors import CheckpointError, DiskError, InputError
from formats.files.side_files import find_side_files
from formats.hub import errors
from formats.hub.fetch import local_path
from formats.hub.name import HubName
from formats.hub.selection import ADAPTER, DRAFTER, SHAPES, TOKENIZER
from tests.formats.hub.conftest import CONFIG, NEEDED, WEIGHTS, index
from tests.local_hub import TOKEN, Repo

INDEX = "model.safetensors.index.json"
SHARDS = {f"model-0000{i}-of-00002.safetensors": WEIGHTS + bytes([i]) for i in (1, 2)}
SHARDED = {**NEEDED, **SHARDS, INDEX: index(*SHARDS), "model-00003-of-00003.safetensors": b"old"}


def stored(folder) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in Path(folder).rglob("*") if p.is_file()}


def fails(name, *words, kind=None, **settings):
    with pytest.raises(InputError) as caught:
        local_path(name, *([kind] if kind else []), **settings)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 700 and text.endswith(")"), text
    for word in words:
        assert word in text
    return caught.value


def test_needed_files_are_fetched_once(hub):
    folder = local_path("org/model")
    assert stored(folder) == {*NEEDED, "model.safetensors"}
    assert (Path(folder) / "model.safetensors").read_bytes() == WEIGHTS
    assert not any(name.endswith((".py", ".bin", ".pth", ".gguf")) for name in hub.fetched())
    hub.requests.clear()
    assert local_path("org/model") == folder
    assert hub.requests == [("GET", "/api/models/org/model")]


def test_index_selects_fetched_weights(hub):
    hub.repos["org/model"] = Repo(files=SHARDED)
    assert stored(local_path("org/model")) == {*NEEDED, *SHARDS, INDEX}


def test_cache_links_are_side_files(hub):
    folder = Path(local_path("org/model"))
    assert (folder / "tokenizer.json").is_symlink()
    assert Path("tokenizer.json") in find_side_files(folder)
    files = {f"inner/{name}": content for name, content in NEEDED.items()}
    hub.repos["org/model"] = Repo(files={**files, "inner/model.safetensors": WEIGHTS})
    inner = Path(local_path("org/model", subfolder="inner"))
    assert inner.name == "inner" and (inner / "tokenizer.json").is_symlink()
    assert Path("tokenizer.json") in find_side_files(inner)
    assert stored(inner) == {*NEEDED, "model.safetensors"}
    (inner / "tokenizer.json").unlink()
    (inner / "tokenizer.json").symlink_to("/etc/passwd")
    with pytest.raises(CheckpointError, match="is a link out of the model's folder"):
        find_side_files(inner)


@pytest.mark.parametrize("subfolder", ["..", "a/../b", "", "a//b", "a\\b"])
def test_subfolder_files_are_fetched(hub, tmp_path, subfolder):
    fails("org/model", "--subfolder: expected a folder of", subfolder=subfolder)
    fails(str(tmp_path), "--subfolder: expected a folder of", subfolder=subfolder)
    assert not hub.requests


def test_local_path_makes_no_request(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("org/model/inner").mkdir(parents=True)
    assert local_path("org/model") == "org/model"
    assert local_path("org/model", subfolder="inner") == "org/model/inner"
    assert local_path(tmp_path) == str(tmp_path)
    fails("org/model", "--revision: applies to hub names, but org/model is a", revision="main")
    fails("org/model", "--subfolder: there is no folder org/model/other", subfolder="other")
    for path in ("./no/model", "/no/model", "no", "../no/model", "~/model", "a/b/c", "no/model/"):
        fails(path, f"{path}: no such folder (check the path; a hub name has the form ORG/NAME")
    fails("./no.gguf", "./no.gguf: no such file")
    assert not hub.requests


@pytest.mark.parametrize("revision", ["v2", "refs/pr/1"])
def test_revision_selects_branch_or_commit(hub, revision):
    hub.repos["org/model"].branches[revision] = {**SHARDED, "config.json": CONFIG + b" "}
    main = local_path("org/model")
    other = local_path(f"org/model@{revision}")
    assert other == local_path("org/model", revision=revision) != main
    assert (Path(other) / "config.json").read_bytes() == CONFIG + b" "
    hub.requests.clear()
    assert local_path(f"org/model@{Path(main).name}") == main
    assert not hub.requests  # a commit in the cache cannot have changed


def test_moved_branch_is_fetched_again(hub):
    old = local_path("org/model")
    hub.repos["org/model"] = Repo(files={**SHARDED})
    new = local_path("org/model")
    assert new != old and stored(new) == {*NEEDED, *SHARDS, INDEX}


def test_cached_commit_without_tokenizer_is_completed(hub):
    folder = Path(local_path("org/model"))
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").unlink()
    assert local_path(f"org/model@{folder.name}") == str(folder)
    assert (folder / "tokenizer.json").is_file()


def test_download_dir_is_used(hub, tmp_path):
    folder = Path(local_path("org/model", download_dir=tmp_path / "other"))
    assert folder.is_relative_to(tmp_path / "other") and not (tmp_path / "home").exists()


@pytest.mark.parametrize("how", ["offline", "no network", "out of order"])
def test_complete_snapshot_needs_no_network(hub, monkeypatch, caplog, how):
    from huggingface_hub import constants

    hub.repos["org/model"].branches["v2"] = SHARDED
    folders = [local_path("org/model"), local_path("org/model@v2")]
    if how == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    elif how == "no network":
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    else:
        hub.status = 503
    hub.requests.clear()
    assert [local_path("org/model"), local_path("org/model@v2")] == folders
    assert ("cannot be reached; using the copy" in caplog.text) == (how != "offline")
    assert how == "out of order" or not hub.requests
    Path(folders[1], "model-00002-of-00002.safetensors").unlink()
    cause = "HF_HUB_OFFLINE forbids" if how == "offline" else "cannot be reached: "
    fails("org/model@v2", "org/model@v2: is not in the cache", cause)
    fails("org/other", "org/other: is not in the cache", cause)


def test_invalid_names_are_refused(hub, monkeypatch):
    hub.repos["org/gated"] = Repo(files=SHARDED, gated=True)
    hub.repos["org/private"] = Repo(files=SHARDED, private=True)
    fails("org/nothing", "there is no such folder, and no such model on", "check the spelling")
    fails("org/model@no", "org/model@no: has no revision no (see ")
    fails("org/private", "org/private: there is no such folder", "private model set HF_TOKEN")
    fails("org/gated", "org/gated: is gated: its owner must grant access", "then set HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name in ("org/gated", "org/private"):
        assert stored(local_path(name)) == {*NEEDED, *SHARDS, INDEX}
    hub.status = 401
    assert TOKEN not in str(fails("org/gated", "the hub rejects the token (401)", "set HF_TOKEN"))
    hub.status = 429
    fails("org/gated", "rate limit is reached (429)")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"pytorch_model.bin": b"x"}, "has only pickled weights"),
        ({INDEX: index("../x.safetensors")}, "names '../x.safetensors', which is not a"),
        ({INDEX: index(*SHARDS)}, f"lacks {next(iter(SHARDS))}, which its {INDEX} lists"),
        ({INDEX: b"{"}, "is not a JSON object"),
    ],
)
def test_unused_weights_are_not_fetched(hub, files, words):
    hub.repos["org/model"] = Repo(files={**NEEDED, **files})
    fails("org/model", words)
    assert "pytorch_model.bin" not in hub.fetched()


def test_draft_head_torch_files_are_fetched(hub):
    head = {"config.json": b'{"medusa_num_heads": 3}', "medusa_lm_head.pt": b"x"}
    hub.repos["org/head"] = Repo(files=head)
    assert stored(local_path("org/head")) == {*head}
    # EAGLE's first heads have a plain config: only the kind says that it is one.
    head = {"config.json": CONFIG, "pytorch_model.bin": b"x"}
    hub.repos["org/eagle"] = Repo(files=head)
    assert stored(local_path("org/eagle", DRAFTER)) == {*head}


def test_repository_kind_selects_files(hub, monkeypatch):
    assert stored(local_path("org/model", TOKENIZER)) == {*NEEDED}
    assert stored(local_path("org/model", SHAPES)) == {*NEEDED}
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    local_path("org/model", TOKENIZER)
    fails("org/model", "is not in the cache")  # its weights are not
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    adapter = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}
    hub.repos["org/adapter"] = Repo(files={**adapter, "optimizer.pt": b"x", "README.md": b""})
    assert stored(local_path("org/adapter", ADAPTER)) == {*adapter}
    fails("org/adapter", "has no tokenizer: none of tokenizer.json", kind=TOKENIZER)
    fails("org/model", "has no adapter_config.json", kind=ADAPTER)
    fails("org/adapter", "has no config.json")


def test_gguf_name_and_type_select_files(hub, monkeypatch):
    parts = {f"m-Q8_0-0000{i}-of-00002.gguf": WEIGHTS + bytes([i]) for i in (1, 2)}
    hub.repos["org/gguf"] = Repo(files={"m-Q4_0.gguf": WEIGHTS, **parts, "README.md": b""})
    path = Path(local_path("org/gguf:m-Q4_0.gguf"))
    assert path.read_bytes() == WEIGHTS and stored(path.parent) == {"m-Q4_0.gguf"}
    first = Path(local_path("org/gguf:Q8_0"))
    assert first.name == "m-Q8_0-00001-of-00002.gguf"
    assert stored(first.parent) == {"m-Q4_0.gguf", *parts}
    fails("org/gguf", "several GGUF files match; it has m-Q4_0.gguf, m-Q8_0-00001")
    fails("org/gguf:Q5_K", "no GGUF file matches")
    fails("org/gguf:Q4_0", "--subfolder: does not apply", subfolder="a")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert local_path("org/gguf:Q8_0") == str(first)
    (first.parent / "m-Q8_0-00002-of-00002.gguf").unlink()
    fails("org/gguf:Q8_0", "is not in the cache")


def test_concurrent_fetches_download_each_file_once(hub):
    hub.repos["org/model"] = Repo(files=SHARDED)
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(local_path("org/model"))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and len(found) == 3
    large = [path for _, path in hub.requests if path.startswith("/store/")]
    assert len(large) == len(set(large)) == len(SHARDS)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"num_cuts": 99}, "org/model: the download broke off: "),
        ({"surplus": b"x"}, "org/model: cannot be downloaded: Consistency check failed"),
    ],
)
def test_damaged_downloads_are_rejected(hub, tmp_path, monkeypatch, fault, words):
    monkeypatch.setattr(time, "sleep", lambda _: None)  # between the client's attempts
    for name, value in fault.items():
        setattr(hub, name, value)
    fails("org/model", words, "run the same command again")
    assert not [*tmp_path.rglob("model.safetensors")]
    hub.num_cuts, hub.surplus = 1, b""
    assert (Path(local_path("org/model")) / "model.safetensors").read_bytes() == WEIGHTS


def test_full_disk_is_detected_before_download(hub, monkeypatch):
    usage = namedtuple("usage", "total used free")(100, 99, 1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage)
        error = fails("org/model", "needs 131.1 kB", "has 1 B free", "--download-dir")
    assert isinstance(error, DiskError) and "model.safetensors" not in hub.fetched()
    local_path("org/model")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    local_path("org/model")  # needs no more space


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "org/model: no space left in /cache (free some, or choose another"),
        (errno.EACCES, "org/model: cannot be written to /cache: Permission denied (choose"),
    ],
)
def test_disk_errors_name_the_cause(number, words):
    error = OSError(number, "reason", "/cache/x")
    found = errors.explained(error, HubName(repo="org/model"), "model", "/cache")
    assert isinstance(found, DiskError) and words in str(found)
