"""Split-K products that run on two streams at the same time have the same bits as alone."""

import pytest
import torch

from qkernels import QuantLinear, ops
from qkernels.gpu.workspace import workspace
from qkernels.wna16.sm90_large_m_config import LargeMConfig
from qkernels.wna16.sm90_small_m_config import SmallMConfig
from tests.qkernels.plans import multiply

pytest.importorskip("qkernels.wna16.gemm", exc_type=ImportError)
pytestmark = pytest.mark.gpu

N, K = 1024, 4096
ROUNDS = 100
# (rows, tile); at most half of the SMs each, so that two products run at the same time
TILES = {
    "small_m": (16, SmallMConfig(block_m=16, split=8)),
    "large_m": (200, LargeMConfig(block_m=128, split=4, blocks=64, bits=4)),
}


def alone(calls):
    results = []
    for call in calls:
        results.append(call())
        torch.cuda.synchronize()
    return results


def at_once(calls, streams):
    """Results of every call, ROUNDS times; each call has a stream of its own."""
    wall = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)
    for _ in range(20):  # about 20 ms in which all launches are queued
        wall @ wall
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    results = [[] for _ in calls]
    for _ in range(ROUNDS):
        for call, stream, into in zip(calls, streams, results, strict=True):
            with torch.cuda.stream(stream):
                into.append(call())
    torch.cuda.synchronize()
    return results


def check_at_once(calls):
    want = alone(calls)
    streams = [torch.cuda.Stream() for _ in calls]
    for stream, call in zip(streams, calls, strict=True):  # allocates each stream's workspace
        with torch.cuda.stream(stream):
            call()
    torch.cuda.synchronize()
    for one, results in zip(want, at_once(calls, streams), strict=True):
        wrong = sum(not torch.equal(one, each) for each in results)
        assert not wrong, f"{wrong} of {ROUNDS} results differ from those of one stream"
    for stream in streams:
        with torch.cuda.stream(stream):
            assert not workspace(torch.device("cuda", 0))[1].any()


@pytest.mark.hopper
@pytest.mark.parametrize("name", TILES)
def test_products_on_two_streams(make_weight, half, name):
    M, tile = TILES[name]
    calls = []
    for seed in (0, 1):
        generator = torch.Generator("cuda").manual_seed(seed)
        x = torch.randn(M, K, device="cuda", generator=generator).to(half)
        weight = ops.prepare_weight(make_weight(N, K, 128), half, kernel="w4a16")
        calls.append(lambda x=x, weight=weight: multiply(x, weight, tile=tile))
    check_at_once(calls)


@pytest.mark.parametrize("M", [3, 16, 64, 200])
@pytest.mark.parametrize("scheme", ["w4a16-sym", "w8a8"])
def test_layers_on_two_streams(half, scheme, M):
    """QuantLinear as a framework of two streams calls it, with the plan of its own choice."""
    calls = []
    for seed in (0, 1):
        generator = torch.Generator("cuda").manual_seed(seed)
        weight_NK = torch.randn(N, K, device="cuda", generator=generator)
        layer = QuantLinear.from_float(weight_NK, scheme).prepare(half, "cuda")
        x = torch.randn(M, K, device="cuda", generator=generator).to(half)
        calls.append(lambda x=x, layer=layer: layer(x))
    check_at_once(calls)
