"""Launches that skip Triton's own search compute what the first launch did."""

import pytest
import torch

from qkernels import ops
from qkernels.gpu import launch


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 16, 64, 256])
def test_cached_launch_gives_same_result(
    make_weight, device, half, tolerance, assert_close, poison, M
):
    """The second call of each operation takes the short way, on other tensors."""
    weight = ops.prepare_weight(make_weight(512, 1024, 128), half)
    weight_C, bias_C = torch.rand(2, 1024, device=device).to(half)
    rms = ops.NormSpec(weight_C=weight_C, eps=1e-5)
    layer = ops.NormSpec(kind="layer", weight_C=weight_C, bias_C=bias_C, eps=1e-5)
    silu, relu = ops.ActSpec(kind="silu"), ops.ActSpec(kind="relu", gated=False)
    for _ in range(3):
        x = torch.randn(M, 1024, device=device).to(half)
        shifted = torch.empty(M * 1024 + 1, dtype=half, device=device)[1:].view(M, 1024).copy_(x)
        calls = (
            lambda x: ops.linear(x, weight),
            lambda x: ops.activate(x, silu),
            lambda x: ops.activate(x, relu),
            lambda x: ops.norm(x, None, rms)[0],
            lambda x: ops.norm(x, x, rms),
            lambda x: ops.norm(x, x, layer),
        )
        for call in calls:
            short = call(x)
            before = len(launch._COMPILED)
            again, other = call(x), call(shifted)
            assert len(launch._COMPILED) == before
            for a, b, c in zip(*map(_as_tuple, (short, again, other)), strict=True):
                assert torch.equal(a, b) and not a.isnan().any()
                assert_close("not aligned", a, c, tolerance(half))


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 16, 64, 256])
def test_plain_launch_gives_same_result(make_weight, device, half, M):
    weight = ops.prepare_weight(make_weight(512, 1024, 128), half)
    x = torch.randn(M, 1024, device=device).to(half)
    ops.linear(x, weight)
    fast = ops.linear(x, weight)
    launch.set_plain_launches(True)
    try:
        before = len(launch._COMPILED)
        plain = [ops.linear(x, weight) for _ in range(2)]
        assert len(launch._COMPILED) == before
    finally:
        launch.set_plain_launches(False)
    assert all(torch.equal(fast, each) for each in plain)


def _as_tuple(result):
    return result if isinstance(result, tuple) else (result,)
