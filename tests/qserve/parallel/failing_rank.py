"""A rank whose GPU has too little memory."""

import os

from formats.errors import InputError
from qserve.engine.distributed import rank_process
from qserve.engine.runner import worker


class FailingWorker:
    def __init__(self, *_):
        raise InputError("GPU memory", "ran out while loading the weights", "use a smaller model")


if __name__ == "__main__":
    worker.Worker = FailingWorker
    os._exit(rank_process.main())
