"""SIGHUP: reload the API key files and the adapters of --lora-modules."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Iterator, Sequence

from formats.errors import InputError
from qserve.server.service import Service

logger = logging.getLogger(__name__)
CLIENT = "SIGHUP"  # client name of a reload in ServedAdapters.turns


async def reload_settings(service: Service) -> None:
    """Reload API keys and adapters. If a reload fails, the old keys or weights stay in use.

    Running requests continue. They keep an adapter's old weights until they finish.
    """
    if service.keys is not None:
        try:
            service.keys.reload()
            if service.keys.digests:  # empty: the server was started without keys
                logger.info("SIGHUP: %d API keys are valid", len(service.keys.digests))
        except InputError as error:
            logger.error("SIGHUP: cannot reload the API keys, the old keys stay valid: %s", error)
    adapters = service.adapters
    await adapters.turns.take(CLIENT)
    try:
        for name, path in adapters.of_start.items():
            if name not in adapters.of_name:
                continue  # a client has unloaded it
            lora = adapters.next_request(name, path)
            problem = await service.client.load_adapter(lora)
            if problem:
                logger.error("SIGHUP: cannot reload the adapter %s: %s", name, problem)
                continue
            adapters.add(lora)
            logger.info("SIGHUP: the adapter %s was reloaded", name)
    finally:
        adapters.turns.give_back(CLIENT)


@contextlib.contextmanager
def on_hangup() -> Iterator[Callable[[Sequence[Service]], None]]:
    """Reload settings at each SIGHUP, one signal after the other.

    Yields a function; call it with the services once they are loaded. A signal that arrives earlier
    is handled at that time, and does not end the server.
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
            logger.info("SIGHUP: the settings will be reloaded once the models are loaded")
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
