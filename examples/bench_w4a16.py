"""Time the W4A16 linear on a GPU against bf16 cuBLAS in the same run. Knows no model, only shapes.

    PYTHONPATH=. python examples/bench_w4a16.py                      the table
    PYTHONPATH=. python examples/bench_w4a16.py --sweep --rows 32    the best tiles for 32 rows

Every time is the median over replays of one CUDA graph that calls the layer on many copies of its
weight, more than the L2 holds: a decode step reads each weight once, from memory. No time is
printed for a result that is wrong. The floor is the larger of bytes over bandwidth and operations
over peak.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator

import torch
from triton.runtime.errors import OutOfResources

from formats.packed import PackedWeight
from formats.scheme import QuantSpec
from qkernels import ops, w4a16
from qkernels.prepared import PreparedWeight
from qkernels.tiles import LINEAR_MAX_ROWS, LINEAR_WORKSPACE_FLOATS, LinearTile, linear_tile

SHAPES = {  # Llama-3-8B: [N, K]
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
}
ROWS = (1, 16, 32, 64, 128, 256, 512, 1024, 4096)
COLD_BYTES = 400e6  # the H200's L2 holds 60 MB
ALLOWED_ERROR = 5e-3
# One H200, measured: read bandwidth and bf16 rate with torch
BYTES_PER_SECOND, OPERATIONS_PER_SECOND = 4.4e12, 788e12


def random_weight(N: int, K: int, group: int, seed: int) -> PackedWeight:
    generator = torch.Generator("cuda").manual_seed(seed)
    spec = QuantSpec(bits=4, symmetric=True, group_size=group)
    G = spec.num_groups(K)
    words = torch.randint(
        -(2**31), 2**31, (N, K // 8), dtype=torch.int32, device="cuda", generator=generator
    )
    scales = (torch.rand(N, G, device="cuda", generator=generator) + 0.5) / 512
    zeros = torch.full((N, G), spec.symmetric_zero, dtype=torch.uint8, device="cuda")
    return PackedWeight(
        words_NW=words, scales_NG=scales.half(), zeros_NG=zeros, spec=spec, in_features=K
    )


def time_calls(calls: list[Callable[[], torch.Tensor]], replays: int = 15) -> float:
    """Microseconds of one call, all of them inside one CUDA graph."""
    for call in calls[:3]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times)


def scratch(x: torch.Tensor, weight: PreparedWeight) -> torch.Tensor:
    """The path of many rows, whatever the number of rows."""
    return torch.nn.functional.linear(x, w4a16.dequantize(weight))


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def sweep_tiles(M: int) -> Iterator[LinearTile]:
    """Every tile that is worth trying for M rows."""
    for block_m, block_n, split, warps, stages in itertools.product(
        (16, 32, 64, 128), (64, 128), (1, 2, 4, 8), (4, 8), (2, 3, 4)
    ):
        if block_m // 2 < M or block_m == 16:
            yield LinearTile(
                block_m=block_m, block_n=block_n, split=split, warps=warps, stages=stages
            )


def gated_time(
    function: Callable[[torch.Tensor, PreparedWeight], torch.Tensor],
    x: torch.Tensor,
    copies: list[PreparedWeight],
    want: torch.Tensor,
) -> float:
    """Time function(x, weight) over all copies, after its result on the first was found right."""
    error = relative_error(function(x, copies[0]), want)
    if not error <= ALLOWED_ERROR:
        raise SystemExit(f"wrong result: relative error {error:.1e}")
    return time_calls([lambda w=w: function(x, w) for w in copies])


def fits(tile: LinearTile, M: int, N: int) -> bool:
    return tile.split == 1 or tile.split * M * N <= LINEAR_WORKSPACE_FLOATS


def print_sweep(name: str, x, copies, want) -> None:
    M, N = x.shape[0], copies[0].out_features
    times = []
    for tile in sweep_tiles(M):
        if not fits(tile, M, N):
            continue
        try:
            time = gated_time(
                lambda x, w, tile=tile: w4a16.linear(x, w, tile=tile), x, copies, want
            )
        except OutOfResources:  # more shared memory than a block may have
            continue
        times.append((time, tile))
    for time, tile in sorted(times, key=lambda pair: pair[0])[:3]:
        print(f"{name:8} {M:5} {time:8.1f}  {tile}", flush=True)


def print_row(name: str, x, copies, want, dense: list[torch.Tensor]) -> None:
    (M, K), N = x.shape, copies[0].out_features
    group = copies[0].spec.group_length(K)
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    cublas = time_calls([lambda w=w: torch.nn.functional.linear(x, w) for w in dense])
    ours = gated_time(ops.linear, x, copies, want)
    chosen = linear_tile(M, N, K, group, sm_count)
    tile = chosen or linear_tile(LINEAR_MAX_ROWS, N, K, group, sm_count)
    fused = through = float("nan")
    if M <= 1024 and fits(tile, M, N):
        fused = gated_time(lambda x, w: w4a16.linear(x, w, tile=tile), x, copies, want)
    if M >= 64:
        through = gated_time(scratch, x, copies, want)
    floor = 1e6 * max(
        (N * K * (4 + 16 / group) / 8 + 2 * M * (N + K)) / BYTES_PER_SECOND,
        2 * M * N * K / OPERATIONS_PER_SECOND,
    )
    shown = "scratch" if chosen is None else f"{tile.block_n}x{tile.block_m}/{tile.split}"
    error = relative_error(ops.linear(x, copies[0]), want)
    print(
        f"{name:8} {M:5} {cublas:8.1f} {ours:8.1f} {cublas / ours:5.2f} {fused:8.1f}"
        f" {through:8.1f} {floor:7.1f} {100 * floor / ours:4.0f}  {error:.1e}  {shown}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="rows of x")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--sweep", action="store_true", help="try all tiles, print the best three")
    arguments = parser.parse_args()
    name = torch.cuda.get_device_name(0)
    print(f"{name}, torch {torch.__version__}, bf16, group {arguments.group_size}")
    print("microseconds per call; x: times faster than cuBLAS; %: share of the floor")
    print(
        f"{'shape':8} {'M':>5} {'cuBLAS':>8} {'ours':>8} {'x':>5} {'fused':>8} {'scratch':>8}"
        f" {'floor':>7} {'%':>4}  error    tile (N x M / split)"
    )
    for name in arguments.shapes:
        N, K = SHAPES[name]
        packed = random_weight(N, K, arguments.group_size, seed=0)
        weight_NK = packed.dequantize(torch.float64)
        copies = [ops.prepare_weight(packed, torch.bfloat16)]
        while len(copies) * copies[0].nbytes < COLD_BYTES:
            other = random_weight(N, K, arguments.group_size, seed=len(copies))
            copies.append(ops.prepare_weight(other, torch.bfloat16))
        dense = [
            torch.randn(N, K, device="cuda", dtype=torch.bfloat16)
            for _ in range(max(2, -(-int(COLD_BYTES) // (2 * N * K))))
        ]
        for M in arguments.rows:
            x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
            want = x.double() @ weight_NK.t()
            if arguments.sweep:
                print_sweep(name, x, copies, want)
            else:
                print_row(name, x, copies, want, dense)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
