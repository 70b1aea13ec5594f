"""A rank that exits or hangs at a call: QSERVE_TEST_RANK says which, as HOW@CALL."""

import os
import signal

from qserve.engine.distributed import rank_process

SIGNALS = {"dies": signal.SIGKILL, "stands": signal.SIGSTOP}


def stop_at(name, how):
    unpack = rank_process.unpack

    def stopping(data):
        found = unpack(data)
        if found[0] == name or found[2:3] == (name,):  # a call, or one that is begun
            os.kill(os.getpid(), SIGNALS[how])
        return found

    rank_process.unpack = stopping


if __name__ == "__main__":
    how, _, name = os.environ["QSERVE_TEST_RANK"].partition("@")
    stop_at(name, how)
    os._exit(rank_process.main())
