"""Adapters of the float model on checkpoints whose linears have scaled inputs and outputs."""

import logging
import shutil

import pytest
import torch

from calibrate.distillation.float_weights import FloatWeights
from calibrate.float_model import FloatModel
from calibrate.pipeline import quantize_checkpoint
from calibrate.recipe import Recipe
from calibrate.solvers import rtn
from calibrate.solvers.solving import Transform, move_scale
from calibrate.texts.data import CalibrationData
from formats.checkpoint import CheckpointReader
from formats.convert import convert_checkpoint
from formats.errors import InputError
from formats.files.channel_factors import ChannelFactors, read_channel_factors
from formats.files.side_files import CHANNEL_FACTORS
from formats.layouts import decode_linear
from formats.quant_config import QuantConfig
from formats.scheme import Scheme
from qserve.lora.request import LoRARequest
from tests.adapters import write_adapter
from tests.qserve.lora.test_lora_tokens import ATTENTION, EXPERTS, engine, run

SCHEME = Scheme.parse("w8a16-sym", 32)
DATA = CalibrationData(ids_WS=torch.arange(64).view(2, 32), source="counting", seed=0)


def scale_at_random(state, statistics, context):
    """Fold random factors between 1/3 and 3 into every scale pair of a layer."""
    changed = {}
    generator = torch.Generator().manual_seed(context.layer)
    for pair in context.scale_pairs:
        size = state[f"{pair.linears[0]}.weight"].shape[1]
        if pair.kind == "values":  # one factor for all heads
            heads, repeats = context.value_heads
            size //= heads * repeats
        factors = torch.exp((torch.rand(size, generator=generator) * 2 - 1) * 1.1)
        if pair.kind == "values":
            factors = factors.repeat(heads * repeats)
        changed |= move_scale({**state, **changed}, statistics, pair, factors, context)
    return changed


RECIPE = Recipe(
    name="awq of the test",
    solver=rtn.solve_weighted,
    transforms=(Transform(name="random factors", on_statistics=scale_at_random),),
)


def quantized(source, folder, recipe):
    quantize_checkpoint(
        source, folder, scheme=SCHEME, recipe=recipe, calibration=DATA, progress=False
    )
    return folder


def logprobs(model, *adapters):
    llm = engine(model)
    loras = [LoRARequest(path.name, n, str(path)) for n, path in enumerate(adapters, start=1)]
    return [torch.tensor(found) for _, found in run(llm, [*loras, None])]


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in (
                *("qwen2", "phi3", "gemma2", "glm4", "deepseek_v2", "deepseek_v3", *EXPERTS),
                *("qwen3_next", "qwen3_5", "granite_hybrid", "lfm2"),
            )
        ),
    ],
)
def test_float_model_adapters_are_scaled_to_fit(tiny_model, tmp_path, family):
    model = tiny_model(family)
    only = ATTENTION if family in EXPERTS else ()
    adapter = write_adapter(model, tmp_path / "adapter", only=only)
    wanted, plain = logprobs(model, adapter)
    folder = quantized(model, tmp_path / "scaled", RECIPE)
    assert read_channel_factors(folder) and CHANNEL_FACTORS in (folder / "README.md").read_text()
    fitted, base = logprobs(folder, adapter)
    # the factors do not change the model, and the adapter changes it far more than rounding does
    effect = (wanted - plain).norm()
    assert (base - plain).norm() < 0.3 * effect
    assert (fitted - wanted).norm() < 0.35 * effect
    (folder / CHANNEL_FACTORS).unlink()
    unfitted, _ = logprobs(folder, adapter)
    assert (unfitted - wanted).norm() > 0.5 * effect


def test_factors_survive_conversion_and_another_quantization(tiny_model, tmp_path):
    folder = quantized(tiny_model("llama"), tmp_path / "scaled", RECIPE)
    convert_checkpoint(folder, tmp_path / "converted", "compressed-tensors")
    before = (folder / CHANNEL_FACTORS).read_bytes()
    assert (tmp_path / "converted" / CHANNEL_FACTORS).read_bytes() == before
    source = shutil.copytree(tiny_model("llama"), tmp_path / "float")
    shutil.copy(folder / CHANNEL_FACTORS, source)
    twice = read_channel_factors(quantized(source, tmp_path / "twice", RECIPE)).tensors()
    for name, once in read_channel_factors(folder).tensors().items():
        torch.testing.assert_close(twice[name], once * once)


@pytest.mark.parametrize("linear", ["self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj"])
def test_float_weights_for_distillation_are_scaled_as_the_checkpoint(tiny_model, tmp_path, linear):
    model = FloatModel(tiny_model("llama"))
    folder = quantized(tiny_model("llama"), tmp_path / "scaled", RECIPE)
    reader = CheckpointReader(folder)
    quant = QuantConfig.from_dict(reader.config["quantization_config"])
    name = f"model.layers.1.{linear}"
    own = {n.removeprefix(f"{name}."): reader.get(n) for n in reader.entries if n.startswith(name)}
    found_NK = decode_linear(name, own, quant).dequantize()

    def error(factors):
        wanted_NK = FloatWeights(model, None, factors)(1, linear).float()
        return (found_NK - wanted_NK).norm() / wanted_NK.norm()

    assert error(read_channel_factors(folder)) < 0.02
    assert error(None) > 0.2


def test_recipes_without_factors_write_no_file(tiny_model, tmp_path):
    folder = quantized(tiny_model("llama"), tmp_path / "plain", "rtn")
    assert not (folder / CHANNEL_FACTORS).exists()
    assert CHANNEL_FACTORS not in (folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("recipe", "with_factors", "warning"),
    [
        ("rotate+awq+gptq", True, "rotates the inputs of all linears"),
        ("awq+gptaq", False, "has no channel_factors.st"),
        ("awq+gptaq", True, None),
        ("gptaq", False, None),
    ],
)
def test_unfitting_adapters_give_a_warning(tmp_path, caplog, recipe, with_factors, warning):
    from qserve.lora.base_factors import factors_for_adapters

    (tmp_path / "quality.json").write_text(f'{{"version": 1, "recipe": "{recipe}"}}')
    factors = ChannelFactors(inputs={"a": torch.ones(4)})
    if with_factors:
        (tmp_path / CHANNEL_FACTORS).write_bytes(factors.to_bytes())
    with caplog.at_level(logging.WARNING):
        found = factors_for_adapters(tmp_path)
    assert (found is not None) == with_factors
    assert [warning in each.message for each in caplog.records] == ([True] if warning else [])


def test_awq_of_other_tools_gives_a_warning(tmp_path, caplog):
    from qserve.lora.base_factors import factors_for_adapters

    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    assert factors_for_adapters(tmp_path) is None
    assert "made by awq" in caplog.text and "gptaq" in caplog.text


def test_damaged_factors_are_refused(tmp_path):
    path = tmp_path / CHANNEL_FACTORS
    cases = {
        b"": "cannot be read",
        ChannelFactors(inputs={"a": torch.zeros(2)}).to_bytes(): "must be positive",
        ChannelFactors(inputs={"a": torch.ones(2)}).to_bytes()[:-3]: "cannot be read",
        ChannelFactors(inputs={"a": torch.ones(2)})
        .to_bytes()
        .replace(b"a.inputs", b"a.incuts"): "not the name of a factor",
    }
    for content, problem in cases.items():
        path.write_bytes(content)
        with pytest.raises(InputError, match=problem):
            read_channel_factors(tmp_path)


def test_factors_of_wrong_size_are_refused(tiny_model, tmp_path):
    model = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    name = "model.layers.0.self_attn.q_proj"
    factors = ChannelFactors(inputs={name: torch.ones(3)})
    (model / CHANNEL_FACTORS).write_bytes(factors.to_bytes())
    adapter = write_adapter(model, tmp_path / "adapter")
    with pytest.raises(InputError, match=f"{name} in channel_factors.st.*expected .*, found 3"):
        run(engine(model), [LoRARequest("a", 1, str(adapter))])
