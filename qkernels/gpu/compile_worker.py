"""Compile worker process: `python -m qkernels.gpu.compile_worker BACKEND ARCH WARP`.

It reads one job per line (compile_jobs.py), compiles it into Triton's cache, and answers with one
line: empty on success, else the error. It uses no GPU and ends at the end of its input.
"""

import os
import sys
from dataclasses import dataclass
from typing import Any, TextIO

import triton
from triton.backends.compiler import GPUTarget

from qkernels.gpu.compile_jobs import compile_job


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOnly:
    """A Triton driver that names the GPU to compile for, without a GPU."""

    target: GPUTarget

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


def main(backend: str, arch: str, warp_size: str) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output that a compiler prints must not be read as an answer
    target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, int(warp_size))
    triton.runtime.driver.set_active(TargetOnly(target=target))
    work(sys.stdin, answers, compile_job)


def work(jobs: TextIO, answers: TextIO, compile_one: Any) -> None:
    """Compile each job in turn and write its answer."""
    for line in jobs:
        try:
            compile_one(line)
            answer = ""
        except Exception as error:  # compilers raise anything; the launch will raise it again
            answer = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        answers.write(answer + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
