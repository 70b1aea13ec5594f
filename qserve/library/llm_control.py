"""LLMControl: sleep, wake and weight updates of an LLM. Names follow vLLM's."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from formats.errors import InputError
from formats.numerics.torch_state import torch_defaults
from qserve.engine.control.command_queue import CommandQueue, state_of
from qserve.engine.control.commands import ABORT, AnyCommand, GetDigests, Outcome, Sleep, WakeUp
from qserve.hub.local import weights_folder
from qserve.library.llm_engine import LLMEngine

NamedTensors = Iterable[tuple[str, torch.Tensor]]


class LLMControl:
    """Methods of LLM that control weights and memory. By default they abort running requests."""

    llm_engine: LLMEngine
    _control: CommandQueue | None = None

    def sleep(self, level: int = 1, mode: str = ABORT) -> None:
        """Free device memory until `wake_up`. Raises InputError.

        Level 1 moves the weights to host memory. Level 2 drops them; `wake_up` reads them again
        from the model's folder, or `update_weights` replaces them. Level 0 pauses generation and
        frees nothing.
        """
        self._carry_out(Sleep(level=level, mode=mode))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Restore "weights", "kv_cache" or, by default, everything. Raises InputError.

        `generate` needs everything.
        """
        self._carry_out(WakeUp.of(tags))

    def _check_awake(self) -> None:
        """Raise InputError while the engine sleeps at any level: requests would wait forever."""
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
        """Replace all weights in place, by a model folder or hub name, or by tensors with names.

        Float tensors are rounded in the same way as the model's own weights. A missing, extra or
        misshapen tensor refuses the whole update, and the old weights stay. The prefix cache is
        dropped. `digests`: compute the digests of given tensors during the update; later the
        tensors cannot be read again. Raises InputError.
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
        """Short text that changes whenever the bits of outputs may; as in the server's replies."""
        return self.llm_engine.engine.operations.fingerprint

    def adapter_fingerprint(self, name: str) -> str:
        """Return the system_fingerprint of outputs with an adapter.

        The adapter must have been used or loaded before.
        """
        return state_of(self.llm_engine.engine).fingerprint_of(name)

    def weight_digests(self) -> dict[str, str]:
        """Return tensor name -> `formats.weight_digest`, for the weights in use."""
        return dict(self._carry_out(GetDigests()).digests)

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method by name, as vLLM does on its workers. Returns [None]. Raises InputError.

        The names: reload_weights (from a folder, by default the model's), load_weights and
        update_weights (the same: see `update_weights`), sleep, wake_up.
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

    @torch_defaults(dtype=False)
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
