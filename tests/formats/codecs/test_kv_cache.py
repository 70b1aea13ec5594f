"""Scales of an 8-bit KV cache: config keys, arithmetic, conversion, and inspection."""

import pytest
import torch

from formats.checkpoint import CheckpointReader
from formats.codecs.kv_cache import KEY, kv_scale, round_kv
from formats.convert import convert_checkpoint
from formats.errors import CheckpointError, InputError
from formats.inspection.inspect import inspect_checkpoint
from formats.quant_config import BLOCK, QuantConfig
from formats.scheme import Scheme

SCHEME = Scheme.parse("w4a16-sym-g32")


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize(("kv_cache", "kind"), [("int8", "int"), ("fp8", "float")])
def test_kv_cache_block_round_trips_and_parses_in_library(kv_cache, kind, per_head):
    schemes = {"model.layers.0.mlp.up_proj": SCHEME}
    config = QuantConfig.of_modules(
        "compressed-tensors", schemes, kv_cache=kv_cache, kv_per_head=per_head
    )
    block = config.to_dict()
    assert QuantConfig.from_dict(block) == config
    library = pytest.importorskip("compressed_tensors")
    theirs = library.QuantizationConfig.model_validate(block).kv_cache_scheme
    strategy = "attn_head" if per_head else "tensor"
    assert (theirs.num_bits, theirs.type, theirs.strategy) == (8, kind, strategy)
    assert theirs.symmetric and theirs.dynamic is False


@pytest.mark.parametrize(
    "change",
    [
        {"num_bits": 4},
        {"type": "nf"},
        {"dynamic": True},
        {"symmetric": False},
        {"strategy": "token"},
        None,
    ],
)
def test_unsupported_kv_cache_type_is_refused(change):
    schemes = {"model.layers.0.mlp.up_proj": SCHEME}
    block = QuantConfig.of_modules("compressed-tensors", schemes, kv_cache="fp8").to_dict()
    block[KEY] = {**block[KEY], **change} if change else ["fp8"]
    with pytest.raises(CheckpointError, match=f"{KEY}: expected 8 symmetric.*16-bit KV cache"):
        QuantConfig.from_dict(block)


def test_largest_value_maps_to_largest_code_and_larger_is_clipped():
    x = torch.tensor([-3.0, 1.0, 0.0, 3.0, 50.0])
    for kv_cache, steps in (("int8", 127), ("fp8", 448)):
        scale = kv_scale(3.0, kv_cache)
        assert scale == pytest.approx(3 / steps)
        found = round_kv(x, scale, kv_cache)
        assert found[[0, 2, 3, 4]].tolist() == pytest.approx([-3, 0, 3, 3])
        lowest = round_kv(torch.tensor([-50.0]), scale, kv_cache)
        assert float(lowest) == pytest.approx(-128 / 127 * 3 if kv_cache == "int8" else -3)
        assert 0 < abs(float(found[1]) - 1) <= 1 / 16
        assert kv_scale(0.0, kv_cache) > 0
    assert round_kv(x.bfloat16(), 0.1, "int8").dtype == torch.bfloat16


@pytest.fixture
def model(model):
    """model(kv_cache) -> (tensors, config) in compressed-tensors, free to be changed."""

    def make(kv_cache: str):
        state, config = model("compressed-tensors", str(SCHEME), kv_cache)
        for layer in range(2):
            for number, kind in enumerate(("k_scale", "v_scale")):
                value = torch.tensor([0.25 + layer + number])
                state[f"model.layers.{layer}.self_attn.{kind}"] = value
        return state, config

    return make


def test_convert_keeps_the_scales_or_refuses(model, write_folder, tmp_path):
    tensors, config = model("int8")
    source = write_folder(tensors, config)
    convert_checkpoint(source, tmp_path / "same", "compressed-tensors")
    written = CheckpointReader(tmp_path / "same")
    assert written.config[BLOCK][KEY] == config[BLOCK][KEY]
    for name in (name for name in tensors if name.endswith(("k_scale", "v_scale"))):
        assert torch.equal(written.get(name), tensors[name])
    for other in ("gptq", "awq"):
        with pytest.raises(InputError, match=f"int8: {other} cannot store.*compressed-tensors"):
            convert_checkpoint(source, tmp_path / other, other)
        assert not (tmp_path / other).exists()


SCALE = "model.layers.1.self_attn.k_scale"
DAMAGE = {
    "missing": (lambda t: t.pop(SCALE), "is missing, though config.json states an fp8"),
    "zero": (lambda t: t.update({SCALE: torch.zeros(1)}), "expected one finite number"),
    "negative": (lambda t: t.update({SCALE: torch.tensor([-1.0])}), "expected one finite number"),
    "nan": (lambda t: t.update({SCALE: torch.tensor([torch.nan])}), "expected one finite number"),
    "integer": (lambda t: t.update({SCALE: torch.ones(1).int()}), "expected one finite number"),
    "for each head": (lambda t: t.update({SCALE: torch.ones(2)}), "expected one finite number"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_inspect_names_damaged_kv_scale(model, write_folder, kind):
    change, text = DAMAGE[kind]
    tensors, config = model("fp8")
    change(tensors)
    (problem,) = inspect_checkpoint(write_folder(tensors, config)).problems
    assert (problem.severity, problem.subject) == ("error", SCALE)
    assert text in problem.text


def test_inspect_finds_kv_scales_under_alternative_names(model, write_folder):
    tensors, config = model("fp8")
    tensors["model.layers.1.self_attn.k_proj.k_scale"] = tensors.pop(SCALE)
    assert inspect_checkpoint(write_folder(tensors, config)).problems == ()


def test_inspect_warns_of_kv_scales_missing_from_config(model, write_folder):
    tensors, config = model(None)
    (problem,) = inspect_checkpoint(write_folder(tensors, config)).problems
    assert (problem.severity, problem.subject) == (
        "warning",
        "model.layers.0.self_attn.k_scale",
    )
    assert "3 other scales" in problem.text


@pytest.mark.parametrize(("kv_cache", "warned"), [("fp8", False), ("int8", True)])
def test_loads_in_verdicts_for_kv_scales(model, write_folder, kv_cache, warned):
    found = inspect_checkpoint(write_folder(*model(kv_cache)))
    assert found.kv_cache == kv_cache
    assert f", scales of an {kv_cache} KV cache" in found.to_text().splitlines()[0]
    answers = {verdict.program: verdict.answer for verdict in found.loads_in}
    assert {p for p, answer in answers.items() if answer != "yes"} == (
        {"vLLM"} if warned else set()
    )
    reasons = {verdict.program: verdict.reason for verdict in found.loads_in}
    for program in ("vLLM", "SGLang"):
        assert ("8-bit KV cache is float8" in reasons[program]) == warned
