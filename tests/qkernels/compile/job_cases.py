"""Describe launches as compile jobs for sm_90 and compile them in workers, as a start does.

    python -m tests.qkernels.compile.job_cases FOLDER NAME...

FOLDER becomes Triton's cache. Prints what happened as one JSON object. Run by test_jobs.py in a
process of its own, for the reasons that compile_cases.py states.
"""

import json
import os
import sys
from pathlib import Path

import torch

from tests.qkernels.compile import cards


def main(folder: str, names: list[str]) -> None:
    os.environ["TRITON_CACHE_DIR"] = folder
    cards.pretend(cards.CARDS["sm_90"])
    from qkernels.gpu import compile_jobs, launch
    from qkernels.gpu.compile_pool import CompilePool
    from tests.qkernels.compile.cases.table import CASES

    launch.INTERPRETED = False
    torch.cuda.current_device = lambda: 0
    refused, seen = [], []
    describe = compile_jobs.describe_launch

    def described(kernel, arguments, constants):
        seen.append(kernel.fn.__name__)
        try:
            return describe(kernel, arguments, constants)
        except compile_jobs.NotDescribable as error:
            refused.append(str(error))
            raise

    compile_jobs.describe_launch = described
    cases = [case for name, case in CASES.items() if name in names or not names]
    with launch.recorded_launches() as recorded:
        for case in cases:
            if case.least <= 90:
                case.run()
    jobs = list(recorded.values())
    found = {"jobs": len(jobs), "kernels": len(seen), "refused": refused}
    if names:
        broken = json.dumps(json.loads(jobs[0]) | {"kernel": "no_such_kernel"})
        found["compiled"] = compile_all([*jobs, broken])
        before = entries(folder)
        for case in cases:
            case.run()
        found["entries"], found["entries_after"] = before, entries(folder)
        again = CompilePool(1)
        found["missing_again"] = again.missing(jobs)
        found["processes_again"] = again.num_processes
        again.close()
    print(json.dumps(found))


def compile_all(jobs: list[str]) -> int:
    from qkernels.gpu.compile_pool import CompilePool

    done = []
    CompilePool(1).compile(jobs, on_done=lambda: done.append(1))
    return len(done)


def entries(folder: str) -> int:
    """Compiled kernels in Triton's cache."""
    return len(list(Path(folder).glob("*/*.cubin")))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
