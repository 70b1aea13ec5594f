"""Floors of a step count the weights of transformers' modules, and attention only where layers have
it."""

import pytest
from transformers import AutoModelForCausalLM

from qkernels.bench.measure import Ceiling
from qserve.bench.steps.step_case import StepCase
from qserve.bench.steps.step_floors import linear_weights, model_floors_us
from qserve.model.model_config import ModelConfig

PER_SECOND = 1e6  # with one byte and one operation per microsecond, floors are counts
CEILING = Ceiling(bytes_per_second=PER_SECOND, operations_per_second=PER_SECOND)
# Family -> number of layers with attention in its tiny model.
LAYERS = {"opt": 3, "qwen3_5": 1, "mamba2": 0, "nemotron_h": 1, "falcon_h1": 3}
SLOW = ("nemotron_h", "falcon_h1")


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=pytest.mark.exhaustive if f in SLOW else ()) for f in LAYERS],
)
def test_floors_of_a_family(tiny_model, family):
    folder = tiny_model(family)
    config = ModelConfig.from_folder(folder)
    weights = sum(
        module.weight.numel()
        for name, module in AutoModelForCausalLM.from_pretrained(folder).named_modules()
        if type(module).__name__ == "Linear" and name != "lm_head"
    )
    assert linear_weights(config) == (weights, 2 * weights)
    case = StepCase.parse("decode=2*1@99")
    found = model_floors_us(config, case, CEILING, kv_bytes_per_token=0, ranks=1)
    head = config.hidden_size * config.vocab_size
    assert found["products"] == 2 * 2 * (weights + head)  # two tokens
    # A request's token reads 99.5 keys: one product with queries, one with values.
    width = config.num_heads * config.head_dim
    assert found["attention"] == pytest.approx(LAYERS[family] * 2 * 99.5 * 2 * 2 * width)


def test_bytes_of_quantized_linears(quantized_5m):
    number, num_bytes = linear_weights(ModelConfig.from_folder(quantized_5m))
    assert num_bytes == number / 2
