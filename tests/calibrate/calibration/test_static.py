"""Static activation scales come from the calibration data: the range with the least error."""

import pytest
import torch
import transformers

from calibrate.calibration.input_range import FRACTIONS, rounding_error, static_scale
from calibrate.calibration.statistics import InputStatistics
from calibrate.pipeline import quantize_checkpoint
from calibrate.texts.data import read_calibration
from formats.checkpoint import CheckpointReader
from formats.numerics.activation import MIN_INPUT_SCALE, check_input_scale
from formats.scheme import ActivationSpec, Scheme

ATTENTION = "model.layers.{}.self_attn.{}_proj.input_scale"


@pytest.fixture(scope="module")
def data(docs_5m):
    tokenizer = transformers.AutoTokenizer.from_pretrained(docs_5m)
    return read_calibration(None, tokenizer, samples=4, sequence_length=128, seed=0)


@pytest.fixture(scope="module")
def written(docs_5m, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("static") / "out"
    scheme = Scheme.parse("w8a8-static")
    quantize_checkpoint(docs_5m, folder, scheme=scheme, calibration=data, progress=False)
    return CheckpointReader(folder)


def test_initial_scale_is_fraction_of_largest_input_over_127(docs_5m, data, tmp_path):
    """With rtn, which does not change the inputs, every token of the data counts for the range."""
    scheme = Scheme.parse("w8a8-static")
    quantize_checkpoint(
        docs_5m, tmp_path / "x", scheme=scheme, recipe="rtn", calibration=data, progress=False
    )
    written = CheckpointReader(tmp_path / "x")
    model = transformers.AutoModelForCausalLM.from_pretrained(docs_5m, dtype=torch.float32)
    largest = []
    model.model.layers[0].self_attn.q_proj.register_forward_pre_hook(
        lambda _, args: largest.append(args[0].abs().max())
    )
    with torch.no_grad():
        model(data.ids_WS)
    scale = written.get(ATTENTION.format(0, "q"))
    found = float(scale) / float(largest[0] / 127)
    assert min(abs(found - fraction) for fraction in FRACTIONS) < 1e-5


def test_linears_of_one_input_share_its_scale(written):
    scales = [written.get(ATTENTION.format(i, p)).item() for i in range(4) for p in "qkv"]
    for layer in range(4):
        assert len(set(scales[3 * layer : 3 * layer + 3])) == 1
    assert len(set(scales)) == 4
    assert all(scale > 0 for scale in scales)


@pytest.mark.parametrize("kind", ["int", "float"])
def test_all_zero_input_has_storable_scale(kind):
    stats = InputStatistics(64, "cpu")
    stats.update(torch.zeros(8, 64))
    activation = ActivationSpec(type=kind, dynamic=False, per="tensor")
    scale = static_scale(stats, activation)
    check_input_scale(activation, torch.tensor(scale))
    assert scale == MIN_INPUT_SCALE and "only zeros reached this linear" in stats.notes[0]


INT8 = ActivationSpec(dynamic=False, per="tensor")


def outlier_statistics():
    """Normal inputs, and one value that is 200 times as large."""
    stats = InputStatistics(64, "cpu")
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
    x[0, 3] = 600.0
    stats.update(x)
    return stats


def test_single_outlier_is_clipped():
    stats = outlier_statistics()
    stats._sample = [stats.sample().clamp(-5, 5)]  # the sample need not have seen it
    scale = static_scale(stats, INT8)
    assert 3 / 127 < scale < 15 / 127
    ones, sample = torch.ones(64), stats.sample()
    assert rounding_error(sample, scale, ones) < rounding_error(sample, 600 / 127, ones) / 100


def test_input_with_large_weights_is_not_clipped():
    stats = outlier_statistics()
    weight = torch.full((8, 64), 1e-3)
    weight[:, 3] = 100.0
    assert static_scale(stats, INT8, [weight]) > 400 / 127
    weight[:, 3] = 0.0
    assert static_scale(stats, INT8, [weight]) < 40 / 127


def test_float8_keeps_the_largest_value():
    spec = ActivationSpec(type="float", dynamic=False, per="tensor")
    assert static_scale(outlier_statistics(), spec) == pytest.approx(600 / 448)
