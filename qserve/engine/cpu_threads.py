"""Number of CPU threads that compute in a process."""

import os
from collections.abc import Mapping
from dataclasses import replace

from qserve.config import EngineConfig

SET_BY_USER = "OMP_NUM_THREADS"  # torch reads it itself


def beside_a_server(
    config: EngineConfig, *, num_cores: int, environment: Mapping[str, str] = os.environ
) -> EngineConfig:
    """Settings of an engine that shares its machine with an HTTP server.

    With every core in torch, hostile request bodies caused gaps of 100 to 250 ms in a stream on 2
    cores; with one core left to the server, 18 to 99 ms.
    """
    if config.cpu_threads is not None or environment.get(SET_BY_USER):
        return config
    return replace(config, cpu_threads=max(1, num_cores - 1))
