"""W4A4 and MXFP8 folders: the compressed-tensors library decompresses weights and rounds inputs."""

import json
import logging
import math

import pytest
import torch
import transformers

from calibrate.calibration.activations import fake_quantize_groups
from calibrate.float_model import FloatModel
from calibrate.layer_map import find_layer_map
from calibrate.pipeline import quantize_checkpoint
from calibrate.quality.evaluation import read_evaluation
from formats.checkpoint import CheckpointReader
from formats.errors import InputError, SchemeError
from formats.in_memory.fp8 import Fp8Weight
from formats.inspection.inspect import inspect_checkpoint
from formats.layouts import decode_linear
from formats.plan import make_plan
from formats.quant_config import BLOCK, QuantConfig
from formats.scheme import MICROSCALED, MXFP8, Scheme
from qkernels import QuantLinear
from qserve.llm import LLM
from tests.qserve.model.variants import TOKENS, logits, relative

library = pytest.importorskip("compressed_tensors")
NAMES = [name for name, scheme in MICROSCALED.items() if scheme.activation is not None]


@pytest.fixture(scope="module")
def made(small_5m, tmp_path_factory):
    """name -> (folder, report) of the bundled model's first layer in a scheme, made once."""
    found = {}

    def make(name):
        if name not in found:
            folder = tmp_path_factory.mktemp("made") / "out"
            report = quantize_checkpoint(
                small_5m(),
                folder,
                scheme=Scheme.parse(name),
                recipe="rtn" if "mxfp8" in name else "gptaq",
                samples=4,
                sequence_length=64,
                quality_windows=1,
                progress=False,
            )
            found[name] = folder, report
        return found[name]

    return make


def theirs(folder, source):
    """transformers' float32 model with the library's weights, and its rounding of inputs."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils.helpers import compute_dynamic_scales_and_zp

    reader = CheckpointReader(folder)
    block = json.loads((folder / "config.json").read_text())[BLOCK]
    group = library.QuantizationConfig.model_validate(block).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(block["format"])
    args = group.input_activations
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)

    def rounds(whole):
        def hook(_, inputs):
            scale, zero = compute_dynamic_scales_and_zp(inputs[0], args, None, global_scale=whole)
            return (fake_quantize(inputs[0], scale, zero, args, global_scale=whole),)

        return hook

    for name in find_layer_map(reader.config).linear_names(0, reader.config):
        stored = {field: reader.get(f"{name}.{field}") for field in reader.children(name)}
        whole = stored.pop("input_global_scale", None)
        assert (whole is None) == (args.dynamic is True)
        linear = model.get_submodule(name)
        linear.weight.data = compressor.decompress(stored, group)["weight"].float()
        linear.register_forward_pre_hook(rounds(whole))
    return model


@pytest.mark.parametrize("name", NAMES)
def test_quality_equals_library_with_rounded_inputs(made, small_5m, name):
    folder, report = made(name)
    ids = read_evaluation(FloatModel(small_5m()), None, 1, True).ids_WS
    model = transformers.AutoModelForCausalLM.from_pretrained(small_5m(), dtype=torch.float32)
    with torch.no_grad():
        found_SV = theirs(folder, small_5m())(ids).logits[0, :-1].log_softmax(-1)
        float_SV = model(ids).logits[0, :-1].log_softmax(-1)
    loss = float(torch.nn.functional.nll_loss(found_SV, ids[0, 1:]))
    divergence = float((float_SV.exp() * (float_SV - found_SV)).sum(-1).mean())
    # Inputs at a boundary are rounded either way, which moves the perplexity by up to 1 percent.
    # The divergence decides: with inputs that are not rounded it is less than half.
    assert report.quality["perplexity"] == pytest.approx(math.exp(loss), rel=0.02)
    assert report.quality["divergence"] == pytest.approx(divergence, rel=0.03)
    assert json.loads((folder / "quality.json").read_text())["probe"] is None


@pytest.mark.parametrize("name", NAMES)
def test_weights_equal_library_decompression(made, small_5m, name):
    folder, _ = made(name)
    reader, model = CheckpointReader(folder), theirs(folder, small_5m())
    config = QuantConfig.from_dict(reader.config[BLOCK])
    for full in find_layer_map(reader.config).linear_names(0, reader.config):
        tensors = {field: reader.get(f"{full}.{field}") for field in reader.children(full)}
        weight = decode_linear(full, tensors, config).dequantize()
        # the library decompresses to bfloat16
        assert relative(weight, model.get_submodule(full).weight.data) < 3e-3, full


@pytest.mark.parametrize("name", NAMES)
def test_engine_runs_weight_only_and_reports_it(made, small_5m, caplog, name):
    folder, _ = made(name)
    model = theirs(folder, small_5m())
    for module in model.modules():
        module._forward_pre_hooks.clear()
    with caplog.at_level(logging.WARNING):
        LLM(folder, device="cpu", max_model_len=64)
    assert "they stay in 16 bits, and only the weights are quantized" in caplog.text
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(folder), expected) < 3e-3
    answers = {verdict.program: verdict.answer for verdict in inspect_checkpoint(folder).loads_in}
    assert answers["this project"] == "slow" and answers["vLLM"] == "yes"


@pytest.mark.parametrize("name", ["w4a4-nvfp4", "w4a16-nvfp4"])
def test_fused_linears_share_global_scale(made, name):
    """vLLM takes the largest of a fused matrix's global scales for all of it."""
    folder, _ = made(name)
    reader = CheckpointReader(folder)
    prefix = "model.layers.0"
    for members in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),) + (
        ("mlp.gate_proj", "mlp.up_proj"),
    ):
        for field in ("weight_global_scale", "input_global_scale"):
            names = [f"{prefix}.{member}.{field}" for member in members]
            if names[0] in reader:
                assert len({float(reader.get(each)) for each in names}) == 1, names
    assert float(reader.get(f"{prefix}.mlp.down_proj.weight_global_scale")) != float(
        reader.get(f"{prefix}.mlp.up_proj.weight_global_scale")
    )


@pytest.mark.parametrize("name", NAMES)
def test_input_rounding_equals_library(name):
    """Also for zeros, and for groups that end at a power of two."""
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils.helpers import compute_dynamic_scales_and_zp

    scheme = MICROSCALED[name]
    block = QuantConfig.of_modules("compressed-tensors", {"a": scheme}).to_dict()
    keys = block["config_groups"]["group_0"]["input_activations"]
    args = library.quantization.QuantizationArgs.model_validate(keys)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 128, generator=generator) * torch.randn(128, generator=generator).exp()
    x[1] = 0
    x[2, ::32] = torch.tensor([1.75, 1.7499, 3.5, 448.0])
    scale = None if scheme.activation.dynamic else x.abs().max() / 2688
    whole = None if scale is None else 1 / scale.reshape(1)
    steps, zero = compute_dynamic_scales_and_zp(x, args, None, global_scale=whole)
    expected = fake_quantize(x, steps, zero, args, global_scale=whole)
    found = fake_quantize_groups(x, scheme.activation, scale)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_mxfp8_scales_are_nonclipping_powers_of_two():
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    weight[0, :32] = 0
    weight[1, 0], weight[2, 0], weight[3, 0] = 448.0, 447.0, 2.0**-9
    found = Fp8Weight.from_float(weight, MXFP8)
    assert torch.equal(found.scales_RC.log2(), found.scales_RC.log2().round())
    assert float((found.dequantize() - weight).abs().max()) < 448 / 16
    assert relative(found.dequantize(), weight) < 0.04


def test_mixed_activation_schemes_are_refused():
    schemes = {"a": MICROSCALED["w4a4-mxfp4"], "b": Scheme.parse("w4a16-mxfp4")}
    with pytest.raises(InputError, match="w4a4-mxfp4: cannot be stored in one checkpoint"):
        QuantConfig.of_modules("compressed-tensors", schemes)
    with pytest.raises(SchemeError, match="stores integer codes"):
        make_plan({"a": (64, 64)}, MICROSCALED["w4a4-mxfp4"], output_format="gptq")
    with pytest.raises(SchemeError, match="no kernel here rounds .give w4a16-nvfp4"):
        QuantLinear.from_float(torch.randn(64, 64), "w4a4-nvfp4")
    with pytest.raises(SchemeError, match="its scales are fixed"):
        Scheme.parse("w8a8-mxfp8", 64)


@pytest.mark.parametrize("name", MICROSCALED)
def test_scheme_names_round_trip(name):
    assert str(Scheme.parse(name)) == name
