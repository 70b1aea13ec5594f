"""DataParallelEngines: several engines of one model, each with its own GPUs and its own KV pages.

The class has the interface of EngineSupervisor. A request runs on one engine; commands go to all.
"""

import asyncio
import contextlib
import logging
import shutil
import tempfile
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.engine.control.commands import AnyCommand, EngineState, JoinWeightGroup, Outcome
from qserve.engine.ipc.client import ENGINE_NAME, Watch, WatchEngine, ignore
from qserve.engine.ipc.prefix_table import PrefixTable
from qserve.engine.ipc.supervisor import EngineSupervisor
from qserve.engine.report import EngineReport
from qserve.engine.token_event import TokenEvent
from qserve.lora.request import LoRARequest
from qserve.params.request_options import DEFAULT, RequestOptions
from qserve.params.sampling_params import SamplingParams
from qserve.processes import logs
from qserve.profile.profiler_config import ProfilerConfig

TOKENS = 64  # tokens in one block of a prompt; the prefix table records which engine has it
BLOCK = TOKENS * array("i").itemsize  # bytes
# When choosing an engine, a running request counts as this many prompt tokens.
TOKENS_OF_A_REQUEST = 64

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Engine:
    """An engine and its current load."""

    supervisor: EngineSupervisor
    num_requests: int = 0  # requests in progress
    num_tokens: int = 0  # prompt tokens that are not computed yet


class DataParallelEngines:
    """Running engines. `start` creates them, `close` ends them.

    A request goes to the engine with the least work: prompt tokens that this engine has not
    computed before, plus its current load.
    """

    def __init__(self, watch: WatchEngine) -> None:
        self._watch = watch
        self._folder: Path | None = None  # rendezvous folder of the engines; removed by `close`
        self._engines: list[_Engine] = []
        self._reports: dict[int, EngineReport] = {}
        self._table = PrefixTable(block=BLOCK)

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        watch: WatchEngine = ignore,
        on_restart: Callable[[], None] | None = None,
        name: str = ENGINE_NAME,
        arguments: Sequence[str] = (),
        **options: Any,
    ) -> "DataParallelEngines":
        """Start the engines. Raises InputError with the engine's number if one cannot start.

        The first engine starts alone and compiles the kernels; the others find them on disk.
        Engines that share experts all start together. `watch` gets the sum of all engines' reports.
        Other arguments are those of EngineSupervisor.start.
        """
        if config.shares_experts:
            folder = tempfile.mkdtemp(prefix="qserve-engines-")
            config = replace(config, data_parallel_address=f"file://{folder}/store")
            if options.get("restarts"):
                logger.warning("Engines that share experts are not restarted: all end together")
                options["restarts"] = 0
        configs = cls._configs(config)
        engines = cls(watch)
        if config.shares_experts:
            engines._folder = Path(folder)
        engines._set_up(config, configs)

        async def start_one(rank: int) -> _Engine:
            def restarted() -> None:
                engines._table.keep([name for name in engines._names if name != str(rank)])
                if on_restart is not None:
                    on_restart()

            supervisor = await EngineSupervisor.start(
                configs[rank],
                watch=lambda report: engines._take_report(rank, report),
                on_restart=restarted,
                name=name.replace(ENGINE_NAME, f"Engine {rank}"),
                arguments=[*arguments, *logs.name_argument(f"engine {rank}")],
                **options,
            )
            return _Engine(supervisor)

        try:
            others = range(len(configs))
            if not config.shares_experts:  # engines that share experts wait for each other
                with _named(0):
                    engines._engines.append(await start_one(0))
                others = others[1:]
            logger.info("Starting engines: %s", ", ".join(map(str, others)))
            starting = [asyncio.create_task(start_one(rank)) for rank in others]
            try:
                await asyncio.wait(starting, return_when=asyncio.FIRST_EXCEPTION)
            finally:
                for task in starting:
                    task.cancel()  # has no effect on finished tasks
                ended = await asyncio.gather(*starting, return_exceptions=True)
                engines._engines += [each for each in ended if isinstance(each, _Engine)]
            for rank, each in zip(others, ended, strict=True):
                if isinstance(each, BaseException):
                    with _named(rank):
                        raise each
        except BaseException:
            await engines.close()
            raise
        return engines

    @classmethod
    def _configs(cls, config: EngineConfig) -> list[EngineConfig]:
        """Return the settings of each engine."""
        ranks = range(config.data_parallel_size)
        return [replace(config, data_parallel_rank=rank) for rank in ranks]

    def _set_up(self, config: EngineConfig, configs: Sequence[EngineConfig]) -> None:
        """Hook for subclasses, called before the engines start. `configs`: settings of each."""

    @property
    def _ranks(self) -> Sequence[int]:
        """Ranks of the engines that answer requests."""
        return range(len(self._engines))

    @property
    def _names(self) -> list[str]:
        """Names of the engines in the prefix table."""
        return [str(rank) for rank in range(len(self._engines))]

    @property
    def _supervisors(self) -> list[EngineSupervisor]:
        return [each.supervisor for each in self._engines]

    @property
    def max_model_len(self) -> int:
        """The smallest limit of all engines; it differs if their GPUs have different memory."""
        return min(each.max_model_len for each in self._supervisors)

    @property
    def vocab_size(self) -> int:
        return self._supervisors[0].vocab_size

    @property
    def media_kinds(self) -> tuple[str, ...]:
        """Kinds of media that prompts may contain."""
        return self._supervisors[0].media_kinds

    @property
    def no_vision(self) -> str:
        """Remedy if this vision-language model takes only text here; "" for any other model."""
        return self._supervisors[0].no_vision

    @property
    def is_alive(self) -> bool:
        """True if an engine can run a request now."""
        return any(self._supervisors[rank].is_alive for rank in self._ranks)

    @property
    def is_restarting(self) -> bool:
        """True if no engine can run a request now, but one will be restarted."""
        engines = [self._supervisors[rank] for rank in self._ranks]
        return not self.is_alive and any(each.is_restarting for each in engines)

    async def wait_until_dead(self) -> None:
        """Wait until all engines are dead and none will be restarted."""
        engines = [self._supervisors[rank] for rank in self._ranks]
        await asyncio.gather(*(each.wait_until_dead() for each in engines))

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        watch: Watch = ignore,
        client: str = "",
        group: str = "",
        options: RequestOptions = DEFAULT,
    ) -> AsyncIterator[TokenEvent]:
        """Run one request on one of the engines, as EngineClient.generate does."""
        chosen = self._choose(prompt_token_ids, options, self._ranks)
        values = request_id, prompt_token_ids, params, watch, client, group, options
        async with aclosing(self._run_on(*chosen, *values)) as events:
            async for event in events:
                yield event

    async def _run_on(
        self, engine: _Engine, num_tokens: int, *values: Any
    ) -> AsyncIterator[TokenEvent]:
        """Run a request on one engine. `values`: the arguments of `generate`.

        `num_tokens`: tokens of the prompt that are not cached on this engine.
        """
        engine.num_requests += 1
        engine.num_tokens += num_tokens
        try:
            async with aclosing(engine.supervisor.generate(*values)) as events:
                async for event in events:
                    engine.num_tokens -= num_tokens
                    num_tokens = 0
                    yield event
        finally:
            engine.num_tokens -= num_tokens
            engine.num_requests -= 1

    def _choose(
        self, prompt_token_ids: list[int], options: RequestOptions, ranks: Sequence[int]
    ) -> tuple[_Engine, int]:
        """Choose an engine of `ranks` for a prompt.

        Returns the engine and the number of prompt tokens that it has not computed before.
        """
        salt = f"{options.cache_salt}\n{options.lora.lora_name if options.lora else ''}"
        key = array("i", prompt_token_ids).tobytes()
        if len(salt) > 1:  # pages with another salt or adapter must not match
            key = salt.encode().ljust(BLOCK)[:BLOCK] + key
        known = self._table.matches(key, self._names)

        def missing(rank: int) -> int:
            return max(0, len(prompt_token_ids) - known[str(rank)] * TOKENS)

        def work(rank: int) -> tuple[int, int]:
            engine = self._engines[rank]
            waiting = engine.num_tokens + TOKENS_OF_A_REQUEST * engine.num_requests
            return missing(rank) + waiting, rank

        alive = [rank for rank in ranks if self._engines[rank].supervisor.is_alive]
        best = min(alive or ranks, key=work)  # a dead engine returns an error event
        self._table.note(key, str(best))
        return self._engines[best], missing(best)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix caches: later requests find no KV pages of earlier ones."""
        self._table.keep([])
        for each in self._supervisors:
            each.reset_prefix_cache()

    async def profile(self, config: ProfilerConfig | None) -> str:
        """Start recording steps; None stops it. Returns an error message, or ""."""
        return await self._problem_of_all(lambda each: each.profile(config))

    @property
    def state(self) -> EngineState:
        """State after the last command, taken from an engine that is alive."""
        return self._first_alive().state

    async def operate(self, command: AnyCommand) -> tuple[Outcome, str]:
        """Run an operator's command on all engines, as EngineClient.operate does.

        In a trainer's weight group the engines have consecutive ranks. If only some engines took
        new weights, the others are closed, so that all answers come from the same weights.
        """

        def of(rank: int) -> AnyCommand:
            if isinstance(command, JoinWeightGroup):
                return msgspec.structs.replace(command, rank=command.rank + rank)
            return command

        alive = [rank for rank, each in enumerate(self._supervisors) if each.is_alive]
        answers = await asyncio.gather(
            *(self._supervisors[rank].operate(of(rank)) for rank in alive)
        )
        problems = {rank: text for rank, (_, text) in zip(alive, answers, strict=True) if text}
        outcomes = [outcome for outcome, text in answers if not text]
        if not outcomes:
            return answers[0] if answers else (Outcome(), "no engine is alive")
        for rank in problems:
            if self._supervisors[rank].state.weight_version != outcomes[0].state.weight_version:
                logger.error("Closing engine %d: its weights differ from the other engines'", rank)
                await self._supervisors[rank].close()
        outcome = _outcome_of_all(outcomes)
        digests = {each.total_digest for each in outcomes}
        if len(digests) > 1:
            return outcome, f"the engines have different weights: digests {sorted(digests)}"
        return outcome, _problem(problems)

    async def load_adapter(self, lora: LoRARequest) -> str:
        """Load an adapter on all engines. A restarted engine loads it with its first request."""
        return await self._problem_of_all(lambda each: each.load_adapter(lora))

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Requests that already use it keep it."""
        for each in self._supervisors:
            each.unload_adapter(name)

    async def close(self) -> None:
        """End the engines. They are not restarted."""
        try:
            await asyncio.gather(*(each.close() for each in self._supervisors))
        finally:
            if self._folder is not None:
                with contextlib.suppress(OSError):
                    shutil.rmtree(self._folder)

    def _first_alive(self) -> EngineSupervisor:
        alive = (each for each in self._supervisors if each.is_alive)
        return next(alive, self._supervisors[0])

    async def _problem_of_all(self, ask: Callable[[EngineSupervisor], Awaitable[str]]) -> str:
        ranks = [rank for rank, each in enumerate(self._supervisors) if each.is_alive]
        answers = await asyncio.gather(*(ask(self._supervisors[rank]) for rank in ranks))
        return _problem(dict(zip(ranks, answers, strict=True)))

    def _take_report(self, rank: int, report: EngineReport) -> None:
        self._reports[rank] = report
        self._watch(sum_of_reports(report, list(self._reports.values())))


def sum_of_reports(newest: EngineReport, last: Sequence[EngineReport]) -> EngineReport:
    """Return the report of all engines.

    Counts are summed over the last report of each engine; events come from the newest report.
    """
    counts = ("num_running", "num_waiting", "num_waiting_tokens", "num_pages_used", "num_pages")
    names = ("running_adapters", "waiting_adapters")
    merged = {name: sum(getattr(each, name) for each in last) for name in counts}
    for name in names:
        merged[name] = tuple(dict.fromkeys(each for one in last for each in getattr(one, name)))
    return replace(newest, **merged)


def _outcome_of_all(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the first outcome, with the number of requests of all engines."""
    num_requests = sum(each.num_requests for each in outcomes)
    return msgspec.structs.replace(outcomes[0], num_requests=num_requests)


def _problem(problems: dict[int, str]) -> str:
    """Return one line with the problem of each engine that reported one."""
    return "; ".join(f"engine {rank}: {text}" for rank, text in problems.items() if text)


@contextlib.contextmanager
def _named(rank: int) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise InputError(f"engine {rank}: {error.subject}", error.problem, error.remedy) from error
