"""A rank whose connector cannot be made."""

import os

from formats.errors import InputError
from qserve.engine.distributed import rank_process, rank_transfers


def fail(config, page_bytes):
    raise InputError("the store", "is not reachable", "start it")


if __name__ == "__main__":
    rank_transfers.make_connector = fail
    os._exit(rank_process.main())
