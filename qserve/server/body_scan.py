"""BodyScan: counts what a JSON body holds while it arrives, before anything of it is parsed.

Parsing costs by the number of values, not by bytes: 7 MB of one text parse in 8 ms, of unknown
fields in 330. Knows no fields and no HTTP.
"""

from qserve.server.errors import ApiError

# What one character begins or parts, outside of texts; its limit; what it is called.
LIMITS = (
    (b"[{", 2**15, "lists and objects"),
    (b":", 2**15, "fields"),
    (b",", 2**20, "values"),
)
SLICE_BYTES = 2**15  # that take at most 1 ms, however hostile
_COUNTED = b"".join(characters for characters, *_ in LIMITS)
_SKIPPED = bytes(set(range(256)) - set(_COUNTED + b'"'))


class BodyScan:
    """Takes a body in pieces. It need not be JSON; what is counted then means nothing."""

    def __init__(self) -> None:
        self._counts = [0] * len(LIMITS)
        self._in_text = False
        self._half_escape = False  # the last piece ended with a backslash that escapes

    def feed(self, data: bytes) -> None:
        """Count the next piece. Raises ApiError(400) when there is too much of something."""
        if self._half_escape:
            data, self._half_escape = b"\\" + data, False
        if b"\\" in data:
            num_last = len(data) - len(data.rstrip(b"\\"))
            if num_last % 2:
                data, self._half_escape = data[:-1], True
            data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = data.translate(None, _SKIPPED).split(b'"')
        outside = b"".join(pieces[self._in_text :: 2])
        self._in_text ^= len(pieces) % 2 == 0
        for index, (characters, limit, what) in enumerate(LIMITS):
            self._counts[index] += sum(outside.count(each) for each in characters)
            if self._counts[index] > limit:
                raise ApiError(400, f"expected at most {limit} {what} in a body.")
