"""A file that is replaced: what was there stays until the new one is whole."""

from pathlib import Path

import pytest

from formats.files.atomic_file import write_atomic


def test_old_file_survives_failed_write(tmp_path, monkeypatch):
    place = tmp_path / "new" / "table.json"
    write_atomic(place, "old")
    assert place.read_text() == "old"
    real = Path.write_text

    def half(path, text, **options):
        real(path, text[:1], **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="No space"):
        write_atomic(place, "brand new")
    assert place.read_text() == "old"
    assert [path.name for path in place.parent.iterdir()] == ["table.json"]
