"""EngineReplica: the Ray Serve deployment whose actors each run an engine and its app.

With several models, an actor has a limited number of them loaded. It loads another one on request,
after the requests of the model that it unloads have ended.
"""

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Mapping
from contextlib import aclosing

from ray import serve

from formats.errors import InputError
from qserve.config import EngineConfig, ServerConfig
from qserve.deploy.hosted_app import Answer, HostedApp
from qserve.deploy.routed_request import RoutedRequest
from qserve.engine.ipc.waiting import ENGINE

IDLE_POLL_SECONDS = 0.05


class EngineReplica:
    """The replica deployment. Each actor has one engine per loaded model."""

    async def __init__(
        self,
        models: Mapping[str, str],
        engine: EngineConfig,
        server: ServerConfig,
        *,
        drain_timeout: float = 600.0,
        engine_class: str = ENGINE,
    ) -> None:
        """`models`: name -> folder. If there is one model, it is loaded immediately.

        Raises RuntimeError, with the InputError's text, if it cannot be loaded.
        """
        self._models, self._engine, self._server = dict(models), engine, server
        self._drain_timeout, self._engine_class = drain_timeout, engine_class
        self._hosted: dict[str, HostedApp] = {}
        if len(self._models) == 1:
            (name,) = self._models
            await self._host(name)

    async def answer(self, request: RoutedRequest) -> Answer:
        """Yield status and headers, then pieces of the body."""
        name = serve.get_multiplexed_model_id()
        hosted = (await self.place(name)).hosted if name else next(iter(self._hosted.values()))
        async with aclosing(hosted.answer(request)) as answer:
            async for piece in answer:
                yield piece

    async def answer_whole(self, request: RoutedRequest) -> list[tuple[str, int, bytes]]:
        """Run the request on all loaded models; return (process id/model name, status, body)."""
        answers = []
        for name, hosted in list(self._hosted.items()):
            async with aclosing(hosted.answer(request)) as answer:
                status, _ = await anext(answer)
                body = b"".join([piece async for piece in answer])
            answers.append((f"{os.getpid()}/{name}", status, body))
        return answers

    async def check_health(self) -> None:
        """Raise RuntimeError if an engine has died; Ray then replaces the actor."""
        dead = [name for name, hosted in self._hosted.items() if not hosted.is_alive]
        if dead:
            raise RuntimeError(f"the engine of {', '.join(dead)} has died")

    def record_routing_stats(self) -> dict[str, float]:
        return {"num_open": sum(hosted.num_open for hosted in self._hosted.values())}

    async def __del__(self) -> None:
        """Stop the engines. Ray calls this after requests have finished."""
        for hosted in self._hosted.values():
            await hosted.close()

    async def place(self, name: str) -> "_Place":
        return _Place(self, name, await self._host(name))

    async def _host(self, name: str) -> HostedApp:
        config = dataclasses.replace(self._engine, model=self._models[name])
        names = [name]
        if len(self._models) == 1:
            names = self._server.served_model_name or names
        server = dataclasses.replace(self._server, served_model_name=names)
        try:
            hosted = await HostedApp.start(config, server, engine=self._engine_class)
        except InputError as error:  # Ray shows a traceback and its last line
            raise RuntimeError(str(error)) from error
        self._hosted[name] = hosted
        return hosted

    async def unload(self, name: str) -> None:
        """Stop a model's engine after its requests have ended, or after the drain timeout."""
        hosted = self._hosted[name]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_timeout):
                while hosted.num_open:
                    await asyncio.sleep(IDLE_POLL_SECONDS)
        del self._hosted[name]
        await hosted.close()


def multiplexing(models_per_replica: int) -> type[EngineReplica]:
    """Return the replica class for several models; an actor loads at most a given number."""

    class MultiplexingReplica(EngineReplica):
        @serve.multiplexed(max_num_models_per_replica=models_per_replica)
        async def place(self, name: str) -> "_Place":
            return _Place(self, name, await self._host(name))

    return MultiplexingReplica


class _Place:
    """Ray's handle of a loaded model. Ray awaits its `__del__` when another model replaces it."""

    def __init__(self, replica: EngineReplica, name: str, hosted: HostedApp) -> None:
        self.hosted = hosted

        async def unload() -> None:
            await replica.unload(name)

        # Set on the instance for Ray: Python ignores it there, and would call a class's method
        # without awaiting it.
        self.__del__ = unload
