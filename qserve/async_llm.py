"""AsyncLLM: inference for asyncio programs, with the engine in another process.

Names follow vLLM's. The engine runs while the program does other work. The HTTP server uses the
same engine client.
"""

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import ClassVar, Self

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.engine.ipc.start_engines import Engines, start_engines
from qserve.engine.ipc.waiting import ENGINE
from qserve.engine.token_event import TokenEvent
from qserve.errors import BusyError
from qserve.hub.local import local_adapter, local_config
from qserve.library.async_control import AsyncControl
from qserve.library.beam_outputs import BeamSearchOutput, beam_search_output, sampling_params
from qserve.library.engine_owner import EngineOwner
from qserve.library.media_prompts import MediaPrompts
from qserve.library.outputs import EngineDeadError, OutputBuilder, RequestOutput
from qserve.library.prompts import PromptType, read_prompt, request_options_of
from qserve.lora.request import LoRARequest
from qserve.multimodal.media import MediaItem
from qserve.params.beam_search_params import BeamSearchParams
from qserve.params.generation_defaults import load_defaults
from qserve.params.request_options import RequestOptions
from qserve.params.sampling_params import SamplingParams
from qserve.text.tokenizer import Tokenizer, with_bad_words

ABORTED = object()  # in an inbox: the request was dropped


class AsyncLLM(AsyncControl, EngineOwner):
    """A model for asyncio programs. The first use starts the engine process; `close` ends it.

    async with AsyncLLM("./model") as llm:
        async for output in llm.generate("Hello", SamplingParams(), request_id="1"):
            print(output.outputs[0].text)
    """

    engine_class: ClassVar[str] = ENGINE  # MODULE:NAME of the class that the engine process runs

    def _start_on(self, config: EngineConfig) -> None:
        self.config = config
        self._starting: asyncio.Task[tuple[Tokenizer, Engines]] | None = None
        self._inboxes: dict[str, asyncio.Queue] = {}  # event queue of each running request
        # Numbers make the engine's request ids unique: a caller may reuse the id of an aborted
        # request before all events of that request have arrived.
        self._numbers = itertools.count()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Load the model; later calls do nothing. Raises InputError."""
        await self._started()

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run one request. Yields the whole output so far each time new tokens arrive.

        A slow reader gets fewer outputs, with more new tokens in each. Leaving the loop early
        aborts the request. The scheduling policy "priority" runs lower values of `priority` first.
        Raises InputError if the request can never run, EngineDeadError if the engine dies.
        """
        tokenizer, client = await self._ready()
        # Tokenizing a long text would block the event loop.
        text, ids, media = await asyncio.to_thread(self._read, prompt, tokenizer)
        params = sampling_params or SamplingParams(**load_defaults(tokenizer.folder))
        params = await asyncio.to_thread(with_bad_words, params, lambda: tokenizer)
        name = request_id if request_id is not None else uuid.uuid4().hex
        lora = await asyncio.to_thread(local_adapter, lora_request, self.config)
        options = request_options_of(prompt, priority, lora, media)
        builder = OutputBuilder(name, text, ids, params, tokenizer if params.detokenize else None)
        inbox = self._inbox(name)
        tasks = [
            asyncio.create_task(
                _feed(inbox, client, self._engine_id(name), ids, each, name, options, index)
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
                        tasks[index].cancel()  # aborts the request in the engine
                yield builder.snapshot()
        finally:
            del self._inboxes[name]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def beam_search(
        self,
        prompt: PromptType,
        params: BeamSearchParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> BeamSearchOutput:
        """Return the best continuations of a prompt, as `LLM.beam_search` does.

        Cancelling the task aborts the search. Raises InputError if the search can never run,
        EngineDeadError if the engine dies.
        """
        tokenizer, client = await self._ready()
        _, ids = await asyncio.to_thread(read_prompt, prompt, lambda: tokenizer)
        name = request_id if request_id is not None else uuid.uuid4().hex
        lora = await asyncio.to_thread(local_adapter, lora_request, self.config)
        options = replace(request_options_of(prompt, priority, lora), beam_search=params)
        sampling = sampling_params(params)
        inbox, engine_id = self._inbox(name), self._engine_id(name)
        task = asyncio.create_task(_feed(inbox, client, engine_id, ids, sampling, name, options))
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
        """Abort a request. Unknown ids are ignored.

        Its `generate` ends without another output; its `beam_search` returns no sequences.
        """
        inbox = self._inboxes.get(request_id)
        if inbox is not None:
            inbox.put_nowait(ABORTED)

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine has died."""
        await self._ready()

    async def reset_prefix_cache(self) -> None:
        """Empty the prefix cache. Running requests continue."""
        (await self._started())[1].reset_prefix_cache()

    async def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer. Starts the engine if it is not running."""
        return (await self._started())[0]

    async def close(self) -> None:
        """Stop the engine process. Running requests end with EngineDeadError."""
        if self._starting is None:
            return
        with contextlib.suppress(InputError):  # the start failed, and `start` has reported it
            _, client = await self._starting
            await client.close()

    async def _supervisor(self) -> Engines:
        return (await self._ready())[1]

    def _read(
        self, prompt: PromptType, tokenizer: Tokenizer
    ) -> tuple[str | None, list[int], tuple[MediaItem, ...]]:
        """Return a prompt's text, token ids and media. Raises InputError."""
        text, ids = read_prompt(prompt, lambda: tokenizer, takes_media=True)
        return text, *self._media.prepare(prompt, ids, lambda: tokenizer)

    def _inbox(self, name: str) -> asyncio.Queue:
        """Create the event queue of a request. Raises InputError if the id is in use."""
        if name in self._inboxes:
            raise InputError(f"request {name}", "is running already", "give each its own id")
        inbox = self._inboxes[name] = asyncio.Queue()
        return inbox

    def _engine_id(self, name: str) -> str:
        return f"{name}-{next(self._numbers)}"

    async def _ready(self) -> tuple[Tokenizer, Engines]:
        """Start the engine if it is not running. Raises EngineDeadError if it has died."""
        tokenizer, client = await self._started()
        if not client.is_alive:
            raise EngineDeadError("the engine has died")
        return tokenizer, client

    async def _started(self) -> tuple[Tokenizer, Engines]:
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> tuple[Tokenizer, Engines]:
        self.config = await asyncio.to_thread(local_config, self.config)
        starting = asyncio.create_task(start_engines(self.config, engine=self.engine_class))
        try:
            tokenizer = await asyncio.to_thread(Tokenizer, self.config.model, self.config.tokenizer)
        except BaseException:
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError, InputError):
                await (await starting).close()
            raise
        client = await starting
        self._media = MediaPrompts(
            self.config.model,
            takes_media="image" in client.media_kinds,
            no_vision=client.no_vision,
        )
        return tokenizer, client


async def _feed(
    inbox: asyncio.Queue,
    client: Engines,
    engine_id: str,
    ids: list[int],
    params: SamplingParams,
    group: str,
    options: RequestOptions,
    index: int = 0,
) -> None:
    """Put the events of one choice into the inbox; if the choice fails, put the exception."""
    events = client.generate(engine_id, ids, params, group=group, options=options)
    try:
        async with aclosing(events):
            async for event in events:
                inbox.put_nowait((index, event))
    except InputError as error:  # names the engine's id
        subject = error.subject.replace(f"request {engine_id}", f"request {group}", 1)
        inbox.put_nowait(type(error)(subject, error.problem, error.remedy))
    except Exception as error:
        inbox.put_nowait(error)


def _failure(client: Engines, name: str, event: TokenEvent) -> Exception:
    if not client.is_alive:
        return EngineDeadError(event.error)
    if event.has_lost_engine:
        return BusyError(f"request {name}", event.error, "send it again: another engine runs")
    remedy = "" if event.is_asked_for else "look at the model with `qserve inspect`"
    return InputError(f"request {name}", event.error, remedy)
