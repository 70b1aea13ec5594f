"""Compile the kernels for sm_90 without a GPU and print what the machine code uses, as JSON lines.

Run by test_compile.py in a process of its own: where Triton interprets, it cannot compile.
"""

import json
import sys

from offline_attention import ATTENTION
from offline_digits import LIMBS
from offline_int8 import INT8
from offline_linear import LINEAR
from offline_others import OTHERS

CASES = LINEAR | LIMBS | INT8 | ATTENTION | OTHERS

if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        print(json.dumps({"case": case} | CASES[case]()), flush=True)
