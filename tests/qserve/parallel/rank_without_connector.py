"""A rank whose connector cannot be made."""

import os

from formats.errors import InputError
from qserve.engine import rank_process, worker


def fail(config, page_bytes):
    raise InputError("the store", "is not reachable", "start it")


if __name__ == "__main__":
    worker.make_connector = fail
    os._exit(rank_process.main())
