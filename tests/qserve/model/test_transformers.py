"""transformers, with the compressed-tensors library, reads what we write and gives our logits."""

import importlib.util
import json

import pytest
import torch
from safetensors.torch import save_file

from calibrate.pipeline import quantize_checkpoint
from formats.checkpoint import CheckpointReader
from formats.codecs.kv_cache import write_kv_scheme
from formats.inspection.inspect import inspect_checkpoint
from formats.layouts import LAYOUTS, decode_linear, quantized_modules, tensor_names
from formats.numerics import activation
from formats.quant_config import BLOCK, QuantConfig
from formats.scheme import Scheme
from tests.qserve.model.variants import TOKENS, edited, logits, relative

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None, reason="needs compressed-tensors"
)


@pytest.fixture
def in_transformers():
    """in_transformers(folder, **options) -> (its model, the model's logits)."""
    from transformers import AutoModelForCausalLM

    def load(folder, **options):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
        with torch.no_grad():
            return model, model.eval()(torch.tensor([TOKENS])).logits[0]

    return load


@pytest.mark.parametrize(
    "scheme",
    [
        "w4a16-sym-g32",
        "w4a16-sym-channel",
        "w8a16-sym-g32",
        "w8a16-sym-channel",
        "w8a16-fp8",
        "w8a8",
        "w8a8-static",
        "w8a8-fp8",
        "w8a8-fp8-static",
    ],
)
def test_transformers_loads_written_folder_with_equal_logits(
    written, in_transformers, monkeypatch, scheme
):
    """With one rule for dynamic int8: compressed-tensors divides a token's largest magnitude by
    127.5 and knows no setting for it, vLLM, SGLang and we divide by 127."""
    folder = written(scheme, "compressed-tensors")
    model, theirs = in_transformers(folder)
    if scheme == "w8a8":
        assert 1e-3 < relative(theirs, logits(folder)) < 0.08
        monkeypatch.setitem(activation.LARGEST, "int", 127.5)
    assert relative(theirs, logits(folder)) < 1e-5
    if scheme.startswith("w8a8"):
        for module in model.modules():
            module.quantization_enabled = False  # the library's switch: inputs stay as they are
        with torch.no_grad():
            plain = model(torch.tensor([TOKENS])).logits[0]
        assert relative(plain, theirs) > 1e-3, "its inputs were not rounded"


def test_transformers_rounds_block_inputs_equally(docs_5m, in_transformers, tmp_path):
    """The tiny models are narrower than a block's 128 inputs, which the library cannot cut."""
    folder = tmp_path / "model"
    quantize_checkpoint(docs_5m, folder, scheme=Scheme.parse("w8a8-fp8-block"), progress=False)
    _, theirs = in_transformers(folder)
    assert relative(theirs, logits(folder)) < 1e-5


@pytest.mark.parametrize("kv_cache", ["int8", "fp8"])
def test_transformers_loads_kv_scales(written, in_transformers, tmp_path, kv_cache):
    source = written("w4a16-sym-g32", "compressed-tensors")
    names = [f"model.layers.{n}.self_attn.{kind}_scale" for n in range(3) for kind in "kv"]
    folder = edited(
        source,
        tmp_path / "x",
        lambda state: state.update({name: torch.tensor([0.01]) for name in names}),
        lambda config: config[BLOCK].update(kv_cache_scheme=write_kv_scheme(kv_cache)),
    )
    model, theirs = in_transformers(folder)
    found = dict(model.named_parameters())
    assert all(found[name].tolist() == [pytest.approx(0.01)] for name in names)
    assert torch.isfinite(theirs).all()


ASYMMETRIC = ["w4a16-asym-g32", "w4a16-asym-channel", "w8a16-asym-g32"]


def dense(folder, target, dtype):
    """A float checkpoint of the weights that the folder means, rounded to `dtype`."""
    consumer = CheckpointReader(folder)
    config = QuantConfig.from_dict(consumer.config[BLOCK])
    layout = LAYOUTS[config.method]
    state, quantized = {}, set(quantized_modules(consumer.entries))
    for name in consumer.entries:
        module = name.rpartition(".")[0]
        if module not in quantized or name.endswith(".bias"):
            state[name] = consumer.get(name)
    for module in quantized:
        names = tensor_names(module, layout, consumer.entries)
        tensors = {field: consumer.get(name) for field, name in names.items()}
        weight = decode_linear(module, tensors, config).dequantize()
        state[f"{module}.weight"] = weight.to(dtype).float()
    state = with_granite_stacks(state)
    target.mkdir()
    plain = {key: value for key, value in consumer.config.items() if key != BLOCK}
    (target / "config.json").write_text(json.dumps(plain))
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    return target


def with_granite_stacks(state):
    """Granite's experts as its files have them: a stack for all of a layer."""
    stems = {name.partition(".experts.")[0] for name in state if "experts.0.gate_proj" in name}
    for stem in stems:
        if not stem.endswith("block_sparse_moe"):
            continue
        for stack, leaves in (
            ("input_linear", ("gate_proj", "up_proj")),
            ("output_linear", ("down_proj",)),
        ):
            each = [
                torch.cat([state.pop(f"{stem}.experts.{e}.{leaf}.weight") for leaf in leaves])
                for e in range(6)
            ]
            state[f"{stem}.{stack}.weight"] = torch.stack(each)
    return state


@pytest.mark.parametrize("scheme", ASYMMETRIC)
def test_packed_zeros_load_in_transformers_as_float_weights(
    written, in_transformers, tmp_path, scheme
):
    """`dequantize=True` goes through the library's own decompression, which computes in the dtype
    of the scales: float16. With our weights rounded to it, both give the same logits."""
    from transformers import CompressedTensorsConfig

    folder = written(scheme, "compressed-tensors")
    how = {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    model, theirs = in_transformers(folder, **how)
    rounded = dense(folder, tmp_path / "dense", torch.float16)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, CheckpointReader(rounded).get(name)), name
    assert relative(theirs, logits(rounded)) < 1e-5
    assert relative(theirs, logits(folder)) < 3e-3


@pytest.mark.parametrize("scheme", ASYMMETRIC)
def test_library_decompression_of_packed_zeros_gives_equal_logits(
    written, in_transformers, tmp_path, scheme
):
    """Load the checkpoint with float32 scales instead of the library's float16."""
    from transformers import CompressedTensorsConfig

    def widen(state):
        for name in [name for name in state if name.endswith("weight_scale")]:
            state[name] = state[name].float()

    folder = written(scheme, "compressed-tensors")
    how = {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    _, theirs = in_transformers(edited(folder, tmp_path / "wide", widen), **how)
    assert relative(theirs, logits(folder)) < 1e-5


def written_by_the_library(source, folder, scheme):
    """The source rounded and packed by compressed-tensors alone."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    schemes = {"model.layers.0.mlp.up_proj": Scheme.parse(scheme)}
    block = QuantConfig.of_modules("compressed-tensors", schemes).to_dict()
    config = QuantizationConfig.model_validate({**block, "quantization_status": "initialized"})
    apply_quantization_config(model, config)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            args = module.quantization_scheme.weights
            groups = module.weight.detach().unflatten(1, (-1, args.group_size))
            scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
            module.weight_scale.data, module.weight_zero_point.data = scale, zero
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return folder


def test_transformers_refuses_packed_zeros_whoever_wrote_them(
    written, tiny_model, in_transformers, tmp_path
):
    """On the meta device the library makes weight_zero_point [N, G], but packs it into [N/8, G]
    when it compresses. Its own files fail, too; `inspect` names the alternative."""
    from transformers import CompressedTensorsConfig

    theirs = written_by_the_library(tiny_model("llama"), tmp_path / "lib", "w4a16-asym-g32")
    ours = written("w4a16-asym-g32", "compressed-tensors")
    name = "model.layers.0.mlp.up_proj.weight_zero_point"
    shapes = {CheckpointReader(folder).entries[name].shape for folder in (theirs, ours)}
    assert shapes == {(96 // 8, 2)}
    for folder in (theirs, ours):
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            in_transformers(folder)
        verdicts = {v.program: v for v in inspect_checkpoint(folder).loads_in}
        assert verdicts["transformers"].answer == "slow"
        assert "dequantize=True" in verdicts["transformers"].reason
    how = {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    assert relative(in_transformers(theirs, **how)[1], logits(theirs)) < 1e-5
