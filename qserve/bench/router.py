"""Routers: which of several replicas a request goes to. A row each. Loads no torch."""

import zlib
from collections.abc import Callable, Sequence

import numpy as np

from qserve.bench.replica import Replica, SimulatedRequest
from qserve.deploy.prefix_table import PrefixTable

PREFIX = 512  # leading tokens by which "prefix" tells prompts apart

Choose = Callable[[Sequence[Replica], SimulatedRequest], int]


def make_router(name: str, seed: int) -> Choose:
    """A row of ROUTERS, with its own state."""
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
    """Prompts that begin alike go to the same replica, whose pages they then find."""

    def choose(replicas: Sequence[Replica], request: SimulatedRequest) -> int:
        leading = request.name if request.prompt is None else str(request.prompt[:PREFIX])
        return zlib.crc32(leading.encode()) % len(replicas)

    return choose


def _prefix_load(seed: int) -> Choose:
    """As `qserve serve --router prefix`: by what each was sent, and what it has to do."""
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
