#!/usr/bin/env bash
# Run the tests in the project's own environment. Arguments go to pytest: tests/run.sh tests/formats -k gptq
set -euo pipefail
cd "$(dirname "$0")/.."
. tests/environment.sh "[test]"
ruff check .
ruff format --check .
# Bytecode is kept: pytest takes seconds to rewrite all tests.
unset PYTHONDONTWRITEBYTECODE
# Each worker computes on its own core.
export OMP_NUM_THREADS=1
# worksteal: tests of a file mostly stay in one worker, which makes their fixtures once.
exec python -m pytest --numprocesses auto --dist worksteal "$@"
