"""Lines that clients cause: some of each kind, then a count."""

import logging

from qserve.processes.log_limit import KINDS, LogLimit


def record(template: str, *values, name: str = "a") -> logging.LogRecord:
    return logging.LogRecord(name, logging.WARNING, "", 0, template, values, None)


def test_repeated_log_lines_are_suppressed_and_counted():
    limit = LogLimit(lines=3, seconds=1e9)
    shown = [limit.filter(record("client %d read nothing", i)) for i in range(100)]
    assert shown == [True] * 3 + [False] * 97
    assert limit.filter(record("something else")) and limit.filter(record("client %d", name="b"))
    limit._seconds = 0.0
    next_one = record("client %d read nothing", 7)
    assert limit.filter(next_one)
    assert next_one.getMessage() == "client 7 read nothing (and 97 more such lines before)"


def test_addresses_do_not_change_log_line_kind():
    limit = LogLimit(lines=3, seconds=1e9)
    lines = [record(f"Fatal error on <Transport fd={i} at {hex(i)}>") for i in range(50)]
    assert sum(limit.filter(line) for line in lines) == 3


def test_number_of_log_line_kinds_is_bounded():
    limit = LogLimit()
    for index in range(3 * KINDS):
        limit.filter(record(f"line {chr(20_000 + index)}"))
    assert len(limit._kinds) <= KINDS + 1
