"""Constrained: requests whose grammars are being compiled. They are not queued before.

Steps go on meanwhile. Knows no scheduler.
"""

from concurrent.futures import FIRST_COMPLETED, Future, wait

from formats.errors import InputError
from qserve.engine.request import Request
from qserve.model.model_config import ModelConfig
from qserve.structured.compiler import GrammarCompiler

MAX_WAIT_SECONDS = 0.01  # of an engine that has nothing else to do


class Constrained:
    """One model's grammars, and who waits for one."""

    def __init__(self, folder: str, model: ModelConfig) -> None:
        self._compiler = GrammarCompiler(folder, model.vocab_size, model.eos_token_ids)
        self._waiting: dict[Request, Future] = {}  # in the order they came

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Start to compile a request's grammar. Raises InputError."""
        self._waiting[request] = self._compiler.submit(request.params.structured_outputs)

    def remove(self, request: Request) -> bool:
        """Forget one that is not wanted any more. Returns whether it waited here."""
        return self._waiting.pop(request, None) is not None

    def take_compiled(self, *, wait_a_little: bool) -> list[tuple[Request, str | None]]:
        """Those whose grammar is there, with their constraint, or with why there is none."""
        if wait_a_little:
            wait(self._waiting.values(), MAX_WAIT_SECONDS, FIRST_COMPLETED)
        found = []
        for request, future in list(self._waiting.items()):
            if not future.done():
                continue
            del self._waiting[request]
            error = future.exception()
            if error is None:
                request.constraint = self._compiler.constraint(future.result())
                found.append((request, None))
            elif isinstance(error, InputError):
                found.append((request, str(error)))
            else:
                raise error
        return found
