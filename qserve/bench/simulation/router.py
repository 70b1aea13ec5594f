"""Routers: functions that choose the replica for a request; one row each. Loads no torch."""

import zlib
from collections.abc import Callable, Sequence

import numpy as np

from qserve.bench.simulation.replica import Replica, SimulatedRequest
from qserve.engine.ipc.prefix_table import PrefixTable

PREFIX = 512  # number of first tokens by which the router "prefix" distinguishes prompts

Choose = Callable[[Sequence[Replica], SimulatedRequest], int]


def make_router(name: str, seed: int) -> Choose:
    """Create a router with a state of its own. `name`: key of ROUTERS."""
    return ROUTERS[name](seed)


def _round_robin(seed: int) -> Choose:
    turn = -1

    def choose(replicas: Sequence[Replica], request: SimulatedRequest) -> int:
        nonlocal turn
        turn = (turn + 1) % len(replicas)
        return turn

    return choose


def _random(seed: int) -> Choose:
    random = np.random.default_rng(seed)
    return lambda replicas, request: int(random.integers(len(replicas)))


def _least_outstanding(seed: int) -> Choose:
    return lambda replicas, request: min(
        range(len(replicas)), key=lambda index: replicas[index].num_open
    )


def _prefix(seed: int) -> Choose:
    """Choose the same replica for prompts with the same beginning, which reuses their pages."""

    def choose(replicas: Sequence[Replica], request: SimulatedRequest) -> int:
        leading = request.name if request.prompt is None else str(request.prompt[:PREFIX])
        return zlib.crc32(leading.encode()) % len(replicas)

    return choose


def _prefix_load(seed: int) -> Choose:
    """Choose by each replica's earlier prompts and its load, as `qserve serve --router prefix`."""
    table = PrefixTable()

    def choose(replicas: Sequence[Replica], request: SimulatedRequest) -> int:
        prompt = request.prompt
        text = request.name.encode() if prompt is None else np.array(prompt, np.int32).tobytes()
        loads = {str(index): each.num_open for index, each in enumerate(replicas)}
        return int(table.choose(text, loads)[0])

    return choose


ROUTERS: dict[str, Callable[[int], Choose]] = {
    "round-robin": _round_robin,
    "random": _random,
    "least-outstanding": _least_outstanding,
    "prefix": _prefix,
    "prefix-load": _prefix_load,
}
