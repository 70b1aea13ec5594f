"""GrammarCompiler: compiles grammars in threads and creates constraints from them.

A grammar is compiled twice: first in a process with limits on memory and time (sandbox.py),
then in this process, at the cost that the sandbox measured. Clients take turns. The cache has a
limit in bytes. For a rejected grammar, the error is cached without its traceback, which would keep
large objects alive.
"""

import threading
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from formats.errors import InputError, one_line
from qserve.errors import BusyError
from qserve.structured.backend import call, library, limits
from qserve.structured.constraint import Constraint, num_mask_words
from qserve.structured.grammar import refusal
from qserve.structured.heap import return_free_memory
from qserve.structured.params import FIELD, StructuredOutputsParams
from qserve.structured.sandbox import CompileCancelled, SandboxCompiler, tokenizer_text

NUM_THREADS = 3
MAX_RUNNING_PER_CLIENT = 2  # one client leaves at least one thread to the others
MAX_WAITING = 1024  # grammars that are waiting or being compiled
MAX_WAITING_PER_CLIENT = 256
MAX_CACHED_BYTES = 32 * 2**20  # a typical schema takes 100 KiB, one with 500 properties 2 MiB
MAX_REFUSALS, MAX_REFUSED_CHARS = 1024, 4 * 2**20
MAX_REFUSAL_SECONDS = 60.0  # a rejected grammar is compiled again after this time
# Memory of grammars in use, with the outputs' copies. Beyond it, only small grammars are accepted.
MAX_USED_BYTES = 1024 * 2**20
MAX_USED_BYTES_PER_CLIENT = 256 * 2**20
SMALL_BYTES = 2**20
# Freed memory is returned to the system whenever this many bytes of grammars have been evicted.
TRIM_BYTES = 16 * 2**20


@dataclass(eq=False)
class CompiledGrammar:
    """A compiled grammar in its initial state. The matcher never changes: outputs copy it."""

    matcher: Any
    num_bytes: int
    copy_bytes: int  # size of an output's copy


@dataclass(eq=False)
class _Job:
    params: StructuredOutputsParams
    future: Future = field(default_factory=Future)
    clients: set[str] = field(default_factory=set)
    is_wanted: bool = True
    is_started: bool = False


class GrammarCompiler:
    """Compiles grammars for one model's vocabulary, and caches the most recently used grammars."""

    def __init__(self, folder: str, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """Return immediately. The first grammar reads the vocabulary in the model's `folder`."""
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(sorted(eos_token_ids))
        self._sandbox = SandboxCompiler(folder, vocab_size, self._eos_token_ids)
        self._end = weakref.finalize(self, self._sandbox.close)
        self._tokenizer: Any = None
        self._reading = threading.Lock()  # held while the tokenizer is read
        self._lock = threading.RLock()  # protects everything below
        self._compiled: OrderedDict[StructuredOutputsParams, CompiledGrammar] = OrderedDict()
        self._num_bytes = 0  # size of the cache
        self._num_evicted = 0  # evicted bytes since memory was last returned
        self._refusals = _Refusals()
        self._jobs: dict[StructuredOutputsParams, _Job] = {}  # waiting or being compiled
        self._queues: OrderedDict[str, deque[_Job]] = OrderedDict()  # by client, in order of turns
        self._running: list[str] = []  # clients of the threads' current jobs
        self._used = _UsedBytes()

    def submit(self, params: StructuredOutputsParams, client: str = "") -> Future:
        """Start to compile a grammar. Returns a future of the argument for `constraint`.

        Equal grammars share a future until it is done. Raises InputError; the future may have an
        InputError, too.
        """
        library()  # fails immediately if it is not installed
        with self._lock:
            found = self._known(params)
            if found is not None:
                return found
            job = self._jobs.get(params)
            if job is not None and (job.is_started or client in job.clients):
                return job.future
            waiting = self._queues.get(client, ())
            if len(waiting) >= MAX_WAITING_PER_CLIENT or len(self._jobs) >= MAX_WAITING:
                raise BusyError(FIELD, "too many grammars are being compiled", "try again later")
            if job is None:
                job = self._jobs[params] = _Job(params)
            job.clients.add(client)
            self._queues.setdefault(client, deque()).append(job)
            if len(self._running) < NUM_THREADS:
                _start_thread(self)
            return job.future

    def cancel(self, params: StructuredOutputsParams) -> None:
        """Cancel a compilation. Call this when the last request that waits for it has ended."""
        with self._lock:
            job = self._jobs.pop(params, None)
            if job is None:
                return
            job.is_wanted = False
            for client in job.clients:
                self._leave_queue(client, job)

    def constraint(self, compiled: CompiledGrammar, client: str = "") -> Constraint:
        """Create a constraint in its initial state. Raises BusyError if memory is short."""
        if compiled.num_bytes + compiled.copy_bytes > SMALL_BYTES:
            self._used.check(compiled, client)
        made = Constraint(compiled.matcher, self._vocab_size, self._eos_token_ids)
        self._used.add(made, compiled, client)
        return made

    def close(self) -> None:
        """Stop the sandbox process. Waiting grammars will not be compiled."""
        with self._lock:
            for job in self._jobs.values():
                job.is_wanted = False
            self._jobs.clear()
            self._queues.clear()
        self._end()

    def _known(self, params: StructuredOutputsParams) -> Future | None:
        """Return the cached result of a grammar that was compiled or rejected, or None."""
        compiled = self._compiled.get(params)
        if compiled is not None:
            self._compiled.move_to_end(params)
            return _done(compiled)
        refused = self._refusals.find(params)
        return None if refused is None else _failed(refused)

    def next_job(self) -> tuple[_Job, str] | None:
        """Return the next job with its client; None: this thread should end."""
        with self._lock:
            if len(self._running) >= NUM_THREADS or not threading.main_thread().is_alive():
                return None  # enough threads are working, or the program ends
            for client, queue in self._queues.items():
                if self._running.count(client) >= MAX_RUNNING_PER_CLIENT:
                    continue
                job = queue.popleft()
                del self._queues[client]
                if queue:
                    self._queues[client] = queue  # moves to the end of the turns
                for other in job.clients - {client}:
                    self._leave_queue(other, job)
                self._running.append(client)
                job.is_started = True
                return job, client
            return None

    def run(self, job: _Job, client: str) -> None:
        """Compile a job and set the result of its future."""
        error: InputError | None = None
        compiled = None
        try:
            compiled = self._compile(job)
        except CompileCancelled:
            job.future.cancel()
        except InputError as raised:
            error = _bare(raised)
        except OSError as raised:  # a problem of this machine, not of the grammar
            problem = f"the grammar could not be compiled: {one_line(raised)}"
            error = BusyError(FIELD, problem, "try again later")
        except BaseException as raised:  # any failure must end only the requests of this grammar
            error = refusal(job.params, f"{type(raised).__name__}: {one_line(raised)}")
        with self._lock:
            self._running.remove(client)
            if self._jobs.get(job.params) is job:
                del self._jobs[job.params]
            if compiled is not None:
                self._keep(job.params, compiled)
            elif error is not None and not isinstance(error, BusyError):
                self._refusals.keep(job.params, error)
        self._return_memory()
        if compiled is not None:
            job.future.set_result(compiled)
        elif error is not None:
            job.future.set_exception(error)

    def _leave_queue(self, client: str, job: _Job) -> None:
        queue = self._queues.get(client)
        if queue is not None and job in queue:
            queue.remove(job)
            if not queue:
                del self._queues[client]

    def _keep(self, params: StructuredOutputsParams, compiled: CompiledGrammar) -> None:
        """Cache a compiled grammar, and evict the least recently used ones."""
        self._compiled[params] = compiled
        self._num_bytes += compiled.num_bytes
        while self._num_bytes > MAX_CACHED_BYTES:
            _, oldest = self._compiled.popitem(last=False)
            self._num_bytes -= oldest.num_bytes
            self._num_evicted += oldest.num_bytes

    def _return_memory(self) -> None:
        with self._lock:
            if self._num_evicted < TRIM_BYTES:
                return
            self._num_evicted = 0
        return_free_memory()

    def _compile(self, job: _Job) -> CompiledGrammar:
        tokenizer = self._read_tokenizer()

        def is_wanted() -> bool:
            return job.is_wanted and threading.main_thread().is_alive()

        found = self._sandbox.compile(job.params, is_wanted)
        matcher = call(library().LLMatcher, tokenizer, found.text, limits=limits(), log_level=0)
        if not matcher.is_error():
            # Compute a mask: copies inherit the lexer states that it creates.
            words = np.empty(num_mask_words(self._vocab_size), np.int32)
            call(matcher.unsafe_compute_mask_ptr, words.ctypes.data, words.nbytes)
        if matcher.is_error():
            raise refusal(job.params, matcher.get_error())
        return CompiledGrammar(matcher, found.num_bytes, found.copy_bytes)

    def _read_tokenizer(self) -> Any:
        with self._reading:
            if self._tokenizer is None:
                text = tokenizer_text(self._folder)
                ends = list(self._eos_token_ids) or None
                make = library().LLTokenizer
                try:
                    self._tokenizer = call(make, text, n_vocab=self._vocab_size, eos_token=ends)
                except Exception as error:  # llguidance raises bare exceptions
                    problem = f"the model's tokenizer cannot be used: {one_line(error)}"
                    raise InputError(
                        FIELD,
                        problem,
                        "save the tokenizer again as tokenizer.json with transformers",
                    ) from None
            return self._tokenizer


class _Refusals:
    """Cache of recently rejected grammars, with their errors."""

    def __init__(self) -> None:
        self._found: OrderedDict[StructuredOutputsParams, tuple[InputError, float]] = OrderedDict()
        self._num_chars = 0

    def keep(self, params: StructuredOutputsParams, error: InputError) -> None:
        self._drop(params)
        self._found[params] = _bare(error), time.monotonic() + MAX_REFUSAL_SECONDS
        self._num_chars += _num_chars(params)
        while len(self._found) > MAX_REFUSALS or self._num_chars > MAX_REFUSED_CHARS:
            self._drop(next(iter(self._found)))

    def find(self, params: StructuredOutputsParams) -> InputError | None:
        error, until = self._found.get(params, (None, 0.0))
        if error is not None and until <= time.monotonic():
            self._drop(params)
            return None
        return error and _bare(error)

    def _drop(self, params: StructuredOutputsParams) -> None:
        if self._found.pop(params, None) is not None:
            self._num_chars -= _num_chars(params)


class _UsedBytes:
    """Memory of the grammars in use, in total and by client."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # garbage collection may call _remove at any time
        self._num_users: Counter[CompiledGrammar] = Counter()
        self._by_client: Counter[str] = Counter()

    def check(self, compiled: CompiledGrammar, client: str) -> None:
        """Raise BusyError if one more output with this grammar exceeds the limit."""
        with self._lock:
            more = compiled.copy_bytes + (0 if compiled in self._num_users else compiled.num_bytes)
            if (
                self._by_client[client] + more > MAX_USED_BYTES_PER_CLIENT
                or self._by_client.total() + more > MAX_USED_BYTES
            ):
                problem = "large grammars of running requests use all the memory for grammars"
                raise BusyError(FIELD, problem, "try again when some requests have finished")

    def add(self, constraint: Constraint, compiled: CompiledGrammar, client: str) -> None:
        """Count an output until its constraint is garbage-collected."""
        with self._lock:
            size = compiled.copy_bytes
            if compiled not in self._num_users:
                size += compiled.num_bytes
            self._num_users[compiled] += 1
            self._by_client[client] += size
        weakref.finalize(constraint, self._remove, compiled, client, size).atexit = False

    def _remove(self, compiled: CompiledGrammar, client: str, size: int) -> None:
        with self._lock:
            self._num_users[compiled] -= 1
            if not self._num_users[compiled]:
                del self._num_users[compiled]
            self._by_client[client] -= size
            if not self._by_client[client]:
                del self._by_client[client]


def _start_thread(compiler: GrammarCompiler) -> None:
    """Start a thread that compiles until no job is left.

    It is not a daemon thread, since the interpreter must not exit during a call of Rust code.
    """

    def work() -> None:
        while found := compiler.next_job():
            compiler.run(*found)

    threading.Thread(target=work, name="grammars").start()


def _bare(error: InputError) -> InputError:
    """Return an equal error without a traceback, which may keep a matcher alive."""
    return type(error)(error.subject, error.problem, error.remedy)


def _num_chars(params: StructuredOutputsParams) -> int:
    texts = (params.json, params.regex, params.grammar, params.structural_tag, *params.choice)
    return sum(len(text) for text in texts if text) + len(params.prefix)


def _done(compiled: CompiledGrammar) -> Future:
    future: Future = Future()
    future.set_result(compiled)
    return future


def _failed(error: InputError) -> Future:
    future: Future = Future()
    future.set_exception(error)
    return future
