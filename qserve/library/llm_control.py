"""LLMControl: sleep, wake and new weights of an LLM. Names follow vLLM's."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from formats.errors import InputError
from qserve.engine.control.command_queue import CommandQueue, state_of
from qserve.engine.control.commands import ABORT, AnyCommand, GetDigests, Outcome, Sleep, WakeUp
from qserve.hub.local import weights_folder
from qserve.library.llm_engine import LLMEngine

NamedTensors = Iterable[tuple[str, torch.Tensor]]


class LLMControl:
    """Methods of LLM on its weights and memory. Requests that an LLMEngine runs are aborted."""

    llm_engine: LLMEngine
    _control: CommandQueue | None = None

    def sleep(self, level: int = 1, mode: str = ABORT) -> None:
        """Give the device's memory back until `wake_up`.

        Level 1 keeps the weights in host memory, level 2 drops them: they are read again from the
        model's folder, or replaced by `update_weights`. Level 0 gives nothing back. Raises
        InputError.
        """
        self._carry_out(Sleep(level=level, mode=mode))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Bring back "weights", "kv_cache", or all, which `generate` needs. Raises InputError."""
        self._carry_out(WakeUp(tags=None if tags is None else list(tags)))

    def _check_awake(self) -> None:
        """Raise InputError after a `sleep` of any level: requests would wait forever."""
        if self.llm_engine.engine.is_paused:
            raise InputError("the model", "is asleep", "call wake_up() first")

    def is_sleeping(self) -> bool:
        """Return True while weights or KV pages are not on the device."""
        return self.llm_engine.engine.operations.is_sleeping

    def update_weights(
        self,
        weights: str | Path | NamedTensors | Mapping[str, torch.Tensor],
        version: str | int | None = None,
        *,
        digests: bool = True,
    ) -> None:
        """Replace all weights, in place: from a model folder, a hub name, or tensors by name.

        Float tensors are rounded as the model's own weights are. A missing, extra or misshapen
        tensor refuses the whole update, and the old weights stay. The prefix cache is dropped.
        `digests`: compute those of tensors now, since they cannot be read again. Raises InputError.
        """
        engine = self.llm_engine.engine
        label = None if version is None else str(version)
        if isinstance(weights, str | Path):
            folder = weights_folder(str(weights), engine.config)
            stage = partial(engine.operations.stage, folder=folder, version=label)
        else:
            named = weights.items() if isinstance(weights, Mapping) else weights
            stage = partial(engine.operations.stage, tensors=named, version=label, digests=digests)
        self._run_command(lambda queue: queue.add_update(0, stage, ABORT))

    @property
    def weight_version(self) -> str:
        """Version of the weights in use: "0" at the start."""
        return self.llm_engine.engine.operations.version

    @property
    def system_fingerprint(self) -> str:
        """A short text that changes when the bits of outputs may, as in the server's replies."""
        return self.llm_engine.engine.operations.fingerprint

    def adapter_fingerprint(self, name: str) -> str:
        """The system_fingerprint of outputs with an adapter that was used or loaded before."""
        return state_of(self.llm_engine.engine).fingerprint_of(name)

    def weight_digests(self) -> dict[str, str]:
        """Return the digest of each tensor in use, as `formats.weight_digest` computes it."""
        return dict(self._carry_out(GetDigests()).digests)

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of all workers, as in vLLM, by name; one result for each of them.

        Known: reload_weights (from a folder, by default the model's), load_weights and
        update_weights (both of tensors by name), sleep and wake_up. Raises InputError.
        """
        calls: dict[str, Callable[..., None]] = {
            "reload_weights": self._reload_weights,
            "load_weights": self.update_weights,
            "update_weights": self.update_weights,
            "sleep": self.sleep,
            "wake_up": self.wake_up,
        }
        if method not in calls:
            raise InputError(
                f"collective_rpc {method!r:.60}",
                f"is not supported; known: {', '.join(calls)}",
                "send tensors by name with LLM.update_weights",
            )
        calls[method](*args, **(kwargs or {}))
        return [None]

    def _reload_weights(self, weights_path: str | Path | None = None) -> None:
        self.update_weights(weights_path or self.llm_engine.engine.config.model)

    def _carry_out(self, command: AnyCommand) -> Outcome:
        return self._run_command(lambda queue: queue.add(0, command))

    def _run_command(self, add: Callable[[CommandQueue], None]) -> Outcome:
        if self._control is None:
            self._control = CommandQueue(self.llm_engine.engine)
        add(self._control)
        while not (finished := self._control.advance()):
            self.llm_engine.step()
        (done,) = finished
        if done.error is not None:
            raise done.error
        return done.outcome
