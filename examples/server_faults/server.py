"""A qserve server in its own process, with ways to cause faults and to read its figures."""

import asyncio
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from faulty_engine import engine_pid
from http_client import ask

PROGRAM = """
import json, sys
from qserve.config import EngineConfig, ServerConfig
from qserve.server.serve import serve
engine, server = json.loads(sys.argv[1]), json.loads(sys.argv[2])
sys.exit(serve(EngineConfig(**engine), ServerConfig(**server), engine=sys.argv[3]))
"""
ENGINE = "faulty_engine:FaultyEngine"
HERE = Path(__file__).resolve().parent
START_SECONDS = 120.0
IDLE_SECONDS = 60.0  # that an engine gets to drop requests whose clients have gone


class Server:
    """Started by `Server.start`; `async with` ends it, whatever has happened to it."""

    def __init__(self, process: subprocess.Popen, log: Path) -> None:
        self.process, self.log = process, log
        self.port = 0

    @classmethod
    async def start(
        cls, model: str, engine: dict, server: dict, descriptors: int | None = None
    ) -> "Server":
        log = Path(tempfile.mkstemp(prefix="server-", suffix=".log")[1])
        path = os.pathsep.join([str(HERE), str(HERE.parents[1])])
        settings = [json.dumps({"model": model, **engine}), json.dumps({"port": 0, **server})]

        def limit() -> None:
            if descriptors:
                resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *settings, ENGINE],
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            preexec_fn=limit,
        )
        server = cls(process, log)
        line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), START_SECONDS)
        if "http://" not in line:
            raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")
        server.port = int(line.rsplit(":", 1)[1])
        return server

    async def __aenter__(self) -> "Server":
        return self

    async def __aexit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        await self.exit_code()
        self.log.unlink()

    async def exit_code(self) -> int:
        return await asyncio.to_thread(self.process.wait, 60)

    async def metrics(self) -> dict[str, float]:
        page = (await ask(self.port, "/metrics")).body.decode()
        return {
            name: float(value)
            for name, value in re.findall(r"^qserve:(\w+?)(?:\{.*\})? ([\d.e+-]+)$", page, re.M)
        }

    async def loop_lag(self) -> list[tuple[float, float]]:
        """The histogram of the event loop's lag so far."""
        page = (await ask(self.port, "/metrics")).body.decode()
        found = re.findall(r'event_loop_lag_seconds_bucket\{le="([\d.]+|\+Inf)".*\} ([\d.]+)', page)
        return [(float(bound), float(count)) for bound, count in found]

    async def held(self) -> str:
        """Describe what the server still holds when no client waits; '' means nothing."""
        names = ("kv_cache_pages_used", "num_requests_running", "num_requests_waiting")
        names += ("num_requests_admitted", "num_prompt_tokens_admitted")
        deadline = time.monotonic() + IDLE_SECONDS
        while True:
            metrics = await self.metrics()
            held = {name: metrics[name] for name in names if metrics.get(name)}
            if not held or time.monotonic() > deadline:
                return ", ".join(f"{name} {value:g}" for name, value in held.items())
            await asyncio.sleep(0.2)

    async def answers(self) -> bool:
        """Return True if the next request gets its tokens."""
        reply = await ask(self.port, "/v1/completions", {"prompt": "Once", "max_tokens": 3})
        return reply.status == 200

    def memory(self) -> float:
        """Memory of the server and its engine, MiB."""
        pages = 0
        for pid in (self.process.pid, self.engine_pid()):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE") / 2**20

    def engine_pid(self) -> int:
        return engine_pid(self.process.pid)

    def kill_engine(self, number: signal.Signals) -> None:
        os.kill(self.engine_pid(), number)

    def limit_engine_memory(self, more: int) -> None:
        """Let the engine's address space grow by so many bytes from now on, and no further."""
        pid = self.engine_pid()
        size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
        resource.prlimit(pid, resource.RLIMIT_AS, (size + more, size + more))

    async def wait_for_health(self, status: int) -> float:
        """Seconds until /health says so."""
        started = time.monotonic()
        while (await ask(self.port, "/health")).status != status:
            if time.monotonic() - started > START_SECONDS:
                raise RuntimeError(f"/health never said {status}")
            await asyncio.sleep(0.02)
        return time.monotonic() - started


def percentile(after: list, before: list, share: float) -> float:
    """The bucket's bound under which `share` of the samples between two histograms lie."""
    counts = [(bound, b - a) for (bound, b), (_, a) in zip(after, before, strict=True)]
    total = counts[-1][1]
    return next(bound for bound, count in counts if count >= share * total)
