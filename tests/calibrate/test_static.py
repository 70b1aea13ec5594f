"""Static activation scales come from the calibration data, and hold all of it."""

import pytest
import torch
import transformers

from calibrate.data import read_calibration
from calibrate.layer import static_scale
from calibrate.pipeline import quantize_checkpoint
from calibrate.statistics import InputStatistics
from formats.activation import MIN_INPUT_SCALE, check_input_scale
from formats.checkpoint import CheckpointReader
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


def test_first_scale_is_the_largest_input_over_127(written, docs_5m, data):
    model = transformers.AutoModelForCausalLM.from_pretrained(docs_5m, dtype=torch.float32)
    largest = []
    model.model.layers[0].self_attn.q_proj.register_forward_pre_hook(
        lambda _, args: largest.append(args[0].abs().max())
    )
    with torch.no_grad():
        model(data.ids_WS)
    scale = written.get(ATTENTION.format(0, "q"))
    torch.testing.assert_close(scale.float().flatten()[0], largest[0] / 127, rtol=1e-5, atol=0)


def test_linears_of_one_input_share_its_scale(written):
    scales = [written.get(ATTENTION.format(i, p)).item() for i in range(4) for p in "qkv"]
    for layer in range(4):
        assert len(set(scales[3 * layer : 3 * layer + 3])) == 1
    assert len(set(scales)) == 4
    assert all(scale > 0 for scale in scales)


@pytest.mark.parametrize("kind", ["int", "float"])
def test_an_input_of_zeros_has_a_scale_that_can_be_stored(kind):
    stats = InputStatistics(64, "cpu")
    stats.update(torch.zeros(8, 64))
    activation = ActivationSpec(type=kind, dynamic=False, per="tensor")
    scale = static_scale(stats, activation)
    check_input_scale(activation, torch.tensor(scale))
    assert scale == MIN_INPUT_SCALE and stats.notes == []
