"""Images on a CUDA GPU: kernels in bfloat16 and CUDA graphs answer as transformers does."""

import pytest
import torch

from tests.qserve.multimodal.test_image_tokens import requests_of
from tests.tiny_vision import VISION_FAMILIES

# the least of KV pages: other tests may use the GPU as well
ON_GPU = {"device": "cuda", "dtype": "bfloat16", "block_size": 16, "num_gpu_blocks_override": 256}


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 23}], ids=["whole", "cut"])
# The experts of qwen3_5_moe in bfloat16 differ where two are nearly equal.
@pytest.mark.parametrize("family", [name for name in VISION_FAMILIES if "moe" not in name])
def test_answers_are_near_transformers_best(vision, family, settings):
    """A wrong embedding, mask or position moves a token of these random models to any rank."""
    model = vision(family)
    engine = model.engine(1, **ON_GPU, **settings)
    requests = requests_of(model)
    answers, _ = model.run(engine, *requests)
    assert all(map(len, answers))
    lags = torch.cat([model.lags(*r, tokens) for r, tokens in zip(requests, answers, strict=True)])
    assert lags.max() < 0.3
    assert (lags == 0).float().mean() > 0.8
