"""`python -m qserve`: the command line, for when the script `qserve` is not on PATH."""

import sys

from qserve.cli import main

if __name__ == "__main__":
    sys.exit(main())
