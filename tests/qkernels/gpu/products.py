"""Helpers of the tests of products of few rows: inputs, and a product checked by its bounds."""

import torch

from formats.in_memory.packed import PackedWeight
from qkernels import ops
from tests.qkernels.plans import multiply


def random_x(M: int, K: int, dtype: torch.dtype, spread: float = 0) -> torch.Tensor:
    """Normal numbers times powers of two up to 2^spread."""
    generator = torch.Generator("cuda").manual_seed(M + K)
    x = torch.randn(M, K, device="cuda", generator=generator)
    return (x * 2 ** (spread * torch.rand(M, K, device="cuda", generator=generator))).to(dtype)


def check_product(
    packed: PackedWeight, x: torch.Tensor, bias: torch.Tensor | None, tile, assert_close, tolerance
) -> None:
    """One product, whole and by element, twice."""

    weight = ops.prepare_weight(packed, x.dtype, kernel=f"w{packed.spec.bits}a16")
    got = multiply(x, weight, bias, tile=tile)
    assert got.dtype == x.dtype
    reduced = 0 if bias is None else bias.double()
    weight_NK = packed.dequantize(torch.float64)
    want = x.double() @ weight_NK.t() + reduced
    assert_close(type(tile).__name__, want, got, min(4e-3, tolerance(got.dtype)))
    # inputs keep 30 bits or all of theirs, and codes have none to lose: what is left is the sum in
    # float32, and what rounding it to the dtype costs, which has a smallest number
    info = torch.finfo(got.dtype)
    bound = info.eps * want.abs().clamp(min=info.smallest_normal) + 2**-20 * (
        x.double().abs() @ weight_NK.abs().t()
    )
    assert ((got.double() - want).abs() <= bound).all(), "an element is off"
    again = multiply(x, weight, bias, tile=tile)
    assert torch.equal(got, again), "equal inputs, equal bits"


def check_two_in_a_graph(packed: list[PackedWeight], x: torch.Tensor) -> None:
    """The second weight times the first one's product, in a graph that is replayed with new x."""
    weights = [ops.prepare_weight(each, x.dtype) for each in packed]

    def both():
        hidden = ops.linear(x, weights[0])
        return hidden, ops.linear(hidden, weights[1])

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden, y = both()
    for _ in range(3):
        x.normal_()
        graph.replay()
        for result, given, each in ((hidden, x, packed[0]), (y, hidden, packed[1])):
            want = given.double() @ each.dequantize(torch.float64).t()
            assert float((result.double() - want).norm() / want.norm()) < 4e-3
