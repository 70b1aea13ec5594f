"""Formats that this project only reads: weights equal those of the tools that write them."""

import pytest
import torch

from formats.checkpoint import CheckpointReader
from formats.codecs import awq_gemv, compressed_tensors, gptq
from formats.codecs.kv_cache import write_kv_scheme
from formats.convert import convert_checkpoint
from formats.errors import CheckpointError, InputError
from formats.in_memory.fp4 import Fp4Weight
from formats.in_memory.packed import PackedWeight
from formats.in_memory.weights import round_to_nearest
from formats.inspection.inspect import inspect_checkpoint
from formats.layouts import decode_linear, encode_linear, find_layout, layout_of, tensor_names
from formats.numerics.bits import pack
from formats.quant_config import BLOCK, QuantConfig
from formats.scheme import QuantSpec, Scheme
from tests.formats.inspection.findings import problem_of

Q0 = "model.layers.0.self_attn.q_proj"


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight_of(folder, module=Q0):
    reader = CheckpointReader(folder)
    config = QuantConfig.from_dict(reader.config[BLOCK])
    names = tensor_names(module, layout_of(config), reader.entries)
    return decode_linear(module, {f: reader.get(n) for f, n in names.items()}, config)


def answers(folder):
    return {verdict.program: verdict.answer for verdict in inspect_checkpoint(folder).loads_in}


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
def test_fp4_decode_equals_library(kind):
    """And its 8-bit codes are the same weights, bit for bit."""
    library = pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor

    scheme = Scheme.parse(f"w4a16-{kind}")
    weight = Fp4Weight.from_float(random(64, 128) / 50, scheme.weight)
    tensors = compressed_tensors.encode(weight)
    block = QuantConfig.of_modules("compressed-tensors", {"a": scheme}).to_dict()
    theirs = library.QuantizationConfig.model_validate(block)
    (group,) = theirs.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(compressed_tensors.layout_of(scheme))
    restored = compressor.decompress(dict(tensors), group)["weight"]
    assert torch.equal(restored.float(), weight.dequantize(restored.dtype).float())
    assert torch.equal(weight.as_codes().dequantize(), weight.dequantize())
    decoded = compressed_tensors.decode(tensors, scheme)
    assert torch.equal(decoded.dequantize(), weight.dequantize())


@pytest.mark.parametrize(
    ("scheme", "field"), [("w4a16-nvfp4", "weight_global_scale"), ("w8a8-static", "input_scale")]
)
def test_integer_scale_is_refused(scheme, field):
    """Truncated to int32, a scale would be accepted and shift every weight or input."""
    scheme = Scheme.parse(scheme)
    weight = round_to_nearest(random(32, 64), scheme.weight)
    tensors = encode_linear(weight, scheme, find_layout("compressed-tensors"), "p", 2.5)
    compressed_tensors.decode(tensors, scheme, "p")
    tensors[field] = tensors[field].int()
    with pytest.raises(CheckpointError, match=f"p.{field}: expected one floating point number, fo"):
        compressed_tensors.decode(tensors, scheme, "p")


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
def test_fp4_rounds_to_nearest_representable_value(kind):
    spec = Scheme.parse(f"w4a16-{kind}").weight
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = torch.cat([numbers, -numbers])
    original = random(8, 64, seed=3)
    weight = Fp4Weight.from_float(original, spec)
    steps = weight.steps().repeat_interleave(spec.group_size, 1)[..., None]
    nearest = (original[..., None] - numbers * steps).abs().amin(-1)
    torch.testing.assert_close(
        (original - weight.dequantize()).abs(), nearest, rtol=1e-5, atol=1e-6
    )
    assert (weight.dequantize() - original).norm() / original.norm() < 0.14


@pytest.mark.parametrize("name", ["w2a16-sym-g32", "w3a16-sym-g32", "w3a16-asym-g32", "w6a16-sym"])
def test_other_bit_widths_pack_as_library(name):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    scheme = Scheme.parse(name)
    weight = round_to_nearest(random(64, 128), scheme.weight)
    tensors = compressed_tensors.encode(weight)
    middle = scheme.weight.symmetric_zero
    codes = unpack_from_int32(tensors["weight_packed"], scheme.weight.bits, (64, 128))
    assert torch.equal(codes.to(torch.int16) + middle, weight.codes().to(torch.int16))
    if not scheme.weight.symmetric:
        shape = weight.zeros_NG.shape
        zeros = unpack_from_int32(tensors["weight_zero_point"], scheme.weight.bits, shape, 0)
        assert torch.equal(zeros.to(torch.int16) + middle, weight.zeros_NG.to(torch.int16))
    assert torch.equal(compressed_tensors.decode(tensors, scheme).dequantize(), weight.dequantize())


def auto_round_block(packing, **values):
    block = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True}
    return {**block, "data_type": "int", "packing_format": packing, **values}


@pytest.mark.parametrize(
    ("packing", "method", "zeros"),
    [
        ("auto_round:auto_gptq", "gptq", "v1"),
        ("auto_round:gptqmodel", "gptq", "v2"),
        ("auto_round", "gptq", "v2"),
        ("auto_round:auto_awq", "awq", None),
    ],
)
def test_auto_round_packings(model, write_folder, packing, method, zeros):
    tensors, config = model(method, "w4a16-sym-g32")
    if zeros == "v2":
        for name in [name for name in tensors if name.endswith("qzeros")]:
            tensors[name] = tensors[name] + 0x11111111
    if packing == "auto_round":
        for name in [name for name in tensors if name.endswith("g_idx")]:
            del tensors[name]
    config[BLOCK] = auto_round_block(packing)
    folder = write_folder(tensors, config)
    found = inspect_checkpoint(folder)
    assert found.problems == () and found.format == "auto-round"
    expected = "no" if packing in ("auto_round", "auto_round:gptqmodel") else "yes"
    assert answers(folder)["vLLM"] == expected and answers(folder)["this project"] == "yes"
    original, _ = model("compressed-tensors", "w4a16-sym-g32")
    scheme = Scheme.parse("w4a16-sym-g32")
    local = {f: original[f"{Q0}.{f}"] for f in ("weight_packed", "weight_scale", "weight_shape")}
    ours = compressed_tensors.decode(local, scheme).dequantize()
    assert torch.equal(weight_of(folder).dequantize(), ours)


def test_auto_round_mixed_layer_schemes(model, write_folder, tmp_path):
    tensors, config = model("gptq", "w4a16-sym-g32")
    scheme = Scheme.parse("w8a16-sym-g32").weight
    wide = "model.layers.0.mlp.down_proj"
    for field in gptq.TENSOR_NAMES:
        del tensors[f"{wide}.{field}"]
        del tensors[f"model.layers.1.mlp.down_proj.{field}"]
    for field, value in gptq.encode(PackedWeight.from_float(random(64, 96), scheme)).items():
        tensors[f"{wide}.{field}"] = value
    tensors["model.layers.1.mlp.down_proj.weight"] = random(64, 96)
    extra = {wide: {"bits": 8}, r".*layers\.1\.mlp\.down_proj$": {"bits": 16, "data_type": "fp"}}
    config[BLOCK] = auto_round_block("auto_round:auto_gptq", extra_config=extra)
    folder = write_folder(tensors, config)
    found = inspect_checkpoint(folder)
    assert found.problems == ()
    assert found.scheme == "mixed: 12 w4a16-sym-g32, 1 w8a16-sym-g32, 1 float"
    convert_checkpoint(folder, tmp_path / "ct", "compressed-tensors")
    assert inspect_checkpoint(tmp_path / "ct").scheme == found.scheme


@pytest.mark.parametrize("block", [None, [128, 128]])
def test_native_fp8_is_read(model, write_folder, block):
    scheme = "w8a8-fp8-block" if block else "w8a8-fp8-static"
    tensors, config = model("compressed-tensors", scheme)
    expected = compressed_tensors.decode(
        {f: tensors[f"{Q0}.{f}"] for f in ("weight", "weight_scale")}
        | ({} if block else {"input_scale": tensors[f"{Q0}.input_scale"]}),
        Scheme.parse(scheme),
    ).dequantize()
    when = "dynamic" if block else "static"
    if block:
        for name in [name for name in tensors if name.endswith("weight_scale")]:
            tensors[f"{name}_inv"] = tensors.pop(name)
    config[BLOCK] = {"quant_method": "fp8", "activation_scheme": when, "weight_block_size": block}
    config[BLOCK]["modules_to_not_convert"] = ["lm_head"]
    folder = write_folder(tensors, config)
    found = inspect_checkpoint(folder)
    assert found.problems == () and found.scheme == scheme
    assert torch.equal(weight_of(folder).dequantize(), expected)


def test_static_fp8_with_transformers_names(model, write_folder, tmp_path):
    from transformers.integrations.finegrained_fp8 import FP8Linear

    (theirs,) = {tuple(FP8Linear(64, 96, None, "static").state_dict())}
    assert theirs == ("weight", "weight_scale_inv", "activation_scale")
    tensors, config = model("compressed-tensors", "w8a8-fp8-static")
    expected = compressed_tensors.decode(
        {f: tensors[f"{Q0}.{f}"] for f in ("weight", "weight_scale", "input_scale")},
        Scheme.parse("w8a8-fp8-static"),
    )
    for name in list(tensors):
        if name.endswith("weight_scale"):  # they are scalars, in bfloat16 as published
            tensors[f"{name}_inv"] = tensors.pop(name).reshape(()).bfloat16()
        elif name.endswith("input_scale"):
            module = name.removesuffix("input_scale")
            tensors[f"{module}activation_scale"] = tensors.pop(name).reshape(()).bfloat16()
    config[BLOCK] = {"quant_method": "fp8", "activation_scheme": "static", "dequantize": False}
    config[BLOCK]["modules_to_not_convert"] = ["model.vision_tower", "lm_head"]
    folder = write_folder(tensors, config)
    found = inspect_checkpoint(folder)
    assert found.problems == () and found.scheme == "w8a8-fp8-static"
    weight = weight_of(folder)
    assert torch.equal(weight.codes_NK.float(), expected.codes_NK.float())
    assert weight.scales_RC.float().item() == expected.scales_RC.bfloat16().item()
    assert weight.input_scale.item() == 0.5
    convert_checkpoint(folder, tmp_path / "ct", "compressed-tensors")
    assert inspect_checkpoint(tmp_path / "ct").problems == ()
    assert torch.equal(weight_of(tmp_path / "ct").dequantize(), weight.dequantize())
    assert weight_of(tmp_path / "ct").input_scale.item() == 0.5


def test_static_fp8_without_input_scale(model, write_folder):
    tensors, config = model("compressed-tensors", "w8a8-fp8-static")
    del tensors[f"{Q0}.input_scale"]
    config[BLOCK] = {"quant_method": "fp8", "activation_scheme": "static"}
    config[BLOCK]["modules_to_not_convert"] = ["lm_head"]
    problem = "is missing, and so is activation_scale"
    problem_of(inspect_checkpoint(write_folder(tensors, config)), "error", Q0, problem)


def test_native_fp8_ignored_names_match_at_dots(model, write_folder):
    tensors, config = model("compressed-tensors", "w8a8-fp8-block")
    config[BLOCK] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config[BLOCK]["modules_to_not_convert"] = ["mlp.gate", "model.layers.1.mlp"]
    quant = QuantConfig.from_dict(config[BLOCK])
    assert quant.scheme_for("model.layers.0.mlp.gate_proj") is not None
    assert quant.scheme_for("model.layers.0.mlp.gate") is None
    assert quant.scheme_for("model.layers.1.mlp.up_proj") is None
    assert quant.scheme_for("model.layers.11.mlp.up_proj") is not None


def test_kv_scales_with_float_weights(float_model, write_folder):
    tensors, config = float_model
    for layer in range(2):
        for kind in ("k_scale", "v_scale"):
            tensors[f"model.layers.{layer}.self_attn.{kind}"] = torch.ones(1)
    config[BLOCK] = {"quant_method": "compressed-tensors", "config_groups": {}}
    config[BLOCK]["kv_cache_scheme"] = write_kv_scheme("fp8")
    folder = write_folder(tensors, config)
    found = inspect_checkpoint(folder)
    assert found.problems == () and found.kv_cache == "fp8" and found.scheme == "float"
    assert set(answers(folder).values()) == {"yes"}


def test_asymmetric_static_activations_are_run_in_16_bits(model, write_folder, tmp_path):
    tensors, config = model("compressed-tensors", "w8a8-static")
    for name in [name for name in tensors if name.endswith("input_scale")]:
        tensors[name.replace("scale", "zero_point")] = torch.tensor([7], dtype=torch.int8)
    config[BLOCK]["config_groups"]["group_0"]["input_activations"]["symmetric"] = False
    folder = write_folder(tensors, config)
    assert inspect_checkpoint(folder).problems == ()
    assert answers(folder) == {
        **{"this project": "slow", "vLLM": "yes", "SGLang": "yes", "transformers": "yes"}
    }
    weight = weight_of(folder)
    assert weight.activation is None and weight.input_scale is None
    with pytest.raises(InputError, match="its activations are asymmetric 8-bit int"):
        convert_checkpoint(folder, tmp_path / "out", "compressed-tensors")


def test_awq_gemv_is_decoded_and_converted(model, write_folder, tmp_path):
    """Zeros and scales are padded: 64 inputs in groups of 32 make 2 groups, and 32 places."""
    spec = QuantSpec(bits=4, symmetric=False, group_size=32)
    tensors, config = model("awq", "w4a16-asym-g32")
    weights = {}
    for name in [n.removesuffix(".qweight") for n in tensors if n.endswith(".qweight")]:
        rows, columns = tensors[f"{name}.scales"].shape[1], tensors[f"{name}.qweight"].shape[0]
        weight = weights[name] = PackedWeight.from_float(random(rows, columns), spec)
        padding = (0, 32 - weight.num_groups)
        zeros = torch.nn.functional.pad(weight.zeros_NG, padding)
        tensors[f"{name}.qweight"] = weight.words_NW
        tensors[f"{name}.qzeros"] = pack(zeros, 4)
        tensors[f"{name}.scales"] = torch.nn.functional.pad(weight.scales_NG, padding)
    config[BLOCK]["version"] = "gemv"
    folder = write_folder(tensors, config)
    assert inspect_checkpoint(folder).problems == ()
    assert torch.equal(weight_of(folder).dequantize(), weights[Q0].dequantize())
    convert_checkpoint(folder, tmp_path / "gemm", "awq")
    assert torch.equal(weight_of(tmp_path / "gemm").dequantize(), weights[Q0].dequantize())
    with pytest.raises(InputError, match="expected qzeros"):
        local = {f: tensors[f"{Q0}.{f}"] for f in awq_gemv.REQUIRED}
        awq_gemv.decode({**local, "scales": local["scales"][:, :2]}, spec, Q0)
