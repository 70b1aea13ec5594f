"""`python -m qserve`: the command line, if the script `qserve` is not on PATH."""

import sys

from qserve.cli import main

if __name__ == "__main__":
    sys.exit(main())
