"""WorkerClient: the server's end of the worker process, which prepares large bodies."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence

from qserve import frames
from qserve.child_process import start_child
from qserve.lora.request import LoRARequest
from qserve.server.errors import ApiError
from qserve.server.job import Job
from qserve.server.worker_messages import (
    Failed,
    FromWorker,
    Prepare,
    Setup,
    decode,
    encode,
)

PREPARE_SECONDS = 60.0  # that one body may take

logger = logging.getLogger(__name__)


class WorkerClient:
    """A worker process. It is started when it is made, and again when it has ended."""

    def __init__(self, setup: Setup, arguments: Sequence[str] = ()) -> None:
        """`arguments`: further ones of the process."""
        self._setup, self._arguments = setup, arguments
        self._starting = asyncio.create_task(self._start())

    async def prepare(
        self,
        route: str,
        body: bytes | bytearray,
        arrived: float,
        adapters: Mapping[str, LoRARequest],
    ) -> Job:
        """The job of a body; one at a time. Raises ApiError."""
        try:
            process, reader, writer = await asyncio.shield(self._starting)
            async with asyncio.timeout(PREPARE_SECONDS):
                message = Prepare(route=route, arrived=arrived, adapters=dict(adapters))
                writer.write(encode(message))
                await frames.write(writer, body)
                answer = decode(await frames.read(reader), FromWorker)
        except TimeoutError:
            await self._replace()
            raise ApiError(
                400, f"The body took more than {PREPARE_SECONDS:g} s to be made into tokens."
            ) from None
        except Exception as error:
            logger.error("The worker process ended: %s", error or type(error).__name__)
            await self._replace()
            raise ApiError(503, "The body could not be prepared. Try again later.") from None
        if isinstance(answer, Failed):
            raise ApiError(answer.status, answer.message, answer.param)
        return answer.job

    async def close(self) -> None:
        """End the process; it holds nothing that could be lost."""
        self._starting.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError):
            process, _, writer = await self._starting
            writer.close()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _start(
        self,
    ) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader, asyncio.StreamWriter]:
        process, reader, writer = await start_child(
            "qserve.server.worker_process", *self._arguments
        )
        writer.write(encode(self._setup))
        return process, reader, writer

    async def _replace(self) -> None:
        await self.close()
        self._starting = asyncio.create_task(self._start())
