"""SIGHUP: read the files of API keys and the adapters of --lora-modules again."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Iterator, Sequence

from formats.errors import InputError
from qserve.server.service import Service

logger = logging.getLogger(__name__)
CLIENT = "SIGHUP"  # whose turn it is to change adapters


async def reload_settings(service: Service) -> None:
    """Read settings again. What cannot be read stays as it is; running requests go on.

    An adapter that a request uses keeps its old weights until that request has finished.
    """
    if service.keys is not None:
        try:
            service.keys.reload()
            logger.info("SIGHUP: %d API keys are valid", len(service.keys.digests))
        except InputError as error:
            logger.error("SIGHUP: the API keys stay as they are: %s", error)
    adapters = service.adapters
    await adapters.turns.take(CLIENT)
    try:
        for name, path in adapters.of_start.items():
            if name not in adapters.of_name:
                continue  # a client has unloaded it
            lora = adapters.next_request(name, path)
            problem = await service.client.load_adapter(lora)
            if problem:
                logger.error("SIGHUP: the adapter %s stays as it is: %s", name, problem)
                continue
            adapters.add(lora)
            logger.info("SIGHUP: the adapter %s was loaded again", name)
    finally:
        adapters.turns.give_back(CLIENT)


@contextlib.contextmanager
def on_hangup() -> Iterator[Callable[[Sequence[Service]], None]]:
    """Read settings again at SIGHUP, one signal after the other.

    Yields a function that takes the services once they are loaded. Signals that come before count
    then: they must not end a server that loads.
    """
    loop, turn = asyncio.get_running_loop(), asyncio.Lock()
    tasks: set[asyncio.Task] = set()
    known: list[Service] = []
    is_missed = False

    async def reload() -> None:
        async with turn:
            for service in known:
                await reload_settings(service)

    def begin() -> None:
        nonlocal is_missed
        if not known:
            is_missed = True
            logger.info("SIGHUP: settings are read again once the models are loaded")
            return
        task = loop.create_task(reload())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def loaded(services: Sequence[Service]) -> None:
        known.extend(services)
        if is_missed:
            begin()

    loop.add_signal_handler(signal.SIGHUP, begin)
    try:
        yield loaded
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        for task in tasks:
            task.cancel()
