"""Warm-up shapes of latent attention follow the kernel that is chosen."""

import pytest
import torch

from qkernels.latent.config import latent_boundaries
from qkernels.latent.sm90_decode_config import sm90_latent_boundaries
from qserve.model.blocks.latent import attention
from qserve.model.blocks.latent.attention import LatentShape, PagedLatentsSpec
from qserve.model.cache_spec import StepLimits

SHARED = 232_448
MOST = {"max_requests": 20, "max_tokens": 30, "max_context_len": 4096}


@pytest.mark.parametrize("kernel", [None, "sm90_decode", "-sm90_decode"])
def test_shapes_launch_every_kernel_of_the_choice(kernel, monkeypatch):
    monkeypatch.setattr(attention, "sm_count", lambda device: 132)
    monkeypatch.setattr(attention, "shared_bytes", lambda device: SHARED)
    shape = LatentShape(heads=16, nope=128, rope=64, value=128, latent=512)
    dtype = torch.bfloat16
    spec = PagedLatentsSpec(shape=shape, dtype=dtype, page_size=16, kernel=kernel)
    limits = StepLimits(max_num_seqs=20, max_tokens=30, max_model_len=4096)
    found = list(spec.warm_up_shapes(limits, dtype, torch.device("cuda")))
    sizes = {"heads": 16, "sm_count": 132, **MOST}
    portable = list(latent_boundaries(element_size=2, shared_bytes=SHARED, **sizes))
    own = list(sm90_latent_boundaries(**sizes))
    assert portable != own
    assert found == (portable if kernel == "-sm90_decode" else own)
