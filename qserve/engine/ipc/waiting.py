"""WaitingEngine: an engine process that starts before this process has imported the server.

This module imports little, since the process starts only after it.
"""

import asyncio
import socket
import subprocess
import weakref

from qserve.config import EngineConfig, ServerConfig
from qserve.processes import logs
from qserve.processes.child_process import StartedProcess, start_child_blocking
from qserve.processes.descriptors import raise_descriptor_limit

MODULE = "qserve.engine.ipc.process"
ENGINE = "qserve.engine.engine:Engine"


class WaitingEngine:
    """An engine process that imports the engine and waits for an EngineClient.

    Importing the server's modules takes seconds, and importing torch in the engine does, too.
    """

    def __init__(self, *arguments: str, engine: str = ENGINE) -> None:
        """Start the process. `arguments`: more command-line arguments, as in EngineClient.start."""
        self._child = start_child_blocking(MODULE, f"--engine={engine}", *arguments)
        self._end = weakref.finalize(self, _end, *self._child)

    @classmethod
    def of(cls, config: EngineConfig, server: ServerConfig) -> "WaitingEngine | None":
        """Start the engine process of a server. Returns None if the server has several engines."""
        if config.num_engines > 1 or config.prefill_engines:
            return None
        raise_descriptor_limit()  # the process inherits the limit
        return cls(*logs.arguments(server.log_level, server.log_format))

    async def take(self) -> tuple[StartedProcess, asyncio.StreamReader, asyncio.StreamWriter]:
        """Return the process and the connection to it. The caller must end the process."""
        process, connection = self._child
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        self._end.detach()
        return StartedProcess(process), reader, writer

    def close(self) -> None:
        """Kill the process, unless `take` has returned it."""
        self._end()


def _end(process: subprocess.Popen, connection: socket.socket) -> None:
    connection.close()
    process.kill()
    process.wait()
