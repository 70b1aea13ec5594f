"""start_engines: starts the engine processes that a config asks for, as one client."""

from typing import Any

from qserve.config import EngineConfig
from qserve.engine.ipc.data_parallel import DataParallelEngines
from qserve.engine.ipc.disaggregated import DisaggregatedEngines
from qserve.engine.ipc.supervisor import EngineSupervisor

Engines = EngineSupervisor | DataParallelEngines


async def start_engines(config: EngineConfig, **options: Any) -> Engines:
    """Start the engine, or the engines of --data-parallel-size. Raises InputError.

    `options`: keyword arguments of EngineSupervisor.start. `waiting` is None for several engines.
    """
    if config.prefill_engines:
        return await DisaggregatedEngines.start(config, **options)
    if config.num_engines == 1:
        return await EngineSupervisor.start(config, **options)
    return await DataParallelEngines.start(config, **options)
