"""The compile worker: `python -m qkernels.gpu.compile_worker BACKEND ARCH WARP`.

Reads a job a line (compile_jobs.py), compiles it into Triton's cache and answers with a line: empty
when it is done, else the error. Uses no GPU. It ends when its input does.
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
    """A Triton driver that only names the GPU to compile for; no GPU is needed."""

    target: GPUTarget

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


def main(backend: str, arch: str, warp_size: str) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a compiler prints is no answer
    target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, int(warp_size))
    triton.runtime.driver.set_active(TargetOnly(target=target))
    work(sys.stdin, answers, compile_job)


def work(jobs: TextIO, answers: TextIO, compile_one: Any) -> None:
    """Answer every job in turn."""
    for line in jobs:
        try:
            compile_one(line)
            answer = ""
        except Exception as error:  # whatever a compiler raises: the launch will raise it again
            answer = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        answers.write(answer + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
