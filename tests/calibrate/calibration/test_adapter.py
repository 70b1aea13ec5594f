"""`quantize --adapter`: calibration runs with the adapter, which is not written."""

import json

import pytest
import torch

from calibrate.calibration.adapter import put_beside
from calibrate.calibration.layer_runner import LayerRunner
from calibrate.float_model import FloatModel
from calibrate.pipeline import quantize_checkpoint
from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from formats.peft.lora import adapted_shapes, read_adapter
from formats.scheme import Scheme
from tests.adapters import write_adapter

W4 = Scheme.parse("w4a16-sym-g32")


def test_layer_with_adapter_equals_merged_weights(tiny_model, tmp_path):
    """A layer with a separate adapter computes the same as a layer with merged weights."""
    folder = tiny_model("llama")
    model = FloatModel(folder)
    adapter = read_adapter(
        write_adapter(folder, tmp_path / "a", rank=3, use_rslora=True),
        adapted_shapes(model.layer_map.family, model.config),
    )
    plain = LayerRunner(model, model.layer_map, "cpu")
    state = model.layer(1, "cpu")
    prefix = model.layer_map.prefix(1)
    merged = dict(state)
    for name, pair in adapter.pairs.items():
        local = f"{name.removeprefix(prefix + '.')}.weight"
        if name.startswith(f"{prefix}."):
            merged[local] = state[local] + pair.delta()
    model.adapter = adapter
    beside = LayerRunner(model, model.layer_map, "cpu")
    x = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(0))
    found = beside.run(beside.build(1, state), 1, x)
    torch.testing.assert_close(found, plain.run(plain.build(1, merged), 1, x), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(found, plain.run(plain.build(1, state), 1, x), atol=0.05)


def test_adapter_reads_unrounded_inputs(tiny_model, tmp_path):
    """A server applies the adapter to the input before a product rounds it."""
    folder = tiny_model("llama")
    linear, name = torch.nn.Linear(64, 64, bias=False), "model.layers.0.self_attn.o_proj"
    adapter = read_adapter(
        write_adapter(folder, tmp_path / "a", only=["0.self_attn.k_proj"]),
        adapted_shapes(FloatModel(folder).layer_map.family, FloatModel(folder).config),
    )
    pair = adapter.pairs["model.layers.0.self_attn.k_proj"]
    adapter.pairs[name] = pair  # 64 x 64
    module = torch.nn.ModuleDict({"self_attn": torch.nn.ModuleDict({"o_proj": linear})})
    put_beside(module, "model.layers.0", adapter, torch.float32, "cpu")
    linear.register_forward_pre_hook(lambda _, args: (args[0].round(),))
    x = torch.randn(3, 64)
    with torch.no_grad():
        want = x.round() @ linear.weight.T + x @ pair.delta().T
        torch.testing.assert_close(linear(x), want)


@pytest.mark.exhaustive
def test_codes_fit_the_adapted_data(docs_5m, tmp_path):
    """The float model with the adapter is closer to what was calibrated with it in place."""
    adapter = write_adapter(docs_5m, tmp_path / "a", rank=8, size=3.0)
    options = {"scheme": W4, "recipe": "gptq", "samples": 16, "sequence_length": 256}
    errors = {}
    for name, more in (("with", {"adapter": adapter}), ("without", {})):
        quantize_checkpoint(docs_5m, tmp_path / name, progress=False, **options, **more)
        errors[name] = _error(docs_5m, tmp_path / name, adapter)
    assert errors["with"] < 0.95 * errors["without"]


def _error(model, quantized, adapter):
    """Return the distance of hidden states from the float model's, both with the adapter."""
    from qserve.llm import LLM
    from qserve.lora.request import LoRARequest
    from qserve.params.sampling_params import SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompts = [list(range(50 + 40 * n, 80 + 40 * n)) for n in range(8)]
    found = []
    for folder in (model, quantized):
        llm = LLM(str(folder), enable_lora=True, device="cpu", num_gpu_blocks_override=64)
        outputs = llm.generate(
            prompts, params, False, lora_request=LoRARequest("a", 1, str(adapter))
        )
        found.append(
            [p.logprob for o in outputs for d in o.prompt_logprobs[1:] for p in d.values()]
        )
    a, b = map(torch.tensor, found)
    return (a - b).square().mean().item()


def test_adapter_is_reported_and_not_written(tiny_model, tmp_path):
    model = tiny_model("llama")
    adapter = write_adapter(model, tmp_path / "a", size=2.0)
    data = torch.randint(3, 512, (4, 32), generator=torch.Generator().manual_seed(1))
    from calibrate.texts.data import CalibrationData

    calibration = CalibrationData(source="test", ids_WS=data, seed=0)
    codes = {}
    for name, more in (("with", {"adapter": adapter}), ("without", {})):
        report = quantize_checkpoint(
            model, tmp_path / name, scheme=W4, recipe="gptq", calibration=calibration,
            progress=False, **more,
        )  # fmt: skip
        reader = CheckpointReader(tmp_path / name)
        assert not any("lora" in tensor for tensor in reader.entries)
        codes[name] = reader.get("model.layers.2.mlp.down_proj.qweight")
        written = json.loads((tmp_path / name / "quantization_report.json").read_text())
        assert (written["adapter"] is None) == (name == "without")
    assert written["adapter"] is None and report.adapter is None
    assert not torch.equal(codes["with"], codes["without"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"recipe": "awq"}, "changes the inputs of linears"),
        ({"recipe": "rtn"}, "reads no data, so an adapter has no effect"),
        ({"recipe": "gptq", "pad": True}, "cannot be combined with `pad`"),
    ],
)
def test_unsupported_options_with_an_adapter_are_refused(tiny_model, tmp_path, options, says):
    model = tiny_model("llama")
    adapter = write_adapter(model, tmp_path / "a", rank=1)
    with pytest.raises(InputError, match=says):
        quantize_checkpoint(model, tmp_path / "out", scheme=W4, adapter=adapter, **options)
    assert not (tmp_path / "out").exists()
