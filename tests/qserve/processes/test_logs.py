"""Log lines while progress bars are shown."""

import io
import logging

from tqdm import tqdm

from qserve.processes.logs import LineHandler


def test_log_line_is_printed_above_progress_bar():
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


class FullDisk(io.StringIO):
    def flush(self):
        raise OSError(28, "No space left on device")


def test_lines_are_dropped_while_the_disk_is_full(capsys):
    log = logging.Logger("a log of its own")
    log.addHandler(LineHandler(FullDisk()))
    log.warning("lost")
    assert capsys.readouterr().err == "", "its report would go to the same disk"
    log.warning("%d", "not a number")
    assert "not a number" in capsys.readouterr().err, "other failures are reported"
