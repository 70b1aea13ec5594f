"""Experts that calibration data does not reach: their static scales, and routing to all of them."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from calibrate.calibration.layer_runner import LayerRunner
from calibrate.float_model import FloatModel
from calibrate.pipeline import quantize_checkpoint
from calibrate.texts.data import CalibrationData
from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from formats.scheme import Scheme

IDS = torch.randint(0, 512, (2, 24), generator=torch.Generator().manual_seed(0))
OPTIONS = {
    "scheme": Scheme.parse("w8a8-static"),
    "recipe": "rtn",
    "calibration": CalibrationData(ids_WS=IDS, source="random ids", seed=0),
    "progress": False,
}
FAMILIES = {  # family -> module of its experts, their linears, how many a token has here
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj"), 2),
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2"), 1),
}


@pytest.fixture(scope="module")
def starving(tiny_model, tmp_path_factory):
    """Family -> its tiny model, in whose first layer no token reaches the experts 0 and 1."""
    made = {}

    def make(family):
        if family not in made:
            module, _, chosen = FAMILIES[family]
            folder = made[family] = tmp_path_factory.mktemp(family) / "model"
            shutil.copytree(tiny_model(family), folder)
            config = json.loads((folder / "config.json").read_text())
            config = {**config, "num_experts_per_tok": chosen}
            (folder / "config.json").write_text(json.dumps(config))
            tensors = load_file(folder / "model.safetensors")
            # as many of the other scores as are chosen are always above the first two experts' 0
            gate = tensors[f"model.layers.0.{module}.gate.weight"]
            gate[:2] = 0
            gate[2 + chosen :] = -gate[2 : 2 + chosen].repeat(4, 1)[: len(gate) - 2 - chosen]
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return made[family]

    return make


def scales_of(folder, prefix):
    reader = CheckpointReader(folder)
    return {
        tuple(name.removeprefix(prefix + ".").split(".")[:2]): reader.get(name).item()
        for name in reader.entries
        if name.startswith(prefix + ".") and name.endswith("input_scale")
    }


@pytest.mark.parametrize(
    ("family", "device"),
    [
        ("mixtral", "cpu"),
        ("qwen3_moe", ["cpu", "cpu"]),
        pytest.param("qwen3_moe", "cpu", marks=pytest.mark.exhaustive),
    ],
)
def test_experts_without_tokens_get_largest_scale_of_others(starving, tmp_path, family, device):
    module, linears, _ = FAMILIES[family]
    report = quantize_checkpoint(starving(family), tmp_path / "out", device=device, **OPTIONS)
    prefix = f"model.layers.0.{module}.experts"
    tokens = {linear.name: linear.tokens for linear in report.linears}
    scales = scales_of(tmp_path / "out", prefix)
    numbers = {int(number) for number, _ in scales}
    starved = {n for n in numbers if tokens[f"{prefix}.{n}.{linears[0]}"] == 0}
    assert starved >= {0, 1} and starved != numbers
    for linear in linears:
        largest = max(scales[str(n), linear] for n in numbers - starved)
        assert {scales[str(n), linear] for n in starved} == {largest}
        assert 1e-6 < largest < 1
    (warning,) = [text for text in report.warnings if text.startswith(f"{prefix}: ")]
    named = ", ".join(str(n) for n in sorted(starved))
    assert f"no calibration token reached experts {named}: " in warning
    assert "--moe-calibrate-all-experts" in warning and warning in report.to_text()


def test_expert_with_only_zero_inputs_counts_as_without_tokens(starving, tmp_path):
    """An expert whose up_proj is zero gives its down_proj nothing but zeros."""
    folder = tmp_path / "model"
    shutil.copytree(starving("qwen3_moe"), folder)
    tensors = load_file(folder / "model.safetensors")
    prefix = "model.layers.0.mlp.experts"
    tensors[f"{prefix}.2.up_proj.weight"] = torch.zeros(32, 64)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    report = quantize_checkpoint(folder, tmp_path / "out", **OPTIONS)
    scales = scales_of(tmp_path / "out", prefix)
    assert scales["2", "down_proj"] == max(scales[str(n), "down_proj"] for n in range(3, 6))
    assert "only zeros reached a linear of expert 2: " in "; ".join(report.warnings)


def test_given_scales_are_kept_and_used_for_others(starving, tmp_path):
    prefix = "model.layers.0.mlp.experts"
    given = {f"{prefix}.0.gate_proj": 0.25, f"{prefix}.3.down_proj": 0.75}
    quantize_checkpoint(starving("qwen3_moe"), tmp_path / "out", input_scales=given, **OPTIONS)
    scales = scales_of(tmp_path / "out", prefix)
    assert scales["0", "gate_proj"] == scales["1", "gate_proj"] == 0.25
    assert scales["0", "down_proj"] == scales["3", "down_proj"] == 0.75


@pytest.mark.parametrize(
    "family", ["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.exhaustive)]
)
def test_all_tokens_are_sent_to_all_experts(starving, tmp_path, family):
    """The experts read what transformers' layer gives its own."""
    module, (gate, *_), _ = FAMILIES[family]
    report = quantize_checkpoint(
        starving(family), tmp_path / "out", moe_calibrate_all_experts=True, **OPTIONS
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(starving(family), dtype=torch.float32)
    seen = []
    model.model.layers[0].post_attention_layernorm.register_forward_hook(
        lambda module, args, output: seen.append(float(output.abs().max()))
    )
    with torch.no_grad():
        model(IDS)
    in_experts = [linear for linear in report.linears if ".experts." in linear.name]
    assert {linear.tokens for linear in in_experts} == {IDS.numel()}
    of_gates = {
        linear.input_absmax
        for linear in in_experts
        if linear.name.startswith(f"model.layers.0.{module}.") and linear.name.endswith(gate)
    }
    assert list(of_gates) == [pytest.approx(seen[0], rel=1e-5)]
    assert not [text for text in report.warnings if "no calibration token" in text]


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_output_uses_routed_experts(starving, family):
    model = FloatModel(starving(family))
    runner = LayerRunner(model, model.layer_map, "cpu")
    hidden = torch.randn(2, 12, 64, generator=torch.Generator().manual_seed(1))
    state = model.layer(0, "cpu")
    usual, routed = (
        runner.run(runner.build(0, state, all_experts=every), 0, hidden) for every in (False, True)
    )
    assert torch.allclose(usual, routed, atol=1e-6)


def test_expert_flag_without_effect_is_refused(starving, docs_5m, tmp_path):
    flag = {"moe_calibrate_all_experts": True}
    with pytest.raises(
        InputError, match="--moe-calibrate-all-experts: has no effect: the model has no experts"
    ):
        quantize_checkpoint(docs_5m, tmp_path / "out", **flag, **OPTIONS)
    with pytest.raises(InputError, match="--moe-calibrate-all-experts: .* need no data"):
        quantize_checkpoint(
            starving("mixtral"),
            tmp_path / "out",
            scheme=Scheme.parse("w4a16-sym-g32"),
            progress=False,
            **flag,
        )
