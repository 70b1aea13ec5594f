"""WorkerClient: starts a worker process, which prepares request bodies, and talks to it."""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from qserve.lora.request import LoRARequest
from qserve.multimodal.decode_video import NUM_THREADS
from qserve.processes import frames
from qserve.processes.child_process import start_child
from qserve.server.http.errors import ApiError
from qserve.server.prepare.worker_messages import (
    Answered,
    Failed,
    FromWorker,
    LoadTokenizer,
    Prepare,
    Setup,
    decode,
    encode,
)
from qserve.server.requests.job import Arrival, Job

CPU_SECONDS = 10.0  # limit of CPU time for a body, in addition to the limit per MiB
CPU_SECONDS_PER_MIB = 6.0
VIDEO_TYPES = (b'"video', b'"input_video"')  # how the types of video parts begin in JSON
PREPARE_SECONDS = 120.0  # wall-clock limit for one body
START_SECONDS = 120.0
MAX_GROWTH = 128 * 2**20  # a process that has grown by more bytes is replaced
PAGE_BYTES = os.sysconf("SC_PAGESIZE")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Child:
    """A worker process that has loaded its tokenizer."""

    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    first_bytes: int  # resident memory after loading

    @property
    def has_grown(self) -> bool:
        return _resident(self.process.pid) - self.first_bytes > MAX_GROWTH

    async def end(self) -> int:
        """Kill the process, if it still runs. Returns its exit code."""
        self.writer.close()
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        return await self.process.wait()


class WorkerClient:
    """A worker process, started by the constructor and restarted when it ends."""

    def __init__(
        self, load: LoadTokenizer, setup: asyncio.Future[Setup], arguments: Sequence[str] = ()
    ) -> None:
        """Start the process, which loads its tokenizer and then waits for `setup`.

        `arguments`: extra command-line arguments of the process.
        """
        self._load, self._setup, self._arguments = load, setup, arguments
        self._current = asyncio.create_task(self._start())

    async def ready(self) -> None:
        """Wait until the process accepts bodies. Raises the process's start error."""
        await asyncio.shield(self._current)

    async def prepare(
        self,
        route: str,
        body: bytes | bytearray,
        arrival: Arrival,
        adapters: Mapping[str, LoRARequest],
    ) -> Job | bytes:
        """Return the job of a body, or the JSON reply. Raises ApiError.

        Only one call may run at a time.
        """
        seconds = CPU_SECONDS + CPU_SECONDS_PER_MIB * len(body) / 2**20
        limits = (await asyncio.shield(self._setup)).media
        if limits is not None and any(each in body for each in VIDEO_TYPES):
            seconds += limits.max_videos * limits.video_seconds * NUM_THREADS
        message = Prepare(route=route, arrival=arrival, adapters=dict(adapters), seconds=seconds)
        child = None
        try:
            child = await self._living()
            async with asyncio.timeout(PREPARE_SECONDS):
                child.writer.write(encode(message))
                await frames.write(child.writer, body)
                answer = decode(await frames.read(child.reader), FromWorker)
                content = b""
                if isinstance(answer, Answered):
                    content = await frames.read(child.reader)
        except Exception as error:
            is_late = isinstance(error, TimeoutError)
            if is_late:
                seconds = PREPARE_SECONDS
            if child is not None:
                # The exit code of a process that ended by itself comes after its socket closes.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(child.process.wait(), 0.0 if is_late else 1.0)
                is_late |= await child.end() == -signal.SIGPROF
            self._current = asyncio.create_task(self._start())
            if is_late and child is not None:
                logger.warning(
                    "Refusing a body of %s: preparing it took more than %.3g s", route, seconds
                )
                remedy = (
                    "Shorten it; if it is short, the model's chat template does not terminate."
                    if limits is None
                    else "Send fewer or smaller images or videos."
                )
                raise ApiError(
                    400, f"The body took more than {seconds:.3g} s to prepare.", remedy
                ) from None
            logger.error("The worker process died: %s", error or type(error).__name__)
            raise ApiError(503, "The body could not be prepared.", "Try again later.") from None
        if child.has_grown:
            await self._replace(child)
        if isinstance(answer, Failed):
            raise ApiError.relayed(answer.status, answer.message, answer.param)
        return content if isinstance(answer, Answered) else answer.job

    async def _living(self) -> _Child:
        """Return the process, or a new one if it has ended since the last body."""
        child = await asyncio.shield(self._current)
        if child.process.returncode is None:
            return child
        logger.warning("An idle worker process died (exit code %d)", child.process.returncode)
        child.writer.close()
        self._current = asyncio.create_task(self._start())
        return await asyncio.shield(self._current)

    async def close(self) -> None:
        """Kill the process. It has no state to save."""
        self._current.cancel()
        with contextlib.suppress(Exception, asyncio.CancelledError):
            await (await self._current).end()

    async def _start(self) -> _Child:
        process, reader, writer = await start_child(
            "qserve.server.prepare.worker_process", *self._arguments
        )
        try:
            writer.write(encode(self._load))
            writer.write(encode(await asyncio.shield(self._setup)))
            async with asyncio.timeout(START_SECONDS):
                decode(await frames.read(reader), FromWorker)
        except BaseException:
            writer.close()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()  # or asyncio logs its end when the loop is closed
            raise
        first = _resident(process.pid)
        return _Child(process=process, reader=reader, writer=writer, first_bytes=first)

    async def _replace(self, child: _Child) -> None:
        """Start a new process, since Python does not return all freed memory to the system."""
        logger.debug(
            "Replacing the worker process: it grew by more than %d MiB", MAX_GROWTH // 2**20
        )
        self._current = asyncio.create_task(self._start())
        await child.end()


def _resident(pid: int) -> int:
    """Return the resident memory of a process in bytes; 0 if the system does not report it."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0
