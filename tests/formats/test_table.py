"""Sizes as flags give them, and counts as messages show them."""

import pytest

from formats.errors import InputError
from formats.table import count_text, parse_size


@pytest.mark.parametrize(
    ("text", "size"), [("1000", 1000), ("1.5 kb", 1500), ("1GiB", 2**30), ("2GB", 2 * 10**9)]
)
def test_size_texts_parse(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "0.0GB", "-1", "1TB", "GB", "1e3"])
def test_invalid_size_texts_are_refused(text):
    with pytest.raises(InputError, match="is not a number of bytes .write it as 500MB"):
        parse_size(text)


def test_count_text_pluralizes():
    found = [count_text(count, "window") for count in (0, 1, 2)]
    assert found == ["0 windows", "1 window", "2 windows"]
