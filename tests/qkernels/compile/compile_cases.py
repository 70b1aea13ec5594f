"""Compile cases for one card and print facts about their machine code, as JSON lines.

    python -m tests.qkernels.compile.compile_cases sm_90 "w4a16 M=16" decode

An argument is the name of a case, or the beginning of the names of several cases. test_compile.py
runs this in a separate process: a process in which Triton interprets cannot compile, and the card
must be simulated before modules of qkernels import functions that ask for it.
"""

import json
import sys

from tests.qkernels.compile import cards


def main(card: str, names: list[str]) -> None:
    cards.pretend(cards.CARDS[card])
    from tests.qkernels.compile.cases.table import CASES
    from tests.qkernels.compile.machine_code import facts

    beginnings = tuple(name for name in names if name not in CASES)
    for name, case in CASES.items():
        if case.least > cards.CARDS[card].arch:
            continue
        if name not in names and not name.startswith(beginnings):
            continue
        cards.compiled.clear()
        case.run()
        for kernel, compiled in cards.compiled:
            print(json.dumps({"case": name, "kernel": kernel} | facts(compiled)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
