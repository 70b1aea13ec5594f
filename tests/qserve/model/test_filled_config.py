"""transformers' defaults for a config.json are computed once, and equal a second computation."""

import json

import pytest

from qserve.model import filled_config as module
from qserve.model.filled_config import filled_config

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "rope_theta": 5e5}


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".cache" / "qserve" / "configs"


@pytest.fixture
def asked(monkeypatch):
    """The configs that were passed to transformers."""
    seen, ask = [], module._by_transformers

    def count(stated):
        seen.append(stated)
        return ask(stated)

    monkeypatch.setattr(module, "_by_transformers", count)
    return seen


def test_filled_config_is_cached(asked, folder):
    first = filled_config(LLAMA)
    assert first["num_key_value_heads"] == 4 and first["rope_parameters"]["rope_theta"] == 5e5
    assert filled_config(dict(reversed(LLAMA.items()))) == first
    assert len(asked) == 1 and len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("key, value", [("hidden_size", 128), ("rms_norm_eps", 0.5)])
def test_changed_config_is_filled_again(asked, key, value):
    filled_config(LLAMA)
    assert filled_config(LLAMA | {key: value})[key] == value
    assert len(asked) == 2


def test_other_transformers_version_fills_again(asked, monkeypatch):
    filled_config(LLAMA)
    monkeypatch.setattr(module, "_version", lambda: "99")
    filled_config(LLAMA)
    assert len(asked) == 2


@pytest.mark.parametrize("damage", ["", "{", "[]", "\udcff"])
def test_damaged_cache_file_is_rebuilt(asked, folder, damage):
    first = filled_config(LLAMA)
    (place,) = folder.iterdir()
    place.write_bytes(damage.encode(errors="surrogateescape"))
    assert filled_config(LLAMA) == first and len(asked) == 2
    assert json.loads(place.read_text()) == first


def test_unwritable_cache_is_ignored(asked, folder):
    folder.parent.mkdir(parents=True)
    folder.write_text("a file where the folder should be")
    assert filled_config(LLAMA) == filled_config(LLAMA) and len(asked) == 2


def test_refused_config_is_not_cached(folder):
    with pytest.raises(ValueError, match="no_such_model"):
        filled_config({"model_type": "no_such_model"})
    assert not folder.exists()
