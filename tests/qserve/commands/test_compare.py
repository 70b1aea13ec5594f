"""`inspect --deep`: what is too far from the float model depends on the bits."""

import json

import pytest
from safetensors.torch import load_file, save_file

from calibrate.pipeline import quantize_checkpoint
from calibrate.quality.evaluation import HELD_OUT
from formats.errors import InputError
from formats.scheme import Scheme
from qserve.cli import main
from qserve.commands.compare import Comparison, compare_models


@pytest.fixture(scope="module")
def two_bits(docs_5m, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "w2"
    scheme = Scheme.parse("w2a16-sym-g32")
    quantize_checkpoint(docs_5m, folder, scheme=scheme, output_format="gptq", progress=False)
    return folder


def test_valid_two_bit_model_is_not_called_broken(docs_5m, two_bits):
    found = compare_models(two_bits, docs_5m, "cpu")
    assert found.divergence > 2, "more than a broken model of 8 bits may have"
    assert found.rounding_divergence == pytest.approx(found.divergence, rel=1e-3)
    assert found.ok and "broken" not in found.to_text()
    assert "rounded to nearest in the same bits: 2." in found.to_text()


def test_text_has_eval_figures(docs_5m, two_bits, capsys):
    found = compare_models(two_bits, docs_5m, "cpu").on_text
    command = ["eval", str(two_bits), "--against", str(docs_5m), "--text", str(HELD_OUT)]
    command += ["--windows", "1", "--sequence-length", "256", "--device", "cpu"]
    assert main([*command, "--dtype", "float32", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    for name in ("perplexity", "reference_perplexity", "divergence", "same_top_token", "tokens"):
        assert getattr(found, name) == pytest.approx(report[name], rel=1e-4)


def test_shuffled_groups_are_called_broken_at_two_bits(docs_5m, two_bits):
    """The cheap checks of `inspect` cannot detect this: every scale is a valid number."""
    state = load_file(two_bits / "model.safetensors")
    for name in [name for name in state if name.endswith("scales")]:
        state[name] = state[name].roll(1, 0)
    save_file(state, two_bits / "model.safetensors", metadata={"format": "pt"})
    found = compare_models(two_bits, docs_5m, "cpu")
    assert not found.ok and "a broken one\n" in found.to_text()


def test_equal_model_needs_no_rounding_baseline(docs_5m):
    found = compare_models(docs_5m, docs_5m, "cpu")
    assert (found.divergence, found.rounding_divergence) == (pytest.approx(0, abs=1e-6), None)
    assert found.ok and found.limit == 1


def test_quantized_reference_is_not_called_the_float_model(docs_5m, quantized_5m):
    found = compare_models(docs_5m, quantized_5m, "cpu")
    lines = found.to_text().splitlines()
    name = f"against {quantized_5m}, which is quantized too, "
    assert len(lines) == 2 and all(line.startswith(name) for line in lines)


def test_other_vocabulary_is_refused_and_rounding_divergence_is_allowed(docs_5m, tiny_model):
    with pytest.raises(InputError, match="has 512 tokens, .* has 8192"):
        compare_models(docs_5m, tiny_model("llama"), "cpu")
    numbers = {"tokens": 1, "relative_error": 1.0, "same_top_token": 0.0}
    assert not Comparison(divergence=1.5, **numbers).ok
    assert Comparison(divergence=1.5, rounding_divergence=0.8, **numbers).ok
