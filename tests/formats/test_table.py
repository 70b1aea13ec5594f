"""Sizes as flags give them."""

import pytest

from formats.errors import InputError
from formats.table import parse_size


@pytest.mark.parametrize(
    ("text", "size"), [("1000", 1000), ("1.5 kb", 1500), ("1GiB", 2**30), ("2GB", 2 * 10**9)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "0.0GB", "-1", "1TB", "GB", "1e3"])
def test_no_sizes(text):
    with pytest.raises(InputError, match="expected a number of bytes"):
        parse_size(text)
