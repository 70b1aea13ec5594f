"""CompilePool: worker processes that compile kernels on all cores before they are launched.

Compiled kernels are in Triton's disk cache. An index file in the same folder names the finished
jobs, so that a start with a full cache starts no process.
"""

import hashlib
import json
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Set
from pathlib import Path

import triton

from formats.files.atomic_file import write_atomic
from formats.files.folder_lock import waiting_lock
from qkernels.gpu.compile_jobs import digest, toolchain

logger = logging.getLogger(__name__)

MAX_WORKERS = 16  # each takes about 0.5 GiB of the host's memory
FEW_JOBS = 2  # so few compile faster at their first launch than a worker starts
WORKER = "qkernels.gpu.compile_worker"
HOME = Path(__file__).resolve().parents[2]  # folder that holds our packages


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class CompilePool:
    """Pool of compile workers for one GPU architecture. `close` ends the workers that still run."""

    def __init__(self, num_workers: int | None = None, *, folder: Path | None = None) -> None:
        """Create the pool. `folder` is the folder of Triton's cache.

        `num_workers`: None is one per core, 0 none. If nothing was ever compiled, the workers start
        immediately, so that they are ready when jobs come.
        """
        self._num_workers = min(num_cores(), MAX_WORKERS) if num_workers is None else num_workers
        target = triton.runtime.driver.active.get_current_target()
        self._target = [target.backend, str(target.arch), str(target.warp_size)]
        self.folder = folder or Path(triton.knobs.cache.dir)
        self.version = self._version()
        self._index = self.folder / f"qserve-{self.version}.json"
        self._done = self._read_index()
        self._processes: list[subprocess.Popen] = []
        self._left: set[str] = set()  # digests of the jobs that are left to their first launch
        if not self._done:
            self._start(self._num_workers)

    def compile(self, jobs: Iterable[str], on_done: Callable[[], object] = lambda: None) -> int:
        """Compile the jobs that the index does not name, and return how many there were.

        Up to FEW_JOBS jobs are left to their first launch, and the result is 0: call `launched`
        after the launch. `on_done` is called after each job, from any thread.
        """
        missing = sorted({job for job in jobs if digest(job) not in self._done})
        if len(missing) <= FEW_JOBS or not self._num_workers:
            self.close()
            if self._num_workers:
                self._left = self.digests(missing)
            return 0
        waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        for job in missing:
            waiting.put(job)
        if not self._processes:
            self._start(min(self._num_workers, len(missing)))
        threads = [
            threading.Thread(target=self._feed, args=(process, waiting, on_done), daemon=True)
            for process in self._processes
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.close()
        self._write_index()
        return len(missing)

    def launched(self) -> None:
        """Add the jobs that `compile` left to their first launch to the index."""
        if self._left:
            self._done |= self._left
            self._left = set()
            self._write_index()

    def missing(self, jobs: Iterable[str]) -> int:
        """Return how many of the jobs the index does not name."""
        return len(self.digests(jobs) - self._done)

    @staticmethod
    def digests(jobs: Iterable[str]) -> set[str]:
        """Return the short names of jobs."""
        return set(map(digest, jobs))

    @property
    def done(self) -> Set[str]:
        """Digests of the compiled jobs."""
        return self._done

    @property
    def num_processes(self) -> int:
        return len(self._processes)

    def close(self) -> None:
        """End the workers. A job that is being compiled is lost."""
        for process in self._processes:
            process.stdin.close()
            process.kill()
            process.wait()
            process.stdout.close()
        self._processes = []

    def _start(self, count: int) -> None:
        # Hide the GPU: a CUDA context would cost GPU memory and seconds. Use one thread per worker.
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        path = os.environ.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{HOME}{os.pathsep}{path}" if path else str(HOME)
        self._processes = [
            subprocess.Popen(
                # without -P a folder formats/ in the working directory would shadow our package
                [sys.executable, "-P", "-m", WORKER, *self._target],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                text=True,
                bufsize=1,
                start_new_session=True,  # Ctrl-C reaches only this process, which ends the workers
            )
            for _ in range(count)
        ]

    def _feed(
        self, process: subprocess.Popen, waiting: queue.SimpleQueue, on_done: Callable[[], object]
    ) -> None:
        """Send jobs to one worker, one at a time, until none is left or the worker has ended."""
        while True:
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                process.stdin.write(job + "\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except OSError:
                answer = ""
            if not answer.endswith("\n"):
                logger.warning("A kernel compile process ended early; the others continue")
                return
            if answer == "\n":
                self._done.add(digest(job))
            else:
                logger.debug("A kernel is left to its first launch: %s: %.300s", answer, job)
            on_done()

    def _version(self) -> str:
        """Return a hash of everything except the job that machine code depends on."""
        hashed = hashlib.sha256(" ".join([toolchain(), *self._target]).encode())
        for path in sorted((HOME / "qkernels").rglob("*.py")):
            hashed.update(path.relative_to(HOME).as_posix().encode() + path.read_bytes())
        return hashed.hexdigest()[:16]

    def _read_index(self) -> set[str]:
        try:
            return set(json.loads(self._index.read_text()))
        except (OSError, ValueError, TypeError):
            return set()

    def _write_index(self) -> None:
        """Replace the index file atomically, with the entries that other engines have added.

        A lock keeps an engine that starts at the same time from replacing the file in between. If
        the file cannot be written, a warning is logged: the index only saves time.
        """
        try:
            with waiting_lock(self._index.with_suffix(".lock")):
                self._done |= self._read_index()
                write_atomic(self._index, json.dumps(sorted(self._done)))
        except OSError as error:
            logger.warning("%s could not be written: %s", self._index, error)
