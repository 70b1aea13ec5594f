"""AsyncControl: pause, sleep, wake and weight updates of an AsyncLLM. Names follow vLLM's."""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.engine.control.commands import (
    ABORT,
    WAIT,
    AbortAll,
    AnyCommand,
    EngineState,
    GetDigests,
    Outcome,
    PauseGeneration,
    ReceiveWeights,
    ResumeGeneration,
    Sleep,
    UpdateWeights,
    WakeUp,
)
from qserve.engine.ipc.start_engines import Engines
from qserve.errors import relayed_error
from qserve.hub.local import weights_folder
from qserve.library.outputs import EngineDeadError

if TYPE_CHECKING:
    import torch

RELOAD = "reload_weights"


class AsyncControl(ABC):
    """Methods of AsyncLLM that control the engine. They raise InputError and EngineDeadError."""

    config: EngineConfig

    @abstractmethod
    async def _supervisor(self) -> Engines:
        """Return the engine. It is started first, if necessary."""

    async def pause_generation(self, *, mode: str = ABORT, clear_cache: bool = True) -> None:
        """Stop generation; new requests wait for `resume_generation`.

        `mode` says what happens to running requests: "abort" aborts them, "wait" lets them finish
        first, "keep" suspends them until generation resumes. `clear_cache` drops the prefix cache.
        """
        await self._carry_out(PauseGeneration(mode=mode, clear_cache=clear_cache))

    async def resume_generation(self) -> None:
        """Continue generation."""
        await self._carry_out(ResumeGeneration())

    async def is_paused(self) -> bool:
        """Return True while generation is paused."""
        return (await self._state()).is_paused

    async def abort_all(self) -> int:
        """End all requests with the finish reason abort. Returns their number."""
        return (await self._carry_out(AbortAll())).num_requests

    async def sleep(self, level: int = 1, mode: str = ABORT) -> None:
        """Free device memory until `wake_up`. `level` is as in `LLM.sleep`."""
        await self._carry_out(Sleep(level=level, mode=mode))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Restore "weights", "kv_cache" or, by default, everything.

        Generation continues once everything is restored.
        """
        await self._carry_out(WakeUp.of(tags))

    async def is_sleeping(self) -> bool:
        """Return True while weights or KV pages are not on the device."""
        return (await self._state()).is_sleeping

    async def weight_version(self) -> str:
        """Return the version of the weights in use: "0" at the start."""
        return (await self._state()).weight_version

    async def update_weights(
        self,
        weights: "str | Path | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]",
        version: str | int | None = None,
        *,
        mode: str = WAIT,
    ) -> str:
        """Replace all weights by those of a model folder or hub name, or by tensors with names.

        CPU tensors reach the engine's process through shared memory, GPU tensors through CUDA IPC.
        Do not change the tensors until this method returns. `mode` is as in `pause_generation`;
        "keep" recomputes the KV pages of running requests with the new weights. Wrong weights are
        refused before any weight changes. Returns the new version.
        """
        label = None if version is None else str(version)
        if isinstance(weights, str | Path):
            folder = await asyncio.to_thread(weights_folder, str(weights), self.config)
            command = UpdateWeights(folder=folder, version=label, mode=mode)
            return (await self._carry_out(command)).state.weight_version
        from qserve.engine.control import shared_tensors as shared  # loads torch

        if isinstance(weights, Mapping):
            parts = shared.in_parts(weights.items(), None)
        else:
            parts = shared.in_parts(weights, shared.PART_BYTES)
        is_first, outcome = True, Outcome()
        while (found := await asyncio.to_thread(next, parts, None)) is not None:
            part, is_last = found
            with contextlib.ExitStack() as stack:
                tensors = await asyncio.to_thread(stack.enter_context, shared.shared_tensors(part))
                command = UpdateWeights(
                    tensors=tensors,
                    is_first=is_first,
                    version=label,
                    mode=mode,
                    is_kept=False,
                    digests=True,
                )
                if not is_last:
                    command = ReceiveWeights(tensors=tensors, is_first=is_first)
                outcome = await self._carry_out(command)
            is_first = False
        return outcome.state.weight_version

    async def weight_digests(self) -> dict[str, str]:
        """Return tensor name -> `formats.weight_digest`, for the weights in use."""
        return (await self._carry_out(GetDigests())).digests

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method by name, as in vLLM. The methods are the same as in `LLM.collective_rpc`.

        Returns [None]. Raises InputError for other names.
        """
        if method == RELOAD:
            given = {"weights_path": self.config.model, **(kwargs or {})}
            await self.update_weights(args[0] if args else given["weights_path"])
        elif method in ("update_weights", "load_weights"):
            await self.update_weights(*args, **(kwargs or {}))
        elif method in ("sleep", "wake_up"):
            await (self.sleep if method == "sleep" else self.wake_up)(*args, **(kwargs or {}))
        else:
            raise InputError(
                f"collective_rpc {method!r:.60}",
                f"is not supported; known: {RELOAD}, load_weights, update_weights, sleep, wake_up",
                "call one of these, or a method of AsyncLLM",
            )
        return [None]

    async def _state(self) -> EngineState:
        return (await self._supervisor()).state

    async def _carry_out(self, command: AnyCommand) -> Outcome:
        client = await self._supervisor()
        outcome, problem = await client.operate(command)
        if problem and not client.is_alive:
            raise EngineDeadError(problem)
        if problem:
            raise relayed_error("engine", problem)
        return outcome
