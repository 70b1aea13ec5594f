"""A rank whose GPU has too little memory."""

import os

from formats.errors import InputError
from qserve.engine import rank_process, worker


class FailingWorker:
    def __init__(self, *_):
        raise InputError("GPU memory", "ran out while loading the weights", "use a smaller model")


if __name__ == "__main__":
    worker.Worker = FailingWorker
    os._exit(rank_process.main())
