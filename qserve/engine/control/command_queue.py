"""CommandQueue: runs an operator's commands in order, between the steps of an engine.

This module does not import torch.
"""

import logging
from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, NamedTuple

from qserve.engine.control.commands import (
    AbortAll,
    AnyCommand,
    EngineState,
    GetDigests,
    JoinWeightGroup,
    LeaveWeightGroup,
    Outcome,
    PauseGeneration,
    ReceiveWeights,
    ResumeGeneration,
    Sleep,
    UpdateWeights,
    WakeUp,
)

if TYPE_CHECKING:
    from qserve.engine.control.operations import StagedUpdate
    from qserve.engine.engine import Engine

logger = logging.getLogger(__name__)

Stage = Callable[[], "StagedUpdate"]
# Yields until the engine is drained; returns the outcome.
Work = Generator[None, None, Outcome]


class Finished(NamedTuple):
    """Result of a command: its outcome, and the error if it failed."""

    number: int
    outcome: Outcome
    error: Exception | None = None


def state_of(engine: "Engine") -> EngineState:
    """Return the current state of an engine."""
    return EngineState(
        is_paused=engine.is_paused,
        is_sleeping=engine.operations.is_sleeping,
        weight_version=engine.operations.version,
        fingerprint=engine.operations.fingerprint,
        adapters=engine.adapters.digests if engine.adapters is not None else {},
    )


class CommandQueue:
    """Commands of one engine. A command that waits for running requests delays later commands."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._waiting: deque[tuple[int, Work]] = deque()
        self._paused_by_sleep = False  # True: waking up also resumes generation

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, number: int, command: AnyCommand) -> None:
        """Queue a command. AbortAll goes to the front, ahead of commands that wait for requests."""
        if isinstance(command, AbortAll):
            self._waiting.appendleft((number, self._abort()))
        else:
            self._waiting.append((number, self._work(command)))

    def add_update(self, number: int, stage: Stage, mode: str) -> None:
        """Queue a weight update. `stage` reads and checks the new weights."""
        self._waiting.append((number, self._update(stage, mode)))

    def advance(self) -> list[Finished]:
        """Run commands until one must wait. Returns finished ones. Call before and after a step."""
        finished = []
        while self._waiting:
            number, work = self._waiting[0]
            try:
                next(work)
                return finished
            except StopIteration as end:
                finished.append(Finished(number, end.value))
            except Exception as error:  # the command's own failure
                finished.append(Finished(number, self._outcome(), error))
            self._waiting.remove((number, work))
        return finished

    def _outcome(self) -> Outcome:
        return Outcome(state=state_of(self._engine))

    def _work(self, command: AnyCommand) -> Work:
        match command:
            case PauseGeneration():
                return self._pause(command)
            case ResumeGeneration():
                return self._resume()
            case Sleep():
                return self._sleep(command)
            case WakeUp():
                return self._wake_up(command)
            case JoinWeightGroup() | LeaveWeightGroup():
                return self._change_group(command)
            case ReceiveWeights():
                return self._receive(command)
            case UpdateWeights():
                return self._update(lambda: self._stage(command), command.mode)
            case GetDigests():
                return self._digests()
        raise AssertionError(f"no such command: {command!r:.80}")

    def _drained(self, mode: str) -> Generator[None, None, None]:
        """Pause the engine if it is running, and wait until no step is in flight."""
        engine = self._engine
        if not engine.is_paused:
            engine.pause(mode)
        while not engine.is_drained:
            yield

    def _pause(self, command: PauseGeneration) -> Work:
        self._engine.pause(command.mode)
        self._paused_by_sleep = False
        yield from self._drained(command.mode)
        if command.clear_cache:
            self._engine.reset_prefix_cache()
        logger.info("Generation is paused (mode %s)", command.mode)
        return self._outcome()

    def _resume(self) -> Work:
        self._engine.resume()
        logger.info("Generation continues")
        return self._outcome()
        yield  # makes it a generator

    def _abort(self) -> Work:
        count = self._engine.abort_all()
        logger.info("%d requests were aborted by an operator", count)
        outcome = self._outcome()
        return Outcome(state=outcome.state, num_requests=count)
        yield

    def _sleep(self, command: Sleep) -> Work:
        engine = self._engine
        engine.operations.check_sleep(command.level)
        if not engine.is_paused:
            engine.pause(command.mode)
            self._paused_by_sleep = True
        yield from self._drained(command.mode)
        if command.level:
            engine.recompute_all()
            try:
                engine.operations.sleep(command.level)
            except BaseException:
                self._end_sleep()
                raise
        return self._outcome()

    def _wake_up(self, command: WakeUp) -> Work:
        self._engine.operations.wake_up(command.tags)
        self._end_sleep()
        return self._outcome()
        yield

    def _end_sleep(self) -> None:
        """Resume generation if a sleep paused it and nothing is asleep any more."""
        if self._paused_by_sleep and not self._engine.operations.is_sleeping:
            self._paused_by_sleep = False
            self._engine.resume()

    def _update(self, stage: Stage, mode: str) -> Work:
        engine = self._engine
        # Wrong weights are refused here, before running requests are affected.
        update = stage()
        was_paused = engine.is_paused
        yield from self._drained(mode)
        try:
            engine.recompute_all()
            engine.operations.commit(update)
        finally:
            if not was_paused:
                engine.resume()
        return self._outcome()

    def _receive(self, command: ReceiveWeights) -> Work:
        count, is_complete = self._engine.operations.receive(command)
        return Outcome(state=self._outcome().state, num_tensors=count, is_complete=is_complete)
        yield

    def _change_group(self, command: JoinWeightGroup | LeaveWeightGroup) -> Work:
        operations = self._engine.operations
        if isinstance(command, JoinWeightGroup):
            operations.join_group(command)
        else:
            operations.leave_group(command.name)
        return self._outcome()
        yield

    def _stage(self, command: UpdateWeights) -> "StagedUpdate":
        operations = self._engine.operations
        if command.tensors is not None:
            if command.is_first:
                operations.drop_received()
            return operations.stage_shared(command.tensors, command.version, command.digests)
        update = operations.stage(
            folder=command.folder, version=command.version, digests=command.digests
        )
        return update if command.is_kept else update.without_folder()

    def _digests(self) -> Work:
        found = self._engine.operations.weight_digests()
        return Outcome(
            state=self._outcome().state,
            total_digest=found.total,
            digests=found.tensors,
            schemes=found.schemes,
        )
        yield
