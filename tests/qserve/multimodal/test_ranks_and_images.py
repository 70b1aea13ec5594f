"""Images on tensor parallel ranks: each encodes them, and the tokens are transformers'."""

import pytest

from tests.qserve.multimodal.test_image_tokens import requests_of
from tests.tiny_vision import VISION_FAMILIES

# Positions of three axes, and rows that the first layers add.
DEFAULT = "qwen3_vl"
STATES = ("qwen3_5", "qwen3_5_moe")  # models with states have one rank
FAMILIES = [
    pytest.param(name, marks=() if name == DEFAULT else pytest.mark.exhaustive)
    for name in VISION_FAMILIES
    if name not in STATES
]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_two_ranks(family, vision):
    model = vision(family)
    engine = model.engine(tensor_parallel_size=2, max_num_batched_tokens=23)
    try:
        requests = requests_of(model)
        found, _ = model.run(engine, *requests)
        assert found == [model.expected(*request) for request in requests]
        _, (text, images), *_ = requests
        longer = f"{text} and then"
        (again,), (event,) = model.run(engine, (longer, images))  # its rows are on both ranks
        assert again == model.expected(longer, images)
        assert event.facts.num_cached > 0
    finally:
        engine.close()
