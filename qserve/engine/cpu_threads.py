"""Number of CPU threads that torch computes with."""

import os
from collections.abc import Mapping
from dataclasses import replace

from qserve.config import EngineConfig

SET_BY_USER = "OMP_NUM_THREADS"  # torch reads it itself


def with_server_core(
    config: EngineConfig, *, num_cores: int, environment: Mapping[str, str] = os.environ
) -> EngineConfig:
    """Return the settings of an engine that shares its machine with an HTTP server.

    One core is left to the server. Measured on 2 cores with hostile request bodies: a stream had
    gaps of 100 to 250 ms with all cores in torch, and 18 to 99 ms with one core left free.
    """
    if config.cpu_threads is not None or environment.get(SET_BY_USER):
        return config
    return replace(config, cpu_threads=max(1, num_cores - 1))
