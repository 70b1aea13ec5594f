"""Images on a CUDA GPU: kernels in bfloat16 and CUDA graphs answer as transformers does."""

import pytest
import torch

from tests.qserve.multimodal.test_image_tokens import requests_of
from tests.tiny_vision import VISION_FAMILIES

# the least of KV pages: other tests may use the GPU as well
ON_GPU = {"device": "cuda", "dtype": "bfloat16", "block_size": 16, "num_gpu_blocks_override": 256}


@pytest.mark.gpu
# The experts of qwen3_5_moe in bfloat16 differ where two are nearly equal.
@pytest.mark.parametrize("family", [name for name in VISION_FAMILIES if "moe" not in name])
def test_answers_are_near_transformers_best(vision, family):
    """A wrong embedding, mask or position moves a token of these random models to any rank.

    The second engine cuts images, and finds the kernels that the first one compiled.
    """
    model = vision(family)
    requests = requests_of(model)
    for settings in ({}, {"max_num_batched_tokens": 23}):
        engine = model.engine(1, **ON_GPU, **settings)
        answers, _ = model.run(engine, *requests)
        assert all(map(len, answers))
        pairs = zip(requests, answers, strict=True)
        lags = torch.cat([model.lags(*request, tokens) for request, tokens in pairs])
        assert lags.max() < 0.3
        assert (lags == 0).float().mean() > 0.8
        engine.close()


@pytest.mark.gpu
def test_a_step_with_an_image_runs_in_a_graph(vision, monkeypatch):
    """The same tokens as launched kernel by kernel."""
    model, found = vision("qwen3_vl"), []
    for is_eager in (True, False):
        engine = model.engine(1, **ON_GPU, enforce_eager=is_eager)
        if not is_eager:
            graphs, used = engine.runner.graphs, []
            replay = graphs.replay
            monkeypatch.setattr(graphs, "replay", lambda key: used.append(key) or replay(key))
        found.append(model.run(engine, *requests_of(model))[0])
        engine.close()
    assert any(key.has_media for key in used)
    pairs = [(a == b) for one, other in zip(*found, strict=True) for a, b in zip(one, other)]
    assert sum(pairs) > 0.8 * len(pairs)  # in bfloat16 padding may change a sum
