"""Images on a CUDA GPU: kernels in bfloat16 and CUDA graphs answer as transformers does."""

import pytest
import torch

from tests.qserve.multimodal.test_image_tokens import requests_of
from tests.tiny_vision import VISION_FAMILIES

# the least of KV pages: other tests may use the GPU as well
ON_GPU = {"device": "cuda", "dtype": "bfloat16", "block_size": 16, "num_gpu_blocks_override": 256}
# In bfloat16, experts differ from transformers' where two are nearly equal. Kimi's activations
# exceed the range of float16.
IN_FLOAT16 = {"llama4", "qwen3_vl_moe", "glm4v_moe", "qwen3_5_moe"}
BEHIND = {"kimi_k25": 0.5}


def replayed_keys(graphs, monkeypatch):
    """Keys of the graphs that run from now on."""
    found, replay = [], graphs.replay
    monkeypatch.setattr(graphs, "replay", lambda key: found.append(key) or replay(key))
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_answers_are_near_transformers_best(vision, family, monkeypatch):
    """A wrong embedding, mask or position moves a token of these random models to any rank.

    The second engine cuts images, and finds the kernels that the first one compiled.
    """
    model = vision(family)
    requests = requests_of(model)
    on_gpu = ON_GPU | ({"dtype": "float16"} if family in IN_FLOAT16 else {})
    for settings in ({}, {"max_num_batched_tokens": 23}):
        engine = model.engine(1, **on_gpu, **settings)
        keys = replayed_keys(engine.runner.graphs, monkeypatch)
        answers, _ = model.run(engine, *requests)
        if not settings:  # steps of 23 rows may fit into no graph
            # Rows of Gemma 3 and 4 see each other, in plain torch.
            assert any(key.has_media for key in keys) != model.processor.config.is_mutual
        assert all(map(len, answers))
        pairs = zip(requests, answers, strict=True)
        lags = torch.cat([model.lags(*request, tokens) for request, tokens in pairs])
        assert lags.max() < BEHIND.get(family, 0.3)
        assert (lags == 0).float().mean() > 0.8
        engine.close()
