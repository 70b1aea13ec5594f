"""Compile cases for one card and print what the machine code of each uses, as JSON lines.

    python -m tests.qkernels.compile.compile_cases sm_90 "w4a16 M=1" "w4a16 M=16"

Run by test_compile.py in a process of its own: where Triton interprets it cannot compile, and the
card is set up before qkernels is imported.
"""

import json
import sys

from tests.qkernels.compile.machine_code import facts

from tests.qkernels.compile import cards


def main(card: str, names: list[str]) -> None:
    cards.pretend(cards.CARDS[card])
    from tests.qkernels.compile.cases import CASES

    for name in names:
        cards.compiled.clear()
        CASES[name].run()
        for kernel, compiled in cards.compiled:
            print(json.dumps({"case": name, "kernel": kernel} | facts(compiled)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
