"""AsyncLLM: the engine in a process of its own, for asyncio programs. Names follow vLLM's.

The server's way to the engine without HTTP: steps go on while the program does other work.
"""

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from formats.errors import InputError
from qserve.bad_words import with_bad_words
from qserve.beam_outputs import BeamSearchOutput, beam_search_output, sampling_params
from qserve.beam_search_params import BeamSearchParams
from qserve.config import EngineConfig, engine_config
from qserve.engine.process import ENGINE
from qserve.engine.request import RequestEvent
from qserve.engine.supervisor import EngineSupervisor
from qserve.generation_defaults import load_defaults
from qserve.handling import Handling
from qserve.lora.request import LoRARequest
from qserve.outputs import (
    EngineDeadError,
    OutputBuilder,
    Prompt,
    RequestOutput,
    handling_of,
    read_prompt,
)
from qserve.sampling_params import SamplingParams
from qserve.text import Tokenizer

ABORTED = object()  # in an inbox: the request was dropped


class AsyncLLM:
    """A model for asyncio. The engine starts with the first use, `close` ends it.

    async with AsyncLLM("./model") as llm:
        async for output in llm.generate("Hello", SamplingParams(), request_id="1"):
            print(output.outputs[0].text)
    """

    def __init__(self, model: str, *, engine: str = ENGINE, **settings: Any) -> None:
        """`settings` are EngineConfig's fields. Raises InputError.

        `engine`: the class that the process runs, as MODULE:NAME.
        """
        self.config = engine_config("AsyncLLM", model, settings)
        self._engine = engine
        self._starting: asyncio.Task[tuple[Tokenizer, EngineSupervisor]] | None = None
        self._inboxes: dict[str, asyncio.Queue] = {}  # of the requests that run
        # The engine's name of a choice ends with one of these. The caller's name may come again
        # while events of the aborted request that had it are still on their way.
        self._numbers = itertools.count()

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> "AsyncLLM":
        """An engine of these settings."""
        llm = cls(engine_args.model)
        llm.config = engine_args
        return llm

    async def __aenter__(self) -> "AsyncLLM":
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Load the model, once. Raises InputError."""
        await self._started()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run one request; yields all of its output whenever there is more of it.

        What is taken slowly comes less often and longer. Leaving the loop early aborts the request.
        Raises InputError where it can never run, EngineDeadError when the engine dies.
        """
        tokenizer, client = await self._ready()
        # Tokenizing a long text takes long enough to hold up the loop.
        text, ids = await asyncio.to_thread(read_prompt, prompt, lambda: tokenizer)
        params = sampling_params or SamplingParams(**load_defaults(tokenizer.folder))
        params = await asyncio.to_thread(with_bad_words, params, lambda: tokenizer)
        name = request_id if request_id is not None else uuid.uuid4().hex
        handling = handling_of(prompt, priority, lora_request)
        builder = OutputBuilder(name, text, ids, params, tokenizer)
        inbox = self._inbox(name)
        tasks = [
            asyncio.create_task(
                _feed(inbox, client, self._engine_id(name), ids, each, name, handling, index)
            )
            for index, each in enumerate(builder.params)
        ]
        try:
            while not builder.output.finished:
                items = [await inbox.get()]
                while not inbox.empty():
                    items.append(inbox.get_nowait())
                for item in items:
                    if item is ABORTED:
                        return
                    if isinstance(item, Exception):
                        raise item
                    index, event = item
                    if event.finish_reason == "error":
                        raise _failure(client, name, event)
                    if builder.take(index, event):
                        tasks[index].cancel()  # which aborts it in the engine
                yield builder.snapshot()
        finally:
            del self._inboxes[name]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> BeamSearchOutput:
        """The best continuations of a prompt, as `LLM.beam_search` finds them, all at once.

        Cancelling aborts the search. Raises InputError where it can never run, EngineDeadError when
        the engine dies.
        """
        tokenizer, client = await self._ready()
        _, ids = await asyncio.to_thread(read_prompt, prompt, lambda: tokenizer)
        name = request_id if request_id is not None else uuid.uuid4().hex
        handling = replace(handling_of(prompt, priority, lora_request), beam_search=params)
        sampling = sampling_params(params)
        inbox, engine_id = self._inbox(name), self._engine_id(name)
        task = asyncio.create_task(_feed(inbox, client, engine_id, ids, sampling, name, handling))
        event = None
        try:
            while event is None or event.finish_reason is None:
                item = await inbox.get()
                if item is ABORTED:
                    return BeamSearchOutput(sequences=[])
                if isinstance(item, Exception):
                    raise item
                _, event = item
        finally:
            del self._inboxes[name]
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if event.finish_reason == "error":
            raise _failure(client, name, event)
        return await asyncio.to_thread(beam_search_output, event.beams, ids, params, tokenizer)

    async def abort(self, request_id: str) -> None:
        """Drop a request: its `generate` ends without another output, its `beam_search` with no
        sequences. Unknown ids are ignored."""
        inbox = self._inboxes.get(request_id)
        if inbox is not None:
            inbox.put_nowait(ABORTED)

    async def check_health(self) -> None:
        """Raises EngineDeadError where the engine has died."""
        await self._ready()

    async def reset_prefix_cache(self) -> None:
        """Forget what KV pages hold: requests that come find none. Running ones go on."""
        (await self._started())[1].reset_prefix_cache()

    async def get_tokenizer(self) -> Tokenizer:
        return (await self._started())[0]

    async def close(self) -> None:
        """End the engine's process; running requests end with EngineDeadError."""
        if self._starting is None:
            return
        with contextlib.suppress(InputError):  # it never came up, which `start` has told
            _, client = await self._starting
            await client.close()

    def _inbox(self, name: str) -> asyncio.Queue:
        """A new place for what happens to a request. Raises InputError."""
        if name in self._inboxes:
            raise InputError(f"request {name}", "is running already", "give each its own id")
        inbox = self._inboxes[name] = asyncio.Queue()
        return inbox

    def _engine_id(self, name: str) -> str:
        return f"{name}-{next(self._numbers)}"

    async def _ready(self) -> tuple[Tokenizer, EngineSupervisor]:
        """Raises EngineDeadError where the engine has died."""
        tokenizer, client = await self._started()
        if not client.is_alive:
            raise EngineDeadError("the engine has died")
        return tokenizer, client

    async def _started(self) -> tuple[Tokenizer, EngineSupervisor]:
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> tuple[Tokenizer, EngineSupervisor]:
        starting = asyncio.create_task(EngineSupervisor.start(self.config, engine=self._engine))
        try:
            tokenizer = await asyncio.to_thread(Tokenizer, self.config.model)
        except BaseException:
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError, InputError):
                await (await starting).close()
            raise
        return tokenizer, await starting


async def _feed(
    inbox: asyncio.Queue,
    client: EngineSupervisor,
    engine_id: str,
    ids: list[int],
    params: SamplingParams,
    group: str,
    handling: Handling,
    index: int = 0,
) -> None:
    """Put the events of one choice into the inbox, or the error that ended them."""
    events = client.generate(engine_id, ids, params, group=group, handling=handling)
    try:
        async with aclosing(events):
            async for event in events:
                inbox.put_nowait((index, event))
    except Exception as error:
        inbox.put_nowait(error)


def _failure(client: EngineSupervisor, name: str, event: RequestEvent) -> Exception:
    if not client.is_alive:
        return EngineDeadError(event.error)
    remedy = "" if event.is_asked_for else "look at the model with `qserve inspect`"
    return InputError(f"request {name}", event.error, remedy)
