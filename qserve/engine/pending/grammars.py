"""GrammarQueue: requests that wait until their grammars are compiled. Steps continue meanwhile."""

from concurrent.futures import FIRST_COMPLETED, Future, wait

from formats.errors import InputError, one_line
from qserve.engine.request import Request
from qserve.model.model_config import ModelConfig
from qserve.structured.compiler import GrammarCompiler
from qserve.structured.params import StructuredOutputsParams

MAX_WAIT_SECONDS = 0.01  # of an engine that has nothing else to do


class GrammarQueue:
    """The grammars of one model, and the requests that wait for one."""

    def __init__(self, folder: str, model: ModelConfig) -> None:
        self._compiler = GrammarCompiler(folder, model.vocab_size, model.eos_token_ids)
        self._waiting: dict[Request, Future] = {}  # in order of arrival

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Start to compile a request's grammar. Raises InputError."""
        self._waiting[request] = self._compiler.submit(_grammar(request), request.client)

    def remove(self, request: Request) -> bool:
        """Forget a request that was dropped. Returns whether it waited here.

        Its grammar is compiled no further, unless another request waits for it.
        """
        future = self._waiting.pop(request, None)
        if future is None:
            return False
        if not any(other is future for other in self._waiting.values()):
            self._compiler.cancel(_grammar(request))
        return True

    def take_compiled(self, *, wait_a_little: bool) -> list[tuple[Request, InputError | None]]:
        """Requests whose grammar is compiled, and those that get no constraint, with the reason."""
        if wait_a_little:
            wait(self._waiting.values(), MAX_WAIT_SECONDS, FIRST_COMPLETED)
        found = []
        for request, future in list(self._waiting.items()):
            if not future.done():
                continue
            del self._waiting[request]
            try:
                request.constraint = self._compiler.constraint(future.result(), request.client)
                found.append((request, None))
            except InputError as error:
                found.append((request, error))
            except Exception as error:  # any failure must end only the requests of this grammar
                found.append((request, InputError("structured_outputs", one_line(error))))
        return found

    def close(self) -> None:
        """Stop compiling."""
        self._compiler.close()


def _grammar(request: Request) -> StructuredOutputsParams:
    return request.params.structured_outputs
