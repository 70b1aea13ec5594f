"""Conversion: the same codes, scales and zeros along every chain, and back to the same bytes."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from calibrate.layer_map import find_layer_map
from calibrate.pipeline import quantize_checkpoint
from formats import convert
from formats.checkpoint import CheckpointReader
from formats.convert import convert_checkpoint
from formats.errors import CheckpointError, InputError, SchemeError
from formats.in_memory.weights import same_weight
from formats.inspection.inspect import inspect_checkpoint
from formats.layouts import (
    LAYOUTS,
    check_shape_writable,
    decode_linear,
    default_format,
    encode_linear,
    tensor_names,
)
from formats.quant_config import BLOCK, QuantConfig
from formats.scheme import Scheme

# scheme -> the formats that hold it; the first is the default
WRITABLE = {
    "w4a16-sym-g32": ("gptq", "awq", "compressed-tensors"),
    "w4a16-asym-g32": ("awq", "compressed-tensors", "gptq"),
    "w8a16-sym-channel": ("gptq", "compressed-tensors"),
    "w8a8": ("compressed-tensors", "gptq"),
    "w8a8-static": ("compressed-tensors",),
    "w8a8-fp8": ("compressed-tensors",),
    "w8a8-fp8-static": ("compressed-tensors",),
    "w8a8-fp8-block": ("compressed-tensors",),
    "w3a16-sym-g32": ("gptq",),
}
PAIRS = [(scheme, name) for scheme, names in WRITABLE.items() for name in names]


@pytest.fixture(scope="module")
def source(tmp_path_factory, docs_5m):
    """The bundled model's first layer, cut small: [64, 64] and the like."""
    reader = CheckpointReader(docs_5m)
    config = {**reader.config, "num_hidden_layers": 2, "tie_word_embeddings": True}
    config |= {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 128}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    shapes = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64)}
    shapes |= {"gate_proj": (96, 64), "up_proj": (96, 64), "down_proj": (64, 96)}
    tensors = {}
    for name in reader.entries:
        if ".layers." in name and int(name.split(".")[2]) > 1:
            continue
        tensor = reader.get(name)
        leaf = name.split(".")[-2]
        if leaf in shapes:
            tensor = tensor[: shapes[leaf][0], : shapes[leaf][1]]
        elif tensor.ndim == 2:
            tensor = tensor[:128, :64]
        else:
            tensor = tensor[:64]
        tensors[name] = tensor.clone()
    folder = tmp_path_factory.mktemp("convert") / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def written(source, tmp_path_factory):
    """(scheme, format) -> folder, quantized once."""
    made = {}

    def make(scheme, output_format, **options):
        key = (scheme, output_format, str(options))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("written") / "model"
            config = json.loads((source / "config.json").read_text())
            names = find_layer_map(config).linear_names
            scales = {name: 0.03 + i for i in range(2) for name in names(i, config)}
            quantize_checkpoint(
                source,
                made[key],
                scheme=Scheme.parse(scheme),
                output_format=output_format,
                progress=False,
                input_scales=scales if "static" in scheme else None,
                **options,
            )
        return made[key]

    return make


def weights_of(folder):
    """module -> weight of every quantized linear, and its config."""
    reader = CheckpointReader(folder)
    config = QuantConfig.from_dict(reader.config[BLOCK])
    fields = LAYOUTS[config.method].fields
    modules = {n.rpartition(".")[0] for n in reader.entries if n.endswith(("_scale", "qweight"))}
    weights = {}
    for module in modules:
        names = tensor_names(module, LAYOUTS[config.method], reader.entries)
        assert set(names) <= set(fields)
        tensors = {field: reader.get(name) for field, name in names.items()}
        weights[module] = decode_linear(module, tensors, config)
    return weights


def files(folder):
    reports = ("quantization_report.json", "quantization_report.html", "README.md", "quality.json")
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in reports}


def test_scheme_table_lists_default_first():
    for scheme, names in WRITABLE.items():
        assert default_format(Scheme.parse(scheme)) == names[0]


@pytest.mark.parametrize(("scheme", "output_format"), PAIRS)
def test_writable_format_scheme_pairs_round_trip(written, source, scheme, output_format):
    folder = written(scheme, output_format)
    weights, float_model = weights_of(folder), CheckpointReader(source)
    assert len(weights) == 14
    from formats.in_memory.weights import round_to_nearest

    for module, weight in weights.items():
        spec = Scheme.parse(scheme).weight
        expected = round_to_nearest(float_model.get(f"{module}.weight"), spec)
        assert torch.equal(weight.dequantize(), expected.dequantize())
        if output_format != "awq":
            assert str(weight.scheme) == scheme
    inspection = inspect_checkpoint(folder)
    assert inspection.ok, inspection.to_text()


@pytest.mark.parametrize(
    ("scheme", "first"),
    [
        pytest.param(scheme, name, marks=[pytest.mark.exhaustive] if "asym" in scheme else [])
        for scheme, name in PAIRS
    ],
)
def test_conversion_chains_return_same_bytes(written, tmp_path, scheme, first):
    start = written(scheme, first)
    weights = weights_of(start)
    others = [name for name in WRITABLE[scheme] if name != first]
    for number, second in enumerate([*others, first]):
        for third in [name for name in others if name != second] or [second]:
            chain = [second, third, first]
            folder = start
            for step, name in enumerate(chain):
                target = tmp_path / f"{number}-{third}-{step}-{name}"
                convert_checkpoint(folder, target, name)
                folder = target
                found = weights_of(target)
                assert found.keys() == weights.keys()
                for module, weight in weights.items():
                    assert torch.equal(weight.dequantize(), found[module].dequantize())
                    assert same_weight(weight, found[module]) is None
            assert files(folder) == files(start), chain


def test_conversion_in_shards_keeps_every_other_tensor(written, source, tmp_path):
    folder = written("w4a16-sym-g32", "gptq")
    target = tmp_path / "out"
    conversion = convert_checkpoint(folder, target, "awq", max_shard_bytes=20_000)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert conversion.num_linears == 14
    before, after = CheckpointReader(folder), CheckpointReader(target)
    for name in before.entries:
        if not name.endswith(("qweight", "qzeros", "scales", "g_idx")):
            assert torch.equal(before.get(name), after.get(name)), name
    qzeros = after.get("model.layers.0.mlp.up_proj.qzeros")
    assert (qzeros == -2004318072).all()  # 0x88888888
    assert after.config[BLOCK]["zero_point"] is True


@pytest.mark.parametrize(
    ("scheme", "source_format", "target", "reason"),
    [
        ("w8a16-sym-channel", "gptq", "awq", "holds 4-bit weights"),
        ("w3a16-sym-g32", "gptq", "awq", "holds 4-bit weights"),
        ("w8a8-static", "compressed-tensors", "gptq", "cannot store a static activation scale"),
        ("w8a8-fp8", "compressed-tensors", "gptq", "integer codes, not float"),
    ],
)
def test_inexpressible_scheme_is_refused_by_name(
    written, tmp_path, scheme, source_format, target, reason
):
    with pytest.raises(SchemeError, match=rf"model\.layers\.\d\..*{reason}"):
        convert_checkpoint(written(scheme, source_format), tmp_path / "out", target)
    assert list(tmp_path.iterdir()) == []


def edited(folder, tmp_path, tensors=None, block=None):
    """A copy of a folder with its tensors and its config block changed."""
    copy = tmp_path / "edited"
    copy.mkdir()
    state = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    if tensors:
        tensors(state)
    config[BLOCK].update(block or {})
    (copy / "config.json").write_text(json.dumps(config))
    save_file(state, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def test_act_order_is_refused_by_name(written, tmp_path):
    name = "model.layers.1.mlp.up_proj.g_idx"

    def shuffle(state):
        state[name] = state[name].flip(0).contiguous()

    folder = edited(written("w4a16-sym-g32", "gptq"), tmp_path, shuffle, {"desc_act": True})
    for output_format in LAYOUTS:
        with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj: .*act-order"):
            convert_checkpoint(folder, tmp_path / "out", output_format)


def test_mislabelled_qzeros_are_converted_correctly(written, tmp_path):
    folder = written("w4a16-sym-g32", "gptq")
    wrong = edited(folder, tmp_path, block={"checkpoint_format": "gptq_v2"})
    convert_checkpoint(wrong, tmp_path / "out", "gptq")
    assert files(tmp_path / "out") == files(folder)


def test_overrides_and_ignored_linears_survive_every_chain(written, tmp_path):
    wide = Scheme.parse("w8a16-sym-g32")
    options = {"ignore": ("layers.0.mlp",), "overrides": [("*.o_proj", wide)]}
    start = written("w4a16-sym-g32", "gptq", **options)
    weights = weights_of(start)
    assert len(weights) == 11
    assert str(weights["model.layers.1.self_attn.o_proj"].scheme) == "w8a16-sym-g32"
    assert inspect_checkpoint(start).ok
    convert_checkpoint(start, tmp_path / "ct", "compressed-tensors")
    convert_checkpoint(tmp_path / "ct", tmp_path / "back", "gptq")
    assert files(tmp_path / "back") == files(start)
    with pytest.raises(SchemeError, match="o_proj: cannot be written as awq"):
        convert_checkpoint(start, tmp_path / "awq", "awq")


@pytest.mark.parametrize(
    ("shape", "remedy"),
    [((48, 96), "write awq or compressed-tensors"), ((48, 100), "leave it in float")],
)
def test_unsupported_shape_error_lists_suitable_formats(shape, remedy):
    scheme = Scheme.parse("w4a16-asym-g32")
    with pytest.raises(SchemeError, match=f"^p: cannot be written as gptq: .* .{remedy}.$"):
        check_shape_writable(LAYOUTS["gptq"], scheme, "p", *shape)
    check_shape_writable(LAYOUTS["gptq"], scheme, "p", 64, 96)


def test_convert_to_same_format_is_refused_with_reason(written, tmp_path):
    folder = written("w8a8-mxfp8", "compressed-tensors", recipe="rtn")
    with pytest.raises(
        CheckpointError, match="cannot preserve .the folder is compressed-tensors alre"
    ):
        convert_checkpoint(folder, tmp_path / "out", "compressed-tensors")


def test_float_model_is_refused(source, tmp_path):
    with pytest.raises(CheckpointError, match="has no quantization_config"):
        convert_checkpoint(source, tmp_path / "out", "gptq")
    with pytest.raises(InputError, match="known formats: gptq"):
        convert_checkpoint(source, tmp_path / "out", "gguf")


def test_awq_with_one_symmetric_linear_stays_asymmetric(written, tmp_path):
    def flatten(state):
        state["model.layers.1.mlp.up_proj.qzeros"].fill_(-2004318072)  # 0x88888888

    folder = edited(written("w4a16-asym-g32", "awq"), tmp_path, flatten)
    convert_checkpoint(folder, tmp_path / "out", "compressed-tensors")
    for module, weight in weights_of(folder).items():
        assert same_weight(weight, weights_of(tmp_path / "out")[module]) is None


def test_linear_not_preserved_by_conversion_is_refused(written, tmp_path, monkeypatch):
    def encode(*arguments):
        tensors = encode_linear(*arguments)
        tensors["scales"] = tensors["scales"] * 2
        return tensors

    monkeypatch.setattr(convert, "encode_linear", encode)
    with pytest.raises(CheckpointError, match="_proj: awq would change its scales"):
        convert_checkpoint(written("w4a16-sym-g32", "gptq"), tmp_path / "out", "awq")
    assert list(tmp_path.iterdir()) == []


def test_report_names_scheme_by_codes(written, tmp_path):
    """An AWQ config calls symmetric weights asymmetric; the report does not."""
    folder = written("w4a16-sym-g32", "gptq")
    there = convert_checkpoint(folder, tmp_path / "awq", "awq")
    back = convert_checkpoint(tmp_path / "awq", tmp_path / "gptq", "gptq")
    assert there.scheme == back.scheme == "w4a16-sym-g32"


def test_original_quantizer_name_is_kept(written, tmp_path):
    quantizer = {"quantizer": ["another:1.0"]}
    source = edited(written("w4a16-sym-g32", "gptq"), tmp_path, block={"meta": quantizer})
    convert_checkpoint(source, tmp_path / "again", "gptq", quantizer="converter:2.0")
    block = json.loads((tmp_path / "again" / "config.json").read_text())[BLOCK]
    assert block["meta"] == quantizer
