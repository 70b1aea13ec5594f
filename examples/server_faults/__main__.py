"""Test a server with load and faults, and print figures: `python examples/server_faults MODEL`.

Each case starts its own server on 127.0.0.1 (and contacts no other) and attacks it while a stream
runs. It prints the statuses, the stream's longest gap, the event loop's lag, and whether afterwards
the server holds nothing and answers the next request.
`fuzz` sends valid, nearly valid and raw requests.
"""

import argparse
import asyncio
import collections
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import fuzz
import untrusted
from bodies import BODIES, COMPLETIONS
from faulty_engine import EATS_MEMORY, HANG, KERNEL_ERROR, NAN, OUT_OF_MEMORY
from http_client import API_KEY, Reply, ask, exchange, request_bytes
from probe import Probe
from server import Server, percentile
from strangers import strangers, templates

ENDLESS = {"prompt": "Once", "max_tokens": 2000, "stream": True, "ignore_eos": True}
MAX_LONGER_GAP = 0.1  # seconds, than the longest gap of a stream that runs alone
SMALL = {"max_num_seqs": 64, "max_num_batched_tokens": 256}


class Report:
    """Output of the cases, and whether all of them passed."""

    def __init__(self) -> None:
        self.num_failed = 0

    def line(self, name: str, text: str, holds: bool = True) -> None:
        self.num_failed += not holds
        print(f"{'ok  ' if holds else 'FAIL'} {name:40} {text}", flush=True)


async def beside_a_stream(
    report: Report,
    server: Server,
    name: str,
    work: Awaitable[list[Reply]],
    quiet: float | None = None,
) -> float:
    """Do the work while a stream runs; print and return its worst gap in seconds.

    `quiet` is the gap of a stream that runs alone, if the gap is judged.
    """
    before, memory = await server.loop_lag(), server.memory()
    async with Probe.start(server.port) as probe:
        started = time.perf_counter()
        replies = await work
        took = time.perf_counter() - started
    gaps = probe.gaps
    after = await server.loop_lag()
    held, answers = await server.held(), await server.answers()
    text = (
        f"{statuses(replies)} in {took:.1f} s; worst gap {max(gaps) * 1e3:.0f} ms of {len(gaps)};"
        f" loop lag p99 <= {percentile(after, before, 0.99) * 1e3:g} ms,"
        f" max <= {percentile(after, before, 1.0) * 1e3:g};"
        f" {server.memory() - memory:+.0f} MiB; held: {held or 'nothing'}"
    )
    small = all(len(reply.body) < 4096 for reply in replies if reply.status not in (0, 200))
    holds = answers and not held and small and all(reply.status > -1 for reply in replies)
    report.line(name, text, holds and (quiet is None or max(gaps) < quiet + MAX_LONGER_GAP))
    return max(gaps)


def statuses(replies: list[Reply]) -> str:
    counts = collections.Counter(reply.status for reply in replies)
    return " ".join(f"{count}x{status}" for status, count in sorted(counts.items()))


async def streams(report: Report, model: str, options: argparse.Namespace) -> None:
    """Run many concurrent streams for a while."""
    async with await Server.start(model, {}, {}) as server:
        memory, end = server.memory(), time.monotonic() + options.seconds
        num_tokens, replies = 0, []

        async def one(index: int) -> None:
            nonlocal num_tokens
            while time.monotonic() < end:
                body = {**ENDLESS, "max_tokens": 20 + index % 50}
                reply = await ask(server.port, COMPLETIONS, body)
                num_tokens += len(reply.times)
                replies.append(reply)

        before = await server.loop_lag()
        await asyncio.gather(*(one(index) for index in range(options.streams)))
        lag = percentile(await server.loop_lag(), before, 0.99)
        held, answers = await server.held(), await server.answers()
        report.line(
            f"{options.streams} streams for {options.seconds:g} s",
            f"{statuses(replies)}; {num_tokens / options.seconds:.0f} events/s;"
            f" loop lag p99 <= {lag * 1e3:g} ms; {server.memory() - memory:+.0f} MiB;"
            f" held: {held or 'nothing'}",
            answers and not held and {reply.status for reply in replies} <= {200, 503},
        )


async def clients(report: Report, model: str, options: argparse.Namespace) -> None:
    """Clients that disconnect, read slowly, flood the server, or send nothing."""
    limits = {"max_num_queued_reqs": 64}
    async with await Server.start(model, SMALL, limits) as server:

        async def vanish() -> Reply:
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(request_bytes(COMPLETIONS, ENDLESS))
            await asyncio.sleep(0.5)
            writer.transport.abort()
            return Reply(status=0)

        async def read_slowly() -> Reply:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(request_bytes(COMPLETIONS, ENDLESS))
            for _ in range(5):
                await asyncio.sleep(1)
                await reader.read(1)
            writer.transport.abort()
            return Reply(status=0)

        async def many(count: int, work: Callable[[], Awaitable[Reply]]) -> list[Reply]:
            return await asyncio.gather(*(work() for _ in range(count)))

        await beside_a_stream(report, server, "200 clients that vanish", many(200, vanish))
        await beside_a_stream(report, server, "20 slow readers", many(20, read_slowly))
        body = {**ENDLESS, "max_tokens": 5}
        replies = await many(1000, lambda: ask(server.port, COMPLETIONS, body))
        refused = [reply for reply in replies if reply.status == 503]
        report.line(
            "flood of 1,000 past a limit of 128",
            statuses(replies),
            bool(refused) and all("retry-after" in reply.headers for reply in refused),
        )
    async with await Server.start(model, SMALL, {}, descriptors=200) as server:
        idle = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(260)]
        for _, writer in idle[::2]:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Len")
        replies = await many(20, lambda: ask(server.port, "/health"))
        size = server.log.stat().st_size
        report.line(
            "260 idle connections, 200 descriptors",
            f"20 requests beside them: {statuses(replies)}; {size} bytes of log",
            all(reply.status == 200 for reply in replies) and size < 10_000,
        )
        for _, writer in idle:
            writer.close()


async def bodies(report: Report, model: str, options: argparse.Namespace) -> None:
    """Send each hostile body while a stream runs."""
    async with await Server.start(model, SMALL, {}) as server:
        await asyncio.sleep(8)  # the worker process loads
        quiet = await beside_a_stream(report, server, "nothing", asyncio.sleep(3, []))
        for name, (path, make, count) in BODIES.items():
            data = request_bytes(path, make())

            async def work(data: bytes = data, count: int = count) -> list[Reply]:
                return await asyncio.gather(*(exchange(server.port, data) for _ in range(count)))

            await beside_a_stream(report, server, f"{count} x {name}", work(), quiet)
        chunks = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        chunks += b"1\r\n{\r\n" * 300_000

        async def tiny() -> list[Reply]:
            return await asyncio.gather(*(exchange(server.port, chunks, 20) for _ in range(12)))

        await beside_a_stream(report, server, "12 x 300,000 chunks of one byte", tiny(), quiet)
        large = {"prompt": [[5] * 10] * 2, "n": 128, "max_tokens": 1500, "ignore_eos": True}
        starving = asyncio.create_task(ask(server.port, COMPLETIONS, large))
        await asyncio.sleep(1)
        started = time.perf_counter()
        await ask(server.port, COMPLETIONS, {"prompt": "Once", "max_tokens": 5})
        report.line("5 tokens beside 256 x 1,500", f"{time.perf_counter() - started:.2f} s")
        starving.cancel()


async def untrusted_input(report: Report, model: str, options: argparse.Namespace) -> None:
    """Harmful grammars and adapters, each while a stream runs."""
    with tempfile.TemporaryDirectory() as folder:
        untrusted.write_adapters(Path(folder))
        settings = ({**SMALL, "enable_lora": True}, {"lora_folder": folder, "api_key": [API_KEY]})
        async with await Server.start(model, *settings) as server:
            await untrusted.GRAMMAR_ATTACKS["8 grammars with slow masks"](server.port)  # warm
            memory = server.memory()
            quiet = await beside_a_stream(report, server, "nothing", asyncio.sleep(3, []))
            for name, attack in untrusted.GRAMMAR_ATTACKS.items():
                await beside_a_stream(report, server, name, attack(server.port), quiet)
            await beside_a_stream(
                report, server, "adapters", untrusted.load_all(server.port), quiet
            )
            text = f"{memory:.0f} MiB before, {server.memory():.0f} after"
            report.line("memory of all of these", text, server.memory() < 1.1 * memory)


async def faults(report: Report, model: str, options: argparse.Namespace) -> None:
    """Requests and signals that end the engine, with and without a restart."""
    settings = {"engine_timeout": 3.0, "engine_step_timeout": 4.0}
    async with await Server.start(model, SMALL, {**settings, "restart_engine": 9}) as server:
        poison = asyncio.create_task(ask(server.port, COMPLETIONS, {"prompt": [NAN]}))
        reply, other = (
            await poison,
            await ask(server.port, COMPLETIONS, {**ENDLESS, "max_tokens": 9}),
        )
        hint = reply.headers.get("x-should-retry")
        report.line(
            "poisoned request",
            f"{reply.status}, x-should-retry: {hint}; the others: {other.status}",
            (reply.status, hint, other.status) == (500, "false", 200),
        )
        for name, cause in FAULTS.items():
            stream = asyncio.create_task(ask(server.port, COMPLETIONS, ENDLESS))
            await asyncio.sleep(0.5)
            fatal = None
            if isinstance(cause, signal.Signals):
                server.kill_engine(cause)
            elif cause == MEMORY_LIMIT:
                server.limit_engine_memory(2**26)
                hungry = {"prompt": [EATS_MEMORY]}
                fatal = asyncio.create_task(ask(server.port, COMPLETIONS, hungry))
            else:
                fatal = asyncio.create_task(ask(server.port, COMPLETIONS, {"prompt": [cause]}))
            seen = await server.wait_for_health(503)
            late = await ask(server.port, COMPLETIONS, {"prompt": "a"})
            back = await server.wait_for_health(200)
            ended = (await stream).error or {}
            fatal_status = (await fatal).status if fatal else "-"
            held, answers = await server.held(), await server.answers()
            report.line(
                f"{name}, restarted",
                f"/health 503 after {seen:.1f} s, 200 {back:.1f} s later; stream ended with"
                f" {ended.get('code')}; cause got {fatal_status}; meanwhile {late.status},"
                f" Retry-After {late.headers.get('retry-after')}; held: {held or 'nothing'}",
                ended.get("code") == 503 and late.status == 503 and answers and not held,
            )
    for name, cause in (("engine killed", signal.SIGKILL), ("engine stopped", signal.SIGSTOP)):
        async with await Server.start(model, SMALL, settings) as server:
            stream = asyncio.create_task(ask(server.port, COMPLETIONS, ENDLESS))
            await asyncio.sleep(0.5)
            server.kill_engine(cause)
            ended, code = (await stream).error or {}, await server.exit_code()
            text = f"stream ended with {ended.get('code')}, exit code {code}"
            report.line(name, text, (ended.get("code"), code) == (503, 1))
    async with await Server.start(model, SMALL, {}) as server:
        body = {**ENDLESS, "max_tokens": 200}
        running = [asyncio.create_task(ask(server.port, COMPLETIONS, body)) for _ in range(60)]
        await asyncio.sleep(1)
        server.process.send_signal(signal.SIGTERM)
        ends = [
            reply.body.rstrip().endswith(b"data: [DONE]")
            for reply in await asyncio.gather(*running)
        ]
        code = await server.exit_code()
        text = f"{sum(ends)} of 60 streams ended in good order, exit code {code}"
        report.line("SIGTERM under load", text, all(ends) and code == 0)


MEMORY_LIMIT = "memory limit"
FAULTS = {
    "kernel exception": KERNEL_ERROR,
    "out of memory": OUT_OF_MEMORY,
    "system gives no more memory": MEMORY_LIMIT,
    "step without end": HANG,
    "engine killed": signal.SIGKILL,
    "engine stopped": signal.SIGSTOP,
}


async def fuzzing(report: Report, model: str, options: argparse.Namespace) -> None:
    """Invalid requests of every kind."""
    # Many of the requests ask for the most tokens possible.
    async with await Server.start(model, {**SMALL, "max_model_len": 64}, {}) as server:
        memory, started = server.memory(), time.perf_counter()
        found = await fuzz.run(server.port, options.requests, options.seed)
        took = time.perf_counter() - started
        held, answers = await server.held(), await server.answers()
        for wrong in found.wrong[:10]:
            print(f"     {wrong}")
        report.line(
            f"{options.requests} fuzzed requests",
            f"{found.text}; {took:.0f} s; {server.memory() - memory:+.0f} MiB;"
            f" held: {held or 'nothing'}",
            answers and not held and not found.wrong,
        )


async def of_strangers(report: Report, model: str, options: argparse.Namespace) -> None:
    """Resets, half-closed clients, web pages, and clients that ask for much work and leave."""
    await strangers(report.line, model, options)


async def of_templates(report: Report, model: str, options: argparse.Namespace) -> None:
    """A chat template that never ends."""
    await templates(report.line, model, options)


CASES: dict[str, Callable[[Report, str, argparse.Namespace], Awaitable[None]]] = {
    "streams": streams,
    "clients": clients,
    "bodies": bodies,
    "untrusted": untrusted_input,
    "faults": faults,
    "fuzz": fuzzing,
    "strangers": of_strangers,
    "templates": of_templates,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="server_faults", description=__doc__)
    parser.add_argument("model", help="model folder")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--streams", type=int, default=1000, help="concurrent streams")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the streams")
    parser.add_argument("--requests", type=int, default=100_000, help="number of fuzzed requests")
    parser.add_argument("--seed", type=int, default=0, help="seed of the fuzzed requests")
    options = parser.parse_args()
    report = Report()
    for name in options.cases:
        asyncio.run(CASES[name](report, options.model, options))
    return 1 if report.num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
