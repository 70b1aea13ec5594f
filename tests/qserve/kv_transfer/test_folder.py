"""The folder of KV pages: what comes back is what went in, or nothing."""

import os
import threading
from hashlib import sha256

import pytest

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.kv_transfer.config import KvTransferConfig
from qserve.kv_transfer.connector import make_connector
from qserve.kv_transfer.folder import OVERHEAD, FolderConnector

SIZE = 1000


def key(number):
    return sha256(bytes([number])).digest()


def page(number):
    return memoryview(bytes([number]) * SIZE)


def connector(path, *, size=SIZE, **settings):
    return FolderConnector.from_settings({"path": str(path), **settings}, size)


def load(folder, number):
    found = memoryview(bytearray(SIZE))
    return bytes(found) if folder.load(key(number), found) else None


def file_of(path, number):
    name = key(number).hex()
    return path / name[:2] / f"{name}.kv"


def test_second_connector_matches_up_to_first_gap(tmp_path):
    first, second = connector(tmp_path / "kv"), connector(tmp_path / "kv")
    for number in (1, 2, 4):
        first.save(key(number), page(number))
    assert second.match([key(n) for n in (1, 2, 3, 4)]) == 2
    assert second.match([key(9)]) == 0 and second.match([]) == 0
    assert load(second, 4) == bytes(page(4)) and load(second, 3) is None
    assert not list((tmp_path / "kv").rglob("*.partial"))


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


# name -> change of the file of page 1, with page 2 next to it
DAMAGE = {
    "a bit of the page": lambda path, other: flip(path, 500),
    "a bit of the checksum": lambda path, other: flip(path, -1),
    "the magic": lambda path, other: flip(path, 0),
    "cut off": lambda path, other: os.truncate(path, SIZE),
    "empty": lambda path, other: os.truncate(path, 0),
    "too long": lambda path, other: path.write_bytes(path.read_bytes() + b"x"),
    "another page under its name": lambda path, other: path.write_bytes(other.read_bytes()),
    "a link": lambda path, other: (path.unlink(), path.symlink_to(other)),
    "a pipe": lambda path, other: (path.unlink(), os.mkfifo(path)),
    "a folder": lambda path, other: (path.unlink(), path.mkdir()),
    "a folder that holds something": lambda path, other: (
        path.unlink(),
        path.mkdir(),
        (path / "note").write_text("mine"),
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_invalid_files_are_refused_and_replaced(damage, tmp_path):
    folder = connector(tmp_path)
    for number in (1, 2):
        folder.save(key(number), page(number))
    path = file_of(tmp_path, 1)
    DAMAGE[damage](path, file_of(tmp_path, 2))
    assert load(folder, 1) is None
    assert load(folder, 2) == bytes(page(2))
    assert not path.exists() and not path.is_symlink()
    folder.save(key(1), page(1))
    assert load(folder, 1) == bytes(page(1))
    if damage == "a folder that holds something":
        assert [each.read_text() for each in path.parent.glob("*.not-a-page/note")] == ["mine"]


def test_folder_instead_of_page_is_replaced_on_save(tmp_path):
    """Without a load before it."""
    folder = connector(tmp_path)
    path = file_of(tmp_path, 1)
    path.mkdir(parents=True)
    assert folder.match([key(1)]) == 0
    folder.save(key(1), page(1))
    assert load(folder, 1) == bytes(page(1))


def test_symlinked_subfolder_is_not_followed(tmp_path):
    folder, elsewhere = connector(tmp_path / "kv"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    file_of(tmp_path / "kv", 1).parent.symlink_to(elsewhere)
    with pytest.raises(OSError, match="is a link"):
        folder.save(key(1), page(1))
    assert not list(elsewhere.iterdir())


def test_files_without_secret_are_refused(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("a secret of 24 characters\n")
    other = connector(tmp_path / "kv")
    ours = connector(tmp_path / "kv", secret_file=str(secret))
    other.save(key(1), page(1))
    assert load(ours, 1) is None
    ours.save(key(1), page(1))
    assert load(ours, 1) == bytes(page(1)) and load(other, 1) is None


def test_pages_of_other_size_are_missing(tmp_path):
    """The key says the size too; where it lied, nothing would be read beyond a page."""
    connector(tmp_path, size=SIZE - 1).save(key(1), page(1)[1:])
    assert connector(tmp_path).match([key(1)]) == 0 and load(connector(tmp_path), 1) is None


def test_folder_evicts_least_recently_used_at_limit(tmp_path):
    most = 40 * (SIZE + OVERHEAD)
    folder = connector(tmp_path, max_gb=most / 2**30)
    for number in range(100):
        folder.save(key(number), page(number))
        os.utime(file_of(tmp_path, number), (number, number))
        assert load(folder, 0) is not None, "it is used all the time"
    sizes = [path.stat().st_size for path in tmp_path.rglob("*.kv")]
    assert len(sizes) >= 30 and sum(sizes) <= most * 1.1
    assert load(folder, 99) is not None and load(folder, 1) is None


def test_files_of_killed_writer_expire(tmp_path):
    connector(tmp_path).save(key(1), page(1))
    old, new = (file_of(tmp_path, 1).with_name(f"{name}.partial") for name in "ab")
    for path in (old, new):
        path.write_bytes(b"half a page")
    os.utime(old, (0, 0))
    connector(tmp_path)
    assert not old.exists() and new.exists()


def test_concurrent_writers_do_not_disturb_readers(tmp_path):
    folders = [connector(tmp_path) for _ in range(4)]
    failures = []

    def work(folder):
        for round_number in range(30):
            folder.save(key(round_number % 5), page(round_number % 5))
            found = load(folder, (round_number + 1) % 5)
            if found not in (None, bytes(page((round_number + 1) % 5))):
                failures.append(found)

    threads = [threading.Thread(target=work, args=(folder,)) for folder in folders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and folders[0].match([key(n) for n in range(5)]) == 5


def test_failed_save_leaves_no_file(tmp_path, monkeypatch):
    folder = connector(tmp_path)

    def full(*paths):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        folder.save(key(1), page(1))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


# name -> text of the flag, what the error says
REFUSED = {
    "no JSON": ("folder", "expected a JSON object"),
    "a list": ("[]", "expected a JSON object"),
    "no connector": ("{}", "kv_connector: expected folder"),
    "unknown key": ('{"kv_connector": "folder", "kv_port": 1}', "kv_port"),
    "role": ('{"kv_connector": "folder", "kv_role": "both"}', "kv_role: expected one of"),
    "policy": ('{"kv_connector": "folder", "kv_load_failure_policy": "fail"}', "recompute"),
    "extra": ('{"kv_connector": "folder", "kv_connector_extra_config": 1}', "expected an object"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unreadable_config_is_refused(case):
    text, error = REFUSED[case]
    with pytest.raises(InputError, match=error):
        EngineConfig(model="m", kv_transfer_config=text)


def test_connector_requires_prefix_cache():
    text = '{"kv_connector": "folder"}'
    with pytest.raises(InputError, match="requires the prefix cache"):
        EngineConfig(model="m", kv_transfer_config=text, enable_prefix_caching=False)


# extra config -> what the error says
BAD_SETTINGS = [
    ({}, "path: expected a folder"),
    ({"path": 3}, "path: expected a folder"),
    ({"path": "/dev/null/x"}, "cannot be used"),
    ({"path": "kv", "max_gb": 0}, "expected a number above 0"),
    ({"path": "kv", "max_gb": True}, "expected a number above 0"),
    ({"path": "kv", "max_gb": float("nan")}, "expected a number above 0"),
    ({"path": "kv", "size": 1}, "unknown keys: size"),
    ({"path": "kv", "secret_file": "/nowhere"}, "secret_file: cannot be read"),
    ({"path": "kv", "secret_file": "/dev/null"}, "expected 16 to 64 bytes, found 0"),
]


@pytest.mark.parametrize(("settings", "error"), BAD_SETTINGS)
def test_invalid_settings_are_refused(settings, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=error):
        make_connector(KvTransferConfig(connector="folder", extra=settings), SIZE)


def test_vllm_names_of_a_shared_folder_are_read(tmp_path):
    text = (
        '{"kv_connector": "SharedStorageConnector", "kv_role": "kv_producer", "engine_id": "7",'
        f' "kv_connector_extra_config": {{"shared_storage_path": "{tmp_path}"}}}}'
    )
    config = KvTransferConfig.parse(text)
    assert config.saves and not config.loads and config.answers_after_saving
    assert make_connector(config, SIZE).path == tmp_path


@pytest.mark.parametrize(
    ("name", "error"), [("nothing", "expected one of folder"), ("os.path:no", "cannot be imported")]
)
def test_unknown_connector_is_refused(name, error):
    with pytest.raises(InputError, match=error):
        make_connector(KvTransferConfig(connector=name), SIZE)
