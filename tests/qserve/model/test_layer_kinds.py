"""A sample with one layer of each kind: its choice, and that the decoder is unchanged."""

import pytest
import torch

from qserve.config import EngineConfig
from qserve.engine.engine import Engine
from qserve.engine.step.step_input import StepInput
from qserve.model.layer_kinds import sample_of_layers


def load(folder):
    return Engine(
        EngineConfig(model=str(folder), device="cpu", num_gpu_blocks_override=8, admission="fits")
    )


@pytest.mark.parametrize(
    ("family", "numbers"),
    [
        ("llama", [0, 1]),
        ("mistral", [0, 1]),
        ("qwen2", [0, 1]),  # the layers after the first have windows
        ("qwen3", [0, 1]),
    ],
)
def test_sample_has_first_layer_and_one_of_each_kind(tiny_model, family, numbers):
    decoder = load(tiny_model(family)).runner.decoder
    sample, found = sample_of_layers(decoder)
    assert found == numbers
    assert len(sample.layers) == len(numbers) and len(decoder.layers) == 3
    assert [sample.layers[i] is decoder.layers[n] for i, n in enumerate(numbers)]


def test_sample_includes_differing_layer(tiny_model):
    decoder = load(tiny_model("llama")).runner.decoder
    decoder.layers[2].attention.window = 5
    assert sample_of_layers(decoder)[1] == [0, 1, 2]
    decoder.layers[2].attention.window = None
    weight = decoder.layers[2].attention_norm.weight
    decoder.layers[2].attention_norm.weight = torch.cat([weight, weight])[::2]
    assert sample_of_layers(decoder)[1] == [0, 1, 2], "other strides are another kernel"


def test_sample_runner_steps_leave_full_runner_unchanged(quantized_5m):
    engine = load(quantized_5m)
    want = engine.logits([5, 6, 7])
    sample = engine.runner.sample()
    step = StepInput.padding(num_requests=2, count=3, max_context_len=3, page_size=16)
    assert len(sample.launch(step).result()) == 2
    assert len(sample.caches) == 2 < len(engine.runner.caches)
    assert torch.equal(engine.logits([5, 6, 7]), want)
