"""Formats of bitsandbytes, torchao and HQQ: damage, conversion, and what is refused by name.

That their weights are read exactly is test_made_by.py's, with files that the tools wrote.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from formats.checkpoint import CheckpointReader
from formats.convert import convert_checkpoint
from formats.errors import CheckpointError, InputError, SchemeError
from formats.inspection.inspect import inspect_checkpoint
from formats.layouts import decode_linear, layout_of, quantized_modules, tensor_names
from formats.other_tools import hqq, torchao, unread_methods
from formats.quant_config import BLOCK, QuantConfig
from tests.formats.inspection.findings import of_weights

MADE_BY = Path(__file__).parents[1] / "made_by"
Q = "model.layers.0.self_attn.q_proj"


def copied(name: str, tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor], dict]:
    """(a copy of a folder that a tool wrote, its tensors, its config.json)."""
    folder = tmp_path / name
    shutil.copytree(MADE_BY / name, folder)
    return folder, load_file(folder / "model.safetensors"), json.loads(_config(folder).read_text())


def _config(folder: Path) -> Path:
    return folder / "config.json"


def metadata_of(folder: Path) -> dict[str, str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return file.metadata()


def written(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    config: dict,
    metadata: dict[str, str] | None = None,
) -> Path:
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    metadata = metadata or metadata_of(folder)
    save_file(tensors, folder / "model.safetensors", metadata=metadata)
    _config(folder).write_text(json.dumps(config))
    return folder


def decoded(folder: Path) -> dict[str, torch.Tensor]:
    """Weights [N, K] as loading reads them, by linear."""
    reader = CheckpointReader(folder)
    config = QuantConfig.from_dict(reader.config[BLOCK])
    found = {}
    for module in quantized_modules(reader.entries):
        names = tensor_names(module, layout_of(config), reader.entries)
        tensors = {field: reader.get(name) for field, name in names.items()}
        found[module] = decode_linear(module, tensors, config).dequantize()
    return found


def _other_dtype(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.view(torch.int8)
    return tensor.to(torch.int64) if tensor.is_floating_point() else tensor.to(torch.float64)


def _not_a_number(tensor: torch.Tensor) -> torch.Tensor:
    damaged = tensor.float().flatten()
    damaged[0] = float("nan")
    return damaged.view(tensor.shape).to(tensor.dtype)


DAMAGES = {
    "short": lambda t: t.flatten()[:-1],
    "long": lambda t: torch.cat([t.flatten(), t.flatten()]),
    "dtype": _other_dtype,
    "nan": _not_a_number,
}
STATE = "weight.quant_state.bitsandbytes__nf4"


def state(**values):
    """Change values of the JSON object that a byte tensor holds."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        text = json.dumps({**json.loads(bytes(tensor.tolist())), **values})
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    return change


def block(**values):
    return lambda config: config[BLOCK].update(values)


def quant_type(**values):
    return lambda config: config[BLOCK]["quant_type"]["default"].update(values)


def parameters(**values):
    def change(config: dict) -> None:
        config[BLOCK]["quant_config"]["weight_quant_params"].update(values)

    return change


# folder -> field of a linear -> what is wrong with it; None: the tensor is missing
FIELDS = {
    "bitsandbytes-nf4": {
        "weight": ["short", "long", None],
        "weight.absmax": ["short", "long", "dtype"],
        "weight.quant_map": ["short", "dtype", "nan", None],
        "weight.nested_absmax": ["long", "nan", "dtype", None],
        "weight.nested_quant_map": ["short", "nan", None],
        STATE: ["short", None],
    },
    "bitsandbytes-int8": {
        "weight": ["short", "long", "dtype", None],
        "SCB": ["short", "long", "dtype", "nan"],
        "weight_format": ["long"],
    },
    "torchao-int8": {
        torchao.DATA: ["short", "long", "dtype", None],
        torchao.SCALE: ["short", "long", "dtype", "nan", None],
        torchao.ZERO: ["short", "long"],
    },
    "torchao-int4": {
        torchao.DATA: ["short", "long", "dtype", None],
        torchao.SCALE: ["short", "long", "dtype", "nan", None],
        torchao.ZERO: ["short", "long"],
    },
    "torchao-tiles": {
        torchao.DATA: ["short", "long", "dtype", None],
        torchao.SCALE_AND_ZERO: ["short", "long", "dtype", "nan", None],
    },
    "torchao-fp8": {
        torchao.DATA: ["short", "long", "dtype", "nan", None],
        torchao.SCALE: ["short", "long", "dtype", "nan", None],
    },
    "hqq-w4": {
        hqq.CODES: ["short", "long"],
        "scale": ["short", "long", "dtype", "nan", None],
        "zero": ["short", "long", "dtype", "nan", None],
        "shape": ["short", "long", None],
        "axis": ["long", None],
        "nbits": ["long", None],
    },
}


def stated(shape):
    """Replace the shape that the header's metadata states of a padded linear."""
    return lambda weight: json.dumps({**weight, "_data": {"shape": shape}})


METADATA = [
    lambda weight: "{",
    lambda weight: "[]",
    lambda weight: json.dumps({**weight, "_data": None}),
    *map(stated, ([32], [32, 32, 32], [32, "32"], [33, 32], [24, 32], [32, 0], [32, 1025], 32)),
]
STATES = {
    "kind": state(quant_type="fp4"),
    "shape": state(shape=[32, 31]),
    "flat": state(shape=[1024]),
    "huge": state(shape=[2**40, 2**40]),
    "blocks": state(blocksize=128),
    "none": state(blocksize=0),
    "dtype": state(dtype="float8"),
    "nested": state(nested_blocksize="256"),
    "offset": state(nested_offset=None),
    "text": lambda tensor: torch.full_like(tensor, ord("[")),
}
CONFIGS = {
    "bitsandbytes-nf4": [
        block(load_in_4bit=False),
        block(load_in_8bit=True),
        block(load_in_4bit="yes"),
        block(bnb_4bit_quant_type="int4"),
        block(llm_int8_skip_modules="lm_head"),
        block(llm_int8_skip_modules=["q_proj"]),
    ],
    "bitsandbytes-int8": [
        block(load_in_8bit=None),
        block(load_in_4bit=True),
        block(load_in_8bit=False, load_in_4bit=True),
        block(llm_int8_skip_modules=[1]),
        block(llm_int8_skip_modules=["down_proj"]),
        block(llm_int8_skip_modules={"lm_head": True}),
        block(quant_method="fp8"),
        block(quant_method="gptq"),
        block(quant_method="hqq"),
        block(quant_method="torchao"),
        block(quant_method=None),
    ],
    "torchao-int8": [
        quant_type(_type="Int8StaticActivationInt8WeightConfig"),
        quant_type(_type=8),
        quant_type(_data=[]),
        quant_type(_type="Int4WeightOnlyConfig"),
        quant_type(_type="Float8WeightOnlyConfig", _data={}),
        quant_type(_type="FqnToConfig", _data={}),
        quant_type(_type="FqnToConfig", _data={"fqn_to_config": {"a": 3}}),
        quant_type(_type="Int8WeightOnlyConfig", _data={"granularity": {"_type": "PerTensor"}}),
        quant_type(_type="Int8WeightOnlyConfig", _data={"group_size": "64"}),
        quant_type(_type="Int8WeightOnlyConfig", _data={"group_size": 8}),
        block(quant_type="int8_weight_only"),
        block(include_input_output_embeddings=True),
    ],
    "torchao-int4": [
        quant_type(_data={"weight_dtype": {"_data": "uint4"}}),
        quant_type(_data={"weight_dtype": {"_data": "int4"}, "intx_packing_format": "OPAQUE"}),
        quant_type(_data={"weight_dtype": {"_data": "int2"}, "group_size": 32}),
        quant_type(_data={"weight_dtype": {"_data": "int4"}, "group_size": 24}),
        quant_type(_data={"weight_dtype": {"_data": 4}}),
        quant_type(_data={"weight_dtype": {"_data": "int4"}, "granularity": 7}),
        quant_type(_type="Int4WeightOnlyConfig", _data={"int4_packing_format": "preshuffled"}),
        block(quant_type={"default": None}),
        block(modules_to_not_convert=["self_attn"]),
        block(modules_to_not_convert=7),
    ],
    "torchao-tiles": [
        quant_type(_data={"group_size": 24, "int4_packing_format": "tile_packed_to_4d"}),
        quant_type(_data={"group_size": 64, "int4_packing_format": "tile_packed_to_4d"}),
        quant_type(_data={"group_size": 32, "int4_packing_format": "preshuffled"}),
        quant_type(_type="Int8WeightOnlyConfig"),
        block(modules_to_not_convert=["mlp"]),
    ],
    "torchao-fp8": [
        quant_type(_data={"weight_dtype": {"_data": "float8_e5m2"}}),
        quant_type(_data={"granularity": {"_type": "PerBlock"}}),
        quant_type(_data={"granularity": {"_type": "PerTensor"}}),
        quant_type(_data={"granularity": "PerRow"}),
        quant_type(_type="Int8WeightOnlyConfig"),
        quant_type(_type="Float8StaticActivationFloat8WeightConfig"),
        quant_type(_type=None),
        block(quant_type=None),
        block(quant_type=[]),
        block(modules_to_not_convert=["mlp"]),
        block(quant_method="bitsandbytes"),
    ],
    "hqq-w4": [
        parameters(nbits=3),
        parameters(nbits=1),
        parameters(nbits="4"),
        parameters(group_size=64),
        parameters(group_size="32"),
        block(quant_config=None),
        block(quant_config={}),
        block(quant_config={"self_attn.q_proj": 3}),
        block(skip_modules=["q_proj"]),
        block(skip_modules=7),
    ],
}
VARIANTS = [
    *(
        (name, field, how)
        for name in FIELDS
        for field in FIELDS[name]
        for how in FIELDS[name][field]
    ),
    *(("bitsandbytes-nf4", STATE, how) for how in STATES.values()),
    *(("torchao-tiles", "metadata", change) for change in METADATA),
    *((name, None, change) for name in CONFIGS for change in CONFIGS[name]),
]


# all of them with --exhaustive
SOME = [
    variant if number % 4 == 0 else pytest.param(*variant, marks=pytest.mark.exhaustive)
    for number, variant in enumerate(VARIANTS)
]


def test_every_format_has_twenty_damaged_variants():
    for name in FIELDS:
        assert sum(variant[0] == name for variant in VARIANTS) >= 20, name


@pytest.mark.parametrize(("name", "field", "how"), SOME, ids=range(len(SOME)))
def test_damage_is_one_loading_error_and_one_inspect_finding(name, field, how, tmp_path):
    folder, tensors, config = copied(name, tmp_path)
    metadata = metadata_of(folder)
    if field is None:
        how(config)
    elif field == "metadata":
        metadata[f"{Q}.weight"] = how(json.loads(metadata[f"{Q}.weight"]))
    elif how is None:
        del tensors[f"{Q}.{field}"]
    else:
        change = how if callable(how) else DAMAGES[how]
        tensors[f"{Q}.{field}"] = change(tensors[f"{Q}.{field}"])
    written(folder, tensors, config, metadata)
    expected = MADE_BY / name / "expected.tensors"
    with pytest.raises(InputError) as caught:
        found = decoded(folder)
        missing = load_file(expected).keys() - found.keys()
        if missing:  # then the model's loader looks for float weights, and there are none
            raise CheckpointError(f"{next(iter(missing))}.weight", "is missing")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    report = inspect_checkpoint(folder)
    errors = [problem for problem in report.problems if problem.severity == "error"]
    assert errors and all("\n" not in str(problem) for problem in errors)
    assert report.loads_in[0].answer == "no"


CONVERTED = [
    ("bitsandbytes-int8", "gptq"),
    ("bitsandbytes-int8", "compressed-tensors"),
    ("torchao-int8", "gptq"),
    ("torchao-int8", "compressed-tensors"),
    ("torchao-int4", "gptq"),
    ("torchao-int4", "awq"),
    ("torchao-int4", "compressed-tensors"),
    ("torchao-fp8", "compressed-tensors"),
]


@pytest.mark.parametrize(("name", "target"), CONVERTED)
def test_lossless_conversion_to_supported_format(name, target, tmp_path):
    convert_checkpoint(MADE_BY / name, tmp_path / "out", target)
    before, after = decoded(MADE_BY / name), decoded(tmp_path / "out")
    assert before.keys() == after.keys() and len(before) == 7
    assert all(torch.equal(before[module], after[module]) for module in before)
    assert not of_weights(inspect_checkpoint(tmp_path / "out"))


LOST = [
    ("bitsandbytes-nf4", "gptq", "16 values are not evenly spaced"),
    ("bitsandbytes-fp4", "awq", "bitsandbytes' own fp4 values"),
    ("torchao-tiles", "gptq", "stores integer zero points only"),
    ("hqq-w4", "compressed-tensors", "stores integer zero points only"),
]


@pytest.mark.parametrize(("name", "target", "text"), LOST)
def test_lossy_conversion_is_refused_with_reason(name, target, text, tmp_path):
    with pytest.raises(SchemeError, match=f"{text}.*quantize the float model"):
        convert_checkpoint(MADE_BY / name, tmp_path / "out", target)


def test_asymmetric_activations_run_in_16_bits_and_are_not_converted(tmp_path):
    folder, tensors, config = copied("torchao-int4", tmp_path)
    quant_type(_type="Int8DynamicActivationIntxWeightConfig")(config)
    data = config[BLOCK]["quant_type"]["default"]["_data"]
    data["weight_granularity"] = data.pop("granularity")
    written(folder, tensors, config)
    expected = decoded(MADE_BY / "torchao-int4")
    assert all(torch.equal(expected[name], found) for name, found in decoded(folder).items())
    report = inspect_checkpoint(folder)
    assert report.loads_in[0].answer == "slow" and "16 bits" in report.loads_in[0].reason
    with pytest.raises(CheckpointError, match="zero points, for each token"):
        convert_checkpoint(folder, tmp_path / "out", "gptq")


def test_unsupported_torchao_tiles_are_refused(tmp_path):
    folder, tensors, config = copied("torchao-tiles", tmp_path)
    config[BLOCK]["quant_type"]["default"]["_data"]["int4_tile_packed_ntile"] = 16
    with pytest.raises(CheckpointError, match="int4_tile_packed_ntile: expected 8"):
        decoded(written(folder, tensors, config))


def test_torchao_module_names_select_schemes():
    int8 = {"_type": "Int8WeightOnlyConfig", "_data": {}}
    int4 = {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 64}}
    named = {
        r"re:model\.layers\..*\.mlp\..*": int4,
        "model.layers.0.mlp.down_proj": None,
        "_default": int8,
    }
    default = {"_type": "FqnToConfig", "_data": {"fqn_to_config": named}}
    config = QuantConfig.from_dict({"quant_method": "torchao", "quant_type": {"default": default}})
    assert config.scheme_for("model.layers.0.mlp.down_proj") is None
    assert config.scheme_for("model.layers.1.mlp.down_proj").weight.type == "floatzero"
    assert str(config.scheme_for("model.layers.1.self_attn.q_proj")) == "w8a16-sym-channel"


def test_hqq_schemes_match_name_suffixes():
    own = {"weight_quant_params": {"nbits": 2, "group_size": 16}}
    config = QuantConfig.from_dict(
        {"quant_method": "hqq", "quant_config": {"mlp.up_proj": own}, "skip_modules": ["lm_head"]}
    )
    assert str(config.scheme_for("model.layers.3.mlp.up_proj")) == "w2a16-floatzero-g16"
    assert config.scheme_for("model.layers.3.mlp.gate_proj") is None


@pytest.mark.parametrize("method", unread_methods.METHODS)
def test_unsupported_method_is_refused_by_name(method):
    tool, form = unread_methods.METHODS[method]
    with pytest.raises(CheckpointError) as caught:
        QuantConfig.from_dict({"quant_method": method, "bits": 4})
    text = str(caught.value)
    assert tool in text and form in text and "float model" in text and "\n" not in text


@pytest.mark.parametrize("method", ["exl3", "exl2", "fbgemm_fp8", "aqlm"])
def test_unsupported_method_is_refused_by_inspect_and_convert(
    method, tmp_path, gptq_model, write_folder
):
    tensors, config = gptq_model
    folder = write_folder(tensors, {**config, BLOCK: {"quant_method": method, "bits": 4}})
    tool, _ = unread_methods.METHODS[method]
    report = inspect_checkpoint(folder)
    assert [v.answer for v in report.loads_in] == ["no", *["not judged"] * 3]
    assert tool in report.loads_in[0].reason
    with pytest.raises(CheckpointError, match="float model"):
        convert_checkpoint(folder, tmp_path / "out", "gptq")


def test_mlx_block_is_distinguished_from_missing_method():
    with pytest.raises(CheckpointError, match="format of MLX"):
        QuantConfig.from_dict({"group_size": 64, "bits": 4, "mode": "affine"})
    with pytest.raises(CheckpointError, match="expected one of gptq"):
        QuantConfig.from_dict({"group_size": 64, "bits": 4, "sym": True})
