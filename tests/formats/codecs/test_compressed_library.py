"""The compressed-tensors library reads what we write as we do, config and tensors."""

import pytest
import torch

from formats.codecs import compressed_config, compressed_tensors
from formats.in_memory.weights import round_to_nearest, with_activation
from formats.quant_config import QuantConfig
from formats.scheme import Scheme

library = pytest.importorskip("compressed_tensors")

SCHEMES = [
    "w4a16-sym-g32",
    "w4a16-sym-channel",
    "w4a16-asym-g32",
    "w8a16-sym-g32",
    "w8a16-asym-g64",
    "w8a16-sym-channel",
    "w8a8",
    "w8a8-static",
    "w8a8-fp8",
    "w8a8-fp8-static",
    "w8a8-fp8-block",
    "w8a16-fp8",
]


def their_scheme(block: dict):
    """The library's own object of the group that "Linear" has."""
    config = library.QuantizationConfig.model_validate(block)
    (scheme,) = config.config_groups.values()
    return config, scheme


@pytest.mark.parametrize("name", SCHEMES)
def test_dequantized_weights_equal_library_decompression(name):
    from compressed_tensors.compressors import BaseCompressor

    scheme = Scheme.parse(name)
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    scale = 0.5 if "static" in name else None
    packed = with_activation(round_to_nearest(weight, scheme.weight), scheme, scale)
    schemes = {"model.layers.0.mlp.up_proj": scheme, "model.layers.0.mlp.down_proj": None}
    block = QuantConfig.of_modules("compressed-tensors", schemes).to_dict()
    config, theirs = their_scheme(block)
    assert config.format == compressed_tensors.layout_of(scheme)
    tensors = compressed_tensors.encode(packed)
    compressor = BaseCompressor.get_value_from_registry(config.format)
    # the library computes in the dtype of the scales
    tensors = {k: v.float() if k == "weight_scale" else v for k, v in tensors.items()}
    restored = compressor.decompress(tensors, theirs)["weight"]
    assert torch.equal(restored.float(), packed.dequantize())


def test_library_parses_written_groups_and_ignore_list():
    wide = Scheme.parse("w8a16-sym-g64")
    names = [f"model.layers.{i}.mlp.{n}" for i in range(3) for n in ("gate_proj", "down_proj")]
    schemes = dict.fromkeys(names, Scheme.parse("w4a16-sym"))
    schemes["model.layers.0.mlp.down_proj"] = None
    schemes["model.layers.2.mlp.down_proj"] = wide
    config = QuantConfig.of_modules("compressed-tensors", schemes)
    theirs = library.QuantizationConfig.model_validate(config.to_dict())
    assert QuantConfig.from_dict(config.to_dict()) == config

    from compressed_tensors.utils.match import is_match

    for name in names:
        assert config.scheme_for(name) == schemes[name], name
        linear = torch.nn.Linear(4, 4)
        ignored = any(is_match(name, linear, target) for target in theirs.ignore)
        assert ignored == (schemes[name] is None), name
        group = theirs.config_groups["group_1"].targets
        assert any(is_match(name, linear, target) for target in group) == (schemes[name] == wide)


@pytest.mark.parametrize("word", [*compressed_config.IN_ORDER, *compressed_config.REORDERED])
def test_actorder_values_match_library(word):
    """Since 0.19 the library refuses every word that means regrouped inputs; "dynamic" is one."""
    from compressed_tensors.quantization import QuantizationArgs

    args = {"num_bits": 4, "strategy": "group", "group_size": 32, "actorder": word}
    if word in compressed_config.REORDERED:
        with pytest.raises(ValueError, match="has been removed"):
            QuantizationArgs.model_validate(args)
    else:
        QuantizationArgs.model_validate(args)
