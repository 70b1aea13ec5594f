"""Launches that skip Triton's own search compute what the first launch did."""

import pytest
import torch

from qkernels import ops
from qkernels.gpu import launch


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 16, 64, 256])
def test_a_like_launch_computes_the_same(
    make_weight, device, half, tolerance, assert_close, poison, M
):
    """The second call of each operation takes the short way, on other tensors."""
    weight = ops.prepare_weight(make_weight(512, 1024, 128), half)
    norm = torch.rand(1024, device=device).to(half)
    for _ in range(3):
        x = torch.randn(M, 1024, device=device).to(half)
        shifted = torch.empty(M * 1024 + 1, dtype=half, device=device)[1:].view(M, 1024).copy_(x)
        calls = (lambda x: ops.linear(x, weight), ops.silu_and_mul)
        calls += (lambda x: ops.rms_norm(x, norm, 1e-5), lambda x: ops.add_rms_norm(x, x, norm, 1))
        for call in calls:
            short = call(x)
            before = len(launch._COMPILED)
            again, other = call(x), call(shifted)
            assert len(launch._COMPILED) == before
            for a, b, c in zip(*map(_as_tuple, (short, again, other)), strict=True):
                assert torch.equal(a, b) and not a.isnan().any()
                assert_close("not aligned", a, c, tolerance(half))


def _as_tuple(result):
    return result if isinstance(result, tuple) else (result,)
