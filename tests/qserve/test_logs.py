"""Lines of a log beside progress bars."""

import io
import logging

from tqdm import tqdm

from qserve.logs import LineHandler


def test_line_stands_above_the_bar():
    stream = io.StringIO()
    handler = LineHandler(stream)
    log = logging.Logger("a log of its own")
    log.addHandler(handler)
    log.warning("before")
    with tqdm(total=4, file=stream, mininterval=0) as bar:
        bar.update(2)
        log.warning("halfway")
        bar.update(2)
    lines = [line.rpartition("\r")[2] for line in stream.getvalue().split("\n")]
    assert lines[0] == "before"
    assert "halfway" in lines, "nothing stands before it on its line"
    assert "100%" in lines[-2] and lines[-1] == ""
