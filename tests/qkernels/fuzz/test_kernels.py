"""Every kernel against its reference twin, on problems drawn from a seed for as long as is given.

    pytest tests/qkernels/fuzz/test_kernels.py --fuzz-seconds 60 --fuzz-seed 7

A failure is made small and printed as the argument of --fuzz-replay, which runs it alone. Without a
GPU, TRITON_INTERPRET=1 runs small problems in the interpreter.
"""

import json
import time
from collections import Counter

import pytest

from tests.qkernels.fuzz import fuzzer
from tests.qkernels.fuzz.attention import ATTENTION
from tests.qkernels.fuzz.inputs import INPUTS
from tests.qkernels.fuzz.others import OTHERS
from tests.qkernels.fuzz.products import PRODUCTS
from tests.qkernels.fuzz.values import ON_GPU

OPS = PRODUCTS | INPUTS | OTHERS | ATTENTION
MAX_COST = 10**10 if ON_GPU else 10**6  # the interpreter does about 10^7 products a second
REPEATS = 4 if ON_GPU else 0  # compiling takes seconds there, a run microseconds
SHRINK_SECONDS = 30


def test_fuzz(request):
    option = request.config.getoption
    seed, replay = option("--fuzz-seed"), option("--fuzz-replay")
    if replay is not None:
        problem = json.loads(replay)
        OPS[problem.pop("op")].run(**problem)
        return
    end = time.monotonic() + option("--fuzz-seconds")
    done: Counter[str] = Counter()
    for name, problem in fuzzer.problems(OPS, seed, MAX_COST, REPEATS):
        error = fuzzer.failure(OPS[name], problem)
        if error is not None:
            small = fuzzer.shrink(OPS[name], problem, SHRINK_SECONDS)
            pytest.fail(
                f"seed {seed}, problem {sum(done.values())}: {type(error).__name__}: {error}\n"
                f"drawn: {problem}\nreplay with\n"
                f"  --fuzz-replay '{fuzzer.replay_text(name, small)}'\n"
                f"which says: {fuzzer.failure(OPS[name], small)}"
            )
        done[name] += 1
        if time.monotonic() > end:
            break
    print(f"seed {seed}: {dict(done)}")
