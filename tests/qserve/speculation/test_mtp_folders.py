"""Quantize, convert and inspect: a layer for drafts stays unchanged, and they report it."""

import json

import pytest
import torch

from calibrate.pipeline import quantize_checkpoint
from formats.checkpoint import CheckpointReader
from formats.convert import convert_checkpoint
from formats.inspection.inspect import inspect_checkpoint
from formats.quant_config import BLOCK, QuantConfig
from formats.scheme import Scheme
from qserve.config import EngineConfig
from qserve.engine.engine import Engine
from tests.qserve.model.variants import edited
from tests.qserve.speculation.mtp_model import PREFIX, make_mtp
from tests.qserve.speculation.traces import make_engine, make_requests, run


@pytest.fixture(scope="module")
def source(tmp_path_factory, docs_5m):
    folder = tmp_path_factory.mktemp("next_token") / "model"
    return make_mtp(folder, docs_5m, agreement=0.7, vocab_size=8192)


@pytest.fixture(scope="module")
def quantized(source):
    """(the folder, what the run reported)"""
    folder = source.parent / "w4a16"
    report = quantize_checkpoint(source, folder, scheme=Scheme.parse("w4a16-sym-g32"))
    return folder, report


def of_layer(folder):
    reader = CheckpointReader(folder)
    return {name: reader.get(name) for name in reader.entries if name.startswith(PREFIX)}


def assert_kept(folder, source):
    want, found = of_layer(source), of_layer(folder)
    assert want.keys() == found.keys() and len(want) > 30
    assert all(torch.equal(want[name], found[name]) for name in want)


def test_quantize_keeps_mtp_layer_bitwise_and_reports_it(source, quantized):
    folder, report = quantized
    assert_kept(folder, source)
    left = {name for name in report.left_in_float if name.startswith(PREFIX)}
    assert left == set(report.left_in_float)
    assert {f"{PREFIX}eh_proj", f"{PREFIX}shared_head.head"} < left
    assert f"{PREFIX}mlp.experts.7.down_proj" in left and f"{PREFIX}embed_tokens" not in left
    assert "and 25 more: belongs to a draft layer" in report.to_text()
    # others than us follow the block: it has to name every one of them, and none of the model's
    stated = json.loads((folder / "config.json").read_text())[BLOCK]
    assert stated["ignore"] == ["lm_head", r"re:^model\.layers\.(?:3)\."]
    block = QuantConfig.from_dict(stated)
    assert all(block.scheme_for(name) is None for name in left)
    assert block.scheme_for("model.layers.2.mlp.experts.7.down_proj") is not None


@pytest.mark.parametrize("name", ["gptq", pytest.param("awq", marks=pytest.mark.exhaustive)])
def test_convert_keeps_mtp_layer(name, source, quantized, tmp_path):
    convert_checkpoint(quantized[0], tmp_path / "x", name)
    assert_kept(tmp_path / "x", source)


@pytest.mark.exhaustive
def test_quantized_model_drafts_with_its_float_layer(source, quantized):
    """Also where another tool left the layer out, and the float model's folder has it."""
    bare = edited(quantized[0], source.parent / "bare", without_layer)
    requests = make_requests(1, 4, ("greedy", "sampled"))
    found = [run(make_engine(bare), requests)]
    for folder, model in ((quantized[0], None), (bare, str(source))):
        config = json.dumps({"method": "mtp", "model": model})
        engine = make_engine(folder, speculative_config=config)
        found.append(run(engine, requests))
        verifies, _, *accepted = engine.scheduler.speculation.take_counts()
        assert 0 < accepted[0] < verifies
    assert found[0] == found[1] == found[2]


def test_dummy_weights_include_mtp_layer(source):
    config = EngineConfig(
        model=str(source),
        device="cpu",
        load_format="dummy",
        speculative_config='{"method": "mtp"}',
        max_model_len=64,
        num_gpu_blocks_override=20,
        admission="fits",
    )
    found = run(Engine(config), make_requests(1, 2, ("greedy",)))
    assert all(tokens for tokens, _, _ in found.values())


def without_layer(state):
    for name in [name for name in state if name.startswith(PREFIX)]:
        del state[name]


def test_inspect_reports_mtp_layer_support(source, quantized, tmp_path):
    for folder in (source, quantized[0]):
        found = inspect_checkpoint(folder)
        assert found.draft_layers.layers == ("model.layers.3",) and found.ok
        assert 'model.layers.3, 4.6 MB; --speculative-config \'{"method": "mtp"}\'' in (
            found.to_text()
        )
        assert json.loads(json.dumps(found.to_dict()))["draft_layers"]["stated"] == 1
    none = edited(source, tmp_path / "none", without_layer)
    assert "draft layers: none, config.json states 1" in inspect_checkpoint(none).to_text()
    part = edited(source, tmp_path / "part", lambda s: s.pop(f"{PREFIX}mlp.gate.weight"))
    text = inspect_checkpoint(part).to_text()
    assert "unusable: model.layers.3.mlp.gate.weight is missing" in text


@pytest.mark.parametrize("count", [None, 0, -1, "1", True, [1], 1e9, 10**12])
def test_invalid_mtp_layer_count_does_not_break_inspect(count, source, tmp_path):
    change = {"num_nextn_predict_layers": count}
    folder = edited(source, tmp_path / "x", config=lambda config: config.update(change))
    found = inspect_checkpoint(folder)
    assert (found.draft_layers is not None) == (count == 10**12)
