"""Check if bytes hold a complete HTTP/1.1 request, which a server must answer.

The check does not use the server's parser. Bytes that are not HTTP must be answered, too.
"""

import re

MAX_HEAD = 2**14  # bytes; a longer head is answered before its end
END_OF_HEAD = re.compile(rb"\r?\n\r?\n")
LENGTH = re.compile(rb"content-length[ \t]*:[ \t]*(.*?)[ \t]*", re.IGNORECASE)
CHUNKED = re.compile(rb"transfer-encoding[ \t]*:.*", re.IGNORECASE)
LAST_CHUNK = re.compile(rb"(^|\n)0+\r?\n(.+\r?\n)*\r?\n")


def is_complete(data: bytes) -> bool:
    """Return False if a server must wait for more bytes of the first request."""
    end = END_OF_HEAD.search(data)
    if end is None:
        return len(data) > MAX_HEAD
    body = data[end.end() :]
    headers = re.split(rb"\r?\n", data[: end.start()])[1:]
    lengths = [found[1] for line in headers if (found := LENGTH.fullmatch(line))]
    if any(CHUNKED.fullmatch(line) for line in headers):
        return bool(lengths) or LAST_CHUNK.search(body) is not None
    if not lengths:
        return True
    # Two lengths, or a length that is no number: invalid, whatever follows.
    is_number = len(set(lengths)) == 1 and lengths[0].isdigit()
    return not is_number or len(body) >= int(lengths[0])
