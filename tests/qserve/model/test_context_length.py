"""Which key of a config says how long a text may be, and what scaling makes of it."""

import json
import shutil

import pytest

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.engine.engine import Engine
from qserve.model.context_length import KEYS, ContextLength
from qserve.model.model_config import ModelConfig
from qserve.model.rope import RopeConfig


def rope(kind, **parameters):
    stated = {"rope_type": kind, "rope_theta": 10000.0, **parameters}
    return RopeConfig.from_dict(stated, dim=64, max_position=4096)


@pytest.mark.parametrize("key", KEYS)
def test_every_context_length_key_is_read(key):
    found = ContextLength.of({key: 777, "hidden_size": 64}, 2048, [rope("default")])
    assert (found.length, found.source) == (777, key)


def test_smallest_valid_context_length_is_used():
    stated = {"max_position_embeddings": 4096, "seq_length": 1024, "n_positions": None}
    stated |= {"max_seq_len": 0, "seq_len": True, "model_max_length": 1e30}
    found = ContextLength.of(stated, 2048, [])
    assert (found.length, found.source) == (1024, "seq_length")


def test_default_context_length():
    assert ContextLength.of({}, 2048, []).length == 2048


@pytest.mark.parametrize(
    ("ropes", "length"),
    [
        ([rope("linear", factor=4.0)], 16384),
        ([rope("yarn", factor=40, original_max_position_embeddings=4096)], 163840),
        ([rope("yarn", factor=2.5, original_max_position_embeddings=1000)], 2500),
        ([rope("dynamic", factor=4.0)], 4096),
        ([rope("llama3", factor=8.0, low_freq_factor=1, high_freq_factor=4)], 4096),
        ([rope("default"), None, rope("linear", factor=8)], 32768),
        ([None], 4096),
    ],
)
def test_scaling(ropes, length):
    assert ContextLength.of({"max_position_embeddings": 4096}, 2048, ropes).length == length


def test_folder_with_scaling(docs_5m, tmp_path):
    folder = shutil.copytree(docs_5m, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"max_position_embeddings": 512, "seq_length": 300}
    config["rope_scaling"] = {"rope_type": "yarn", "factor": 2.0}
    config["rope_scaling"]["original_max_position_embeddings"] = 300
    (folder / "config.json").write_text(json.dumps(config))
    assert ModelConfig.from_folder(folder).context.length == 600
    settings = {
        "model": str(folder),
        "device": "cpu",
        "num_gpu_blocks_override": 38,
        "admission": "fits",
    }
    assert Engine(EngineConfig(**settings)).max_model_len == 600
    with pytest.raises(InputError, match=r"2 to 600 \(config.json: seq_length, yarn rope scaling"):
        Engine(EngineConfig(max_model_len=601, **settings))


def test_too_large_scaling_factor_raises_one_error():
    parameters = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 1e38}
    rope = RopeConfig.from_dict(parameters, dim=64, max_position=512)
    with pytest.raises(InputError, match="config.json: expected at most 2147483647 positions"):
        ContextLength.of({"max_position_embeddings": 512}, 512, [rope])
