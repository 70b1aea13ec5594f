"""Probe: a separate process that reads one stream after another and times the events.

In the process that sends the load, the client itself would add delays.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from http_client import ask

BODY = {"prompt": "Once", "max_tokens": 300, "stream": True, "ignore_eos": True}
WARM_SECONDS = 1.5  # until the stream runs


class Probe:
    """`gaps` are the seconds between events, once the block is left."""

    def __init__(self) -> None:
        self.gaps: list[float] = []

    @classmethod
    @asynccontextmanager
    async def start(cls, port: int) -> AsyncIterator["Probe"]:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(Path(__file__).resolve()), str(port), stdin=pipe, stdout=pipe
        )
        probe = cls()
        await asyncio.sleep(WARM_SECONDS)
        try:
            yield probe
        finally:
            out, _ = await process.communicate(b"end\n")
            probe.gaps = json.loads(out)


async def main(port: int) -> None:
    gaps: list[float] = []
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
    while not ended.done() or not gaps:
        gaps += (await ask(port, "/v1/completions", BODY)).gaps
    print(json.dumps(gaps))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
