"""The quantization_config block there and back; blocks that cannot be loaded name the key."""

import pytest

from formats.errors import CheckpointError, InputError
from formats.quant_config import QuantConfig
from formats.scheme import Scheme


@pytest.mark.parametrize(
    "name", ["w4a16-sym", "w4a16-asym-g64", "w8a16-sym-channel", "w3a16-sym", "w8a8"]
)
def test_block_round_trips(name):
    config = QuantConfig(scheme=Scheme.parse(name), quantizer="tool:1")
    block = config.to_dict()
    assert QuantConfig.from_dict(block) == config
    assert QuantConfig.from_dict(block).to_dict() == block


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quant_method", "bitsandbytes"),
        ("quant_method", ["gptq"]),
        ("quant_method", None),
        ("bits", 5),
        ("bits", "4"),
        ("checkpoint_format", "marlin"),
        ("group_size", "128"),
        ("group_size", None),
        ("sym", "yes"),
        ("dynamic", []),
        ("dynamic", {"+:.*mlp.*": 3}),
        ("dynamic", {"+:.*mlp.*": {"bits": 5}}),
        ("modules_in_block_to_quantize", {"a": 1}),
        ("modules_in_block_to_quantize", [[1]]),
        ("lm_head", "yes"),
        ("pack_dtype", "int64"),
        ("qserve", {"act": {"bits": 4}}),
    ],
)
def test_value_that_cannot_be_loaded_names_its_key(key, value):
    block = {**QuantConfig(scheme=Scheme.parse("w4a16-sym")).to_dict(), key: value}
    with pytest.raises(CheckpointError, match=f"quantization_config.{key}"):
        QuantConfig.from_dict(block)


@pytest.mark.parametrize("key", ["bits", "group_size", "sym"])
def test_missing_required_key_is_named(key):
    block = QuantConfig(scheme=Scheme.parse("w4a16-sym")).to_dict()
    del block[key]
    with pytest.raises(CheckpointError, match=f"quantization_config.{key}: missing"):
        QuantConfig.from_dict(block)


@pytest.mark.parametrize("meta", [None, {}, {"quantizer": []}, {"quantizer": "x:1"}, "text", [1]])
def test_other_tools_meta_is_no_reason_to_fail(meta):
    block = {**QuantConfig(scheme=Scheme.parse("w4a16-sym")).to_dict(), "meta": meta}
    assert QuantConfig.from_dict(block).scheme == Scheme.parse("w4a16-sym")


@pytest.mark.parametrize("block", [None, [], "gptq"])
def test_block_of_another_type_is_refused(block):
    with pytest.raises(CheckpointError, match="quantization_config"):
        QuantConfig.from_dict(block)


def test_odd_group_size_is_an_input_error():
    block = {**QuantConfig(scheme=Scheme.parse("w4a16-sym")).to_dict(), "group_size": 100}
    with pytest.raises(InputError, match="group size"):
        QuantConfig.from_dict(block)


@pytest.mark.parametrize("stated", [True, False])
def test_the_head_has_a_scheme_only_where_it_is_stated(stated):
    config = QuantConfig(scheme=Scheme.parse("w4a16-sym"), lm_head=stated)
    read = QuantConfig.from_dict(config.to_dict())
    assert (read.scheme_for("lm_head") is not None) == stated
