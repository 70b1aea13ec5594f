"""GrammarCompiler: what is kept, who waits for whom, and what no grammar can do."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import wait
from pathlib import Path

import pytest

from formats.errors import InputError
from qserve.errors import BusyError, ParameterError
from qserve.structured import compiler as module
from qserve.structured import sandbox
from qserve.structured.compiler import GrammarCompiler
from qserve.structured.params import StructuredOutputsParams

PARAMS = StructuredOutputsParams(regex="[ab]+")
GUARD = 120.0  # seconds, against hanging
MIB = 2**20


@pytest.fixture
def own_compiler(docs_5m):
    """A compiler whose process starts in the test: with other limits, or to be killed."""
    made = GrammarCompiler(str(docs_5m), vocab_size=8192, eos_token_ids={2})
    yield made
    made.close()


@pytest.fixture(scope="module")
def sandbox_compiler(docs_5m):
    made = sandbox.SandboxCompiler(str(docs_5m), 8192, (2,))
    yield made
    made.close()


@pytest.fixture
def compiler(docs_5m, sandbox_compiler, monkeypatch):
    """A new compiler that uses the module's sandbox process."""
    made = GrammarCompiler(str(docs_5m), vocab_size=8192, eos_token_ids={2})
    monkeypatch.setattr(made, "_sandbox", sandbox_compiler)
    return made


def regex(text):
    return StructuredOutputsParams(regex=text)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def children(pid):
    """Processes that a process has started, and theirs."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(path.parent.name)] = int(parent)
    found, near = set(), {pid}
    while near:
        near = {each for each, parent in parents.items() if parent in near}
        found |= near
    return found


def until(condition):
    deadline = time.monotonic() + GUARD
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def test_same_grammar_is_compiled_once(compiler):
    first = compiler.submit(PARAMS).result(GUARD)
    assert not compiler.constraint(first).is_complete
    assert compiler.submit(PARAMS).result(GUARD) is first


def test_refused_grammar_leaves_nothing_in_memory(own_compiler, monkeypatch):
    """Without limits each takes 6 s and 170 MiB."""
    monkeypatch.setattr(sandbox, "MAX_CPU_SECONDS", 0.3)
    own_compiler.submit(PARAMS).result(GUARD)
    before = resident_bytes()
    for count in (900, 901):
        with pytest.raises(ParameterError, match="too complex: compiling it takes more than"):
            own_compiler.submit(regex(f"(a{{1000}}){{{count}}}")).result(GUARD)
    assert resident_bytes() - before < 20 * MIB


def test_refusal_is_remembered_as_text(compiler, monkeypatch):
    attempts, run = [], compiler._sandbox.compile

    def count(params, is_wanted):
        attempts.append(params)
        return run(params, is_wanted)

    monkeypatch.setattr(compiler._sandbox, "compile", count)
    errors = []
    for _ in range(3):
        with pytest.raises(ParameterError, match="unclosed character class") as raised:
            compiler.submit(regex("([")).result(GUARD)
        errors.append(weakref.ref(raised.value))
        del raised
    assert len(attempts) == 1
    gc.collect()
    assert [each() for each in errors] == [None] * 3, "no error is kept, which holds its traceback"


def test_refusal_is_forgotten_after_a_while(compiler, monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_COMPILED_BYTES", -1)
    with pytest.raises(ParameterError, match="too complex: compiled, it takes"):
        compiler.submit(PARAMS).result(GUARD)
    monkeypatch.undo()
    with pytest.raises(ParameterError, match="too complex"):
        compiler.submit(PARAMS).result(GUARD)
    monkeypatch.setattr(module.time, "monotonic", lambda: 1e9)
    compiler.constraint(compiler.submit(PARAMS).result(GUARD))


def test_memory_limit_ends_a_grammar(own_compiler, monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_WORK_BYTES", 8 * MIB)
    own_compiler.submit(PARAMS).result(GUARD)
    with pytest.raises(ParameterError, match="or 8 MiB"):
        own_compiler.submit(regex("(a{1000}){60}")).result(GUARD)


def test_cache_is_bounded_in_bytes(compiler, monkeypatch):
    monkeypatch.setattr(module, "MAX_CACHED_BYTES", 150_000)
    made = [compiler.submit(regex(f"[a-c]{{{n}}}")).result(GUARD) for n in range(1, 12)]
    sizes = [each.num_bytes for each in made]
    assert sum(sizes) > 2 * 150_000
    assert compiler._num_bytes <= 150_000
    assert compiler._num_bytes == sum(each.num_bytes for each in compiler._compiled.values())
    assert compiler.submit(regex("[a-c]{11}")).result() is made[-1], "the newest is kept"


def test_grammars_in_use_are_bounded_for_each_client(compiler, monkeypatch):
    monkeypatch.setattr(module, "MAX_USED_BYTES_PER_CLIENT", 3 * MIB)
    monkeypatch.setattr(module, "SMALL_BYTES", MIB)
    grammars = [regex(f"(a{{500}}){{{n}}}") for n in (10, 11)]
    first, second = (compiler.submit(each).result(GUARD) for each in grammars)
    assert 1.5 * MIB < first.num_bytes < 3 * MIB
    held = compiler.constraint(first, "one")
    with pytest.raises(BusyError, match="try again when some requests have finished"):
        compiler.constraint(second, "one")
    compiler.constraint(second, "other")
    small = compiler.submit(PARAMS).result(GUARD)
    compiler.constraint(small, "one")
    del held
    compiler.constraint(second, "one")
    assert not compiler._used._by_client, "constraints that are gone count no more"


class SlowSandbox:
    """Replaces the sandbox: slow grammars take until `free` is set, or they are cancelled."""

    def __init__(self, compiler, monkeypatch):
        self.begun, self.cancelled, self.free = [], [], threading.Event()
        self._run = compiler._sandbox.compile
        monkeypatch.setattr(compiler._sandbox, "compile", self.compile)

    def compile(self, params, is_wanted):
        self.begun.append(params.regex)
        while params.regex.startswith("slow") and not self.free.wait(0.01):
            if not is_wanted():
                self.cancelled.append(params.regex)
                raise sandbox.CompileCancelled
        return self._run(params, is_wanted)


def test_slow_grammars_of_one_client_do_not_delay_others(compiler, monkeypatch):
    slow = SlowSandbox(compiler, monkeypatch)
    theirs = [compiler.submit(regex(f"slow{n}"), "attacker") for n in range(20)]
    assert compiler.submit(regex("a+"), "victim").result(GUARD)
    assert slow.begun.count("slow2") == 0 and not any(each.done() for each in theirs)
    slow.free.set()
    wait(theirs, GUARD)


def test_clients_alternate(compiler, monkeypatch):
    slow = SlowSandbox(compiler, monkeypatch)
    futures = [compiler.submit(regex(f"slow{n}"), f"client {n}") for n in range(3)]
    until(lambda: len(slow.begun) == 3)  # all threads are busy
    taken, next_job = [], compiler.next_job

    def take():
        with compiler._lock:  # threads that have taken a grammar begin in any order
            found = next_job()
            if found is not None:
                taken.append(found[1])
            return found

    monkeypatch.setattr(compiler, "next_job", take)
    futures += [compiler.submit(regex(f"a{n}+"), "many") for n in range(9)]
    futures += [compiler.submit(regex("b+"), "few")]
    slow.free.set()
    wait(futures, GUARD)
    assert taken.count("many") == 9 and taken.index("few") <= 1, taken


def test_grammar_that_is_being_compiled_is_compiled_once_for_all_clients(compiler, monkeypatch):
    slow = SlowSandbox(compiler, monkeypatch)
    first = compiler.submit(regex("slow"), "first")
    until(lambda: slow.begun == ["slow"])
    assert compiler.submit(regex("slow"), "second") is first
    slow.free.set()
    wait([first, compiler.submit(regex("a+"), "second")], GUARD)
    assert slow.begun == ["slow", "a+"]


def test_missing_descriptors_do_not_refuse_grammar(compiler, monkeypatch):
    def fails(params, is_wanted):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(compiler._sandbox, "compile", fails)
        with pytest.raises(BusyError, match="Too many open files"):
            compiler.submit(regex("ab+")).result(GUARD)
    assert compiler.submit(regex("ab+")).result(GUARD)


def test_pending_grammars_per_client_are_limited(compiler, monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITING_PER_CLIENT", 4)
    slow = SlowSandbox(compiler, monkeypatch)
    futures = [compiler.submit(regex(f"slow{n}"), "attacker") for n in range(2)]
    until(lambda: len(slow.begun) == 2)
    futures += [compiler.submit(regex(f"slow{n}"), "attacker") for n in range(2, 6)]
    with pytest.raises(BusyError, match="too many grammars"):
        compiler.submit(regex("slow6"), "attacker")
    assert compiler.submit(regex("slow5"), "attacker") is futures[-1], "it waits already"
    assert compiler.submit(regex("a+"), "victim").result(GUARD)
    slow.free.set()
    wait(futures, GUARD)


def test_cancelled_grammars_stop_compiling(compiler, monkeypatch):
    slow = SlowSandbox(compiler, monkeypatch)
    for n in range(9):
        compiler.submit(regex(f"slow{n}"), "attacker")
    until(lambda: len(slow.begun) == 2)
    # Waiting ones first: a thread whose grammar was cancelled takes the next one immediately.
    for n in reversed(range(9)):
        compiler.cancel(regex(f"slow{n}"))
    assert compiler.submit(regex("a+"), "attacker").result(GUARD)
    until(lambda: len(slow.cancelled) == 2)
    assert set(slow.begun) == {"slow0", "slow1", "a+"}
    assert not compiler._jobs and not compiler._queues


def test_cancelled_compilation_ends_sandbox_process(own_compiler, monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_CPU_SECONDS", 60.0)
    own_compiler.submit(PARAMS).result(GUARD)
    before = children(os.getpid())
    own_compiler.submit(regex("(a{1000}){3000}"))
    until(lambda: children(os.getpid()) - before)
    own_compiler.cancel(regex("(a{1000}){3000}"))
    until(lambda: not children(os.getpid()) - before)


def test_killed_sandbox_process_is_replaced(own_compiler):
    own_compiler.submit(PARAMS).result(GUARD)
    own_compiler._sandbox._process.kill()
    own_compiler._sandbox._process.wait()
    assert own_compiler.submit(regex("a+")).result(GUARD)


def test_killed_sandbox_process_does_not_refuse_grammar(own_compiler, monkeypatch):
    """The end of its sockets is seen before that of the process."""
    own_sandbox = own_compiler._sandbox
    own_compiler.submit(PARAMS).result(GUARD)
    killed = own_sandbox._process
    killed.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(killed, "poll", lambda: None)
    handed_over, hand_over = threading.Event(), own_sandbox._hand_over

    def hand_over_and_tell(socket):
        process = hand_over(socket)
        handed_over.set()
        return process

    monkeypatch.setattr(own_sandbox, "_hand_over", hand_over_and_tell)
    future = own_compiler.submit(regex("(a{1000}){60}"))
    assert handed_over.wait(GUARD)
    killed.kill()
    assert future.result(GUARD)
    assert own_sandbox._process is not killed


def test_close_ends_the_processes(docs_5m):
    compiler = GrammarCompiler(str(docs_5m), 8192, [2])
    before = children(os.getpid())
    compiler.submit(PARAMS).result(GUARD)
    assert children(os.getpid()) - before
    compiler.close()
    assert not children(os.getpid()) - before


PROGRAM = """
import sys, threading
from qserve.structured.compiler import GrammarCompiler
from qserve.structured.params import StructuredOutputsParams as Params
compiler = GrammarCompiler(sys.argv[1], 8192, [2])
compiler.submit(Params(regex="a+")).result()
waiting = [compiler.submit(Params(regex="(a{1000}){%d}" % n)) for n in range(5000, 5009)]
print(compiler._sandbox._process.pid, flush=True)
waiting[0].result()
"""


@pytest.mark.exhaustive
def test_interrupt_leaves_no_process(docs_5m):
    """Ctrl-C in a program that waits for a grammar."""
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(docs_5m)], stdout=subprocess.PIPE, text=True
    )
    pid = int(program.stdout.readline())
    program.send_signal(signal.SIGINT)
    assert program.wait(GUARD) != 0
    program.stdout.close()
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_library_panic_fails_only_its_grammar(compiler, monkeypatch):
    class Panic(BaseException):
        pass

    class Library:
        @staticmethod
        def LLMatcher(*arguments, **options):
            raise Panic("index out of bounds")

    compiler.submit(PARAMS).result(GUARD)
    monkeypatch.setattr(module, "library", lambda: Library)
    with pytest.raises(InputError, match="index out of bounds"):
        compiler.submit(regex("a+")).result(GUARD)
    monkeypatch.undo()
    assert compiler.submit(regex("b+")).result(GUARD)
