"""The quantization_config block there and back; blocks that cannot be loaded name the key."""

from dataclasses import replace

import pytest

from formats.errors import CheckpointError, InputError
from formats.quant_config import QuantConfig
from formats.rules import Rule, first_match, float_modules
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
        ("quant_method", "exl3"),
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
def test_invalid_value_error_names_key(key, value):
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
def test_unknown_meta_is_ignored(meta):
    block = {**QuantConfig(scheme=Scheme.parse("w4a16-sym")).to_dict(), "meta": meta}
    assert QuantConfig.from_dict(block).scheme == Scheme.parse("w4a16-sym")


@pytest.mark.parametrize("block", [None, [], "gptq"])
def test_quantization_config_of_wrong_type_is_refused(block):
    with pytest.raises(CheckpointError, match="quantization_config"):
        QuantConfig.from_dict(block)


def test_odd_group_size_is_an_input_error():
    block = {**QuantConfig(scheme=Scheme.parse("w4a16-sym")).to_dict(), "group_size": 100}
    with pytest.raises(InputError, match="group size"):
        QuantConfig.from_dict(block)


@pytest.mark.parametrize("stated", [True, False])
def test_head_scheme_requires_explicit_entry(stated):
    config = QuantConfig(scheme=Scheme.parse("w4a16-sym"), lm_head=stated)
    read = QuantConfig.from_dict(config.to_dict())
    assert (read.scheme_for("lm_head") is not None) == stated


def compressed(name: str = "w4a16-sym", **changes) -> dict:
    """A compressed-tensors block; a key is of the block, or "weights__key" of its group."""
    block = QuantConfig(scheme=Scheme.parse(name), method="compressed-tensors").to_dict()
    group = block["config_groups"]["group_0"]
    for key, value in changes.items():
        part, _, inner = key.rpartition("__")
        place = {"": block, "group": group}[part] if part in ("", "group") else group[part]
        place[inner] = value
    return block


def rotation(*locations: str) -> dict:
    applied = [{"targets": ["re:.*o_proj$"], "location": place} for place in locations]
    return {"type": "hadamard", "apply": applied, "head_dim": 16}


@pytest.mark.parametrize(
    "locations", [["weight_input"], ["weight_output", "weight_input"], ["input"], ["q_attn"]]
)
def test_offline_rotations_are_read(locations):
    """The library's own TransformArgs.is_online is the judge of what is left to do."""
    transform = pytest.importorskip("compressed_tensors.transform")
    block = {"config_groups": {"R1": rotation("weight_output"), "R2": rotation(*locations)}}
    theirs = transform.TransformConfig.model_validate(block)
    online = any(a.is_online() for group in theirs.config_groups.values() for a in group.apply)
    if not online:
        config = QuantConfig.from_dict(compressed(transform_config=block))
        assert config == QuantConfig.from_dict(compressed())
        return
    with pytest.raises(CheckpointError, match=f"R2: 'hadamard' at '{locations[0]}' is applied at"):
        QuantConfig.from_dict(compressed(transform_config=block))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("w4a16-sym", {"sparsity_config": {"format": "dense", "sparsity_structure": "2:4"}}),
        ("w4a16-sym", {"sparsity_config": {"format": "", "targets": []}}),
        ("w4a16-sym", {"sparsity_config": None, "transform_config": {"config_groups": {}}}),
        ("w4a16-sym", {"format": None, "group__format": None}),
        ("w4a16-sym", {"format": "mixed-precision"}),
        ("w4a16-sym", {"weights__strategy": None}),
        ("w4a16-sym", {"weights__symmetric": None, "weights__dynamic": None}),
        ("w8a8-fp8-block", {"weights__block_structure": "128x128"}),
        ("w8a8", {"input_activations__strategy": None}),
        ("w8a8-static", {"input_activations__strategy": None}),
        ("w8a8", {"weights__strategy": "tensor"}),
    ],
)
def test_compressed_tensors_blocks_of_other_writers(name, changes):
    config = QuantConfig.from_dict(compressed(name, **changes))
    assert config.scheme == Scheme.parse(name)


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        ("w4a16-sym", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ("w4a16-sym", {"transform_config": {"config_groups": {"a": 1}}}, "transform_config"),
        ("w4a16-sym", {"transform_config": ["x"]}, "transform_config"),
        ("w4a16-sym", {"transform_config": {"groups": {"a": {}}}}, "transform_config"),
        ("w4a16-sym", {"transform_config": {"config_groups": {"a": {}}}}, "groups.a.apply"),
        ("w4a16-sym", {"group__format": "nvfp4-pack-quantized"}, "group_0.format"),
        ("w4a16-sym", {"group__format": "marlin-24"}, "config_groups.group_0.format"),
        ("w4a16-sym", {"config_groups": {}}, "config_groups"),
        ("w4a16-sym", {"config_groups": {"a": []}}, "config_groups.a"),
        ("w4a16-sym", {"group__weights": None}, "group_0.weights"),
        ("w4a16-sym", {"group__targets": []}, "config_groups"),
        ("w4a16-sym", {"group__targets": "Linear"}, "group_0.targets"),
        ("w4a16-sym", {"group__output_activations": {}}, "group_0.output_activations"),
        ("w4a16-sym", {"ignore": "lm_head"}, "ignore"),
        ("w4a16-sym", {"weights__num_bits": 1}, "weights.num_bits"),
        ("w4a16-sym", {"weights__num_bits": "4"}, "weights.num_bits"),
        ("w4a16-sym", {"weights__type": "nf4"}, "weights.type"),
        ("w4a16-sym", {"weights__symmetric": "yes"}, "weights.symmetric"),
        ("w4a16-sym", {"weights__dynamic": True}, "weights.dynamic"),
        ("w4a16-sym", {"weights__actorder": "random"}, "weights.actorder"),
        ("w4a16-sym", {"weights__strategy": "tensor_group"}, "weights.strategy"),
        ("w4a16-sym", {"weights__group_size": None}, "weights.group_size"),
        ("w4a16-sym", {"weights__strategy": "block"}, "weights.block_structure"),
        ("w8a8-fp8", {"weights__symmetric": False}, "weights.num_bits"),
        ("w8a8-fp8-block", {"weights__block_structure": "128x"}, "weights.block_structure"),
        ("w8a8-fp8-block", {"weights__block_structure": [4, 4]}, "weights.block_structure"),
        ("w8a8", {"input_activations__num_bits": 5}, "input_activations"),
        ("w8a8", {"input_activations__dynamic": "local"}, "input_activations"),
        ("w8a8", {"input_activations__dynamic": False}, "input_activations"),
    ],
)
def test_compressed_tensors_invalid_value_names_key(name, changes, key):
    with pytest.raises(InputError, match=f"quantization_config.*{key}"):
        QuantConfig.from_dict(compressed(name, **changes))


def test_compressed_tensors_named_groups_leave_others_float():
    block = compressed(group__targets=["re:.*mlp.*", "model.layers.0.self_attn.o_proj"])
    config = QuantConfig.from_dict(block)
    given = {
        name: config.scheme_for(f"model.layers.0.{name}") is not None
        for name in ("mlp.up_proj", "self_attn.o_proj", "self_attn.q_proj")
    }
    assert given == {"mlp.up_proj": True, "self_attn.o_proj": True, "self_attn.q_proj": False}


def test_ignore_takes_precedence_over_group_targets():
    block = compressed(group__targets=["re:.*mlp.*", "Linear"], ignore=["re:.*up_proj"])
    config = QuantConfig.from_dict(block)
    assert config.scheme_for("model.layers.0.mlp.up_proj") is None
    assert config.scheme_for("model.layers.0.mlp.down_proj") is not None


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}


@pytest.mark.parametrize(
    ("changes", "scheme"),
    [
        ({}, "w4a16-asym-g64"),
        ({"zero_point": False, "version": "GEMM"}, "w4a16-sym-g64"),
        ({"bits": None, "w_bit": 4, "group_size": None, "q_group_size": 64}, "w4a16-asym-g64"),
        ({"group_size": -1, "modules_to_not_convert": None}, "w4a16-asym-channel"),
    ],
)
def test_awq_blocks_of_old_and_new_writers(changes, scheme):
    block = {key: value for key, value in {**AWQ, **changes}.items() if value is not None}
    assert QuantConfig.from_dict(block).scheme == Scheme.parse(scheme)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bits", 8),
        ("bits", 4.0),
        ("group_size", None),
        ("zero_point", None),
        ("zero_point", 1),
        ("version", "gemv_fast"),
        ("modules_to_not_convert", "lm_head"),
        ("modules_to_not_convert", [""]),
    ],
)
def test_awq_invalid_value_names_key(key, value):
    with pytest.raises(InputError, match=f"quantization_config.{key}"):
        QuantConfig.from_dict({**AWQ, key: value})


@pytest.mark.parametrize("method", ["compressed-tensors", "gptq"])
def test_float_layer_has_one_pattern_for_any_number_of_experts(method):
    """A reader bounds what patterns cost: one for each of 480 matrices would be refused."""
    scheme, schemes = Scheme.parse("w4a16-sym"), {}
    for layer in (0, 1, 46):
        for local in ("o_proj", *(f"experts.{e}.{x}_proj" for e in range(160) for x in "ab")):
            schemes[f"model.layers.{layer}.{local}"] = None if layer == 46 else scheme
    schemes["model.layers.1.o_proj"] = None  # one of a layer whose others are quantized
    block = QuantConfig.of_modules(method, schemes).to_dict()
    texts = block.get("ignore") or list(block["dynamic"])
    assert len([text for text in texts if "layers" in text]) == 2
    read = QuantConfig.from_dict(block)
    assert all(read.scheme_for(name) == found for name, found in schemes.items())
    assert read.scheme_for("model.layers.4.o_proj") is not None
    assert read.scheme_for("model.layers.460.o_proj") is not None


def test_module_name_takes_precedence_over_fused_name():
    """In any order of the rules: some configs name q_proj, some the fused matrix that contains
    it."""
    own = Rule(kind="name", text="attn.q_proj", scheme=None)
    fused = Rule(kind="name", text="attn.qkv_proj", scheme=Scheme.parse("w8a16-sym"))
    for rules in ((own, fused), (fused, own)):
        assert first_match(rules, "attn.q_proj") is own
        assert first_match(rules, "attn.k_proj") is fused
        assert first_match(rules, "attn.o_proj") is None


def test_float_modules_match_whole_parts_of_a_name():
    """A name, a suffix or a parent; a gate is no gate_proj."""
    (rule,) = float_modules(["mlp.gate"], "modules_to_not_convert")
    found = ("mlp.gate", "model.layers.0.mlp.gate", "a.mlp.gate.proj", "mlp.gate.proj")
    others = ("mlp.gate_proj", "a.mlp.gate_proj", "my_mlp.gate", "a.mlp.b.gate", "mlp", "gate", "")
    assert all(rule.matches(name) for name in found)
    assert not any(rule.matches(name) for name in others)


def test_scheme_of_a_changed_config_is_its_own():
    """A config remembers what it has found; a copy with other rules must not."""
    whole = QuantConfig(scheme=Scheme.parse("w4a16-sym"), lm_head=True)
    assert whole.scheme_for("a.up_proj") == whole.scheme_for("a.up_proj") == whole.scheme
    assert whole.scheme_for("lm_head") == whole.scheme
    rules = (Rule(kind="name", text="a.up_proj", scheme=None),)
    part = replace(whole, rules=rules, lm_head=False)
    assert part.scheme_for("a.up_proj") is None and part.scheme_for("lm_head") is None
    assert part != whole and replace(part) == part and hash(replace(part)) == hash(part)
