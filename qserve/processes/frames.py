"""Frames: length-prefixed messages over a socket.

A frame is the payload's length as 4 bytes (little-endian), then the payload.
"""

import asyncio
import socket

HEADER_BYTES = 4
SLICE_BYTES = 2**16
MAX_PAYLOAD_BYTES = 96 * 2**20  # a prompt of a million tokens is about 5 MB, a video up to 75 MB


class MessageError(Exception):
    """The other end sent an invalid message; it may be another program or version."""


def frame(payload: bytes) -> bytes:
    """Return the frame of a payload. Raises MessageError if it exceeds the readers' limit."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise MessageError(
            f"a message of {len(payload)} bytes, more than {MAX_PAYLOAD_BYTES}, cannot be sent"
        )
    return len(payload).to_bytes(HEADER_BYTES, "little") + payload


async def write(writer: asyncio.StreamWriter, payload: bytes | bytearray) -> None:
    """Send a frame in slices, so that a long one does not block the event loop."""
    writer.write(len(payload).to_bytes(HEADER_BYTES, "little"))
    view = memoryview(payload)
    for start in range(0, len(view), SLICE_BYTES):
        writer.write(view[start : start + SLICE_BYTES])
        await writer.drain()


def payload_size(header: bytes) -> int:
    """Return the payload length in a header. Raises MessageError if it exceeds the limit."""
    size = int.from_bytes(header, "little")
    if size > MAX_PAYLOAD_BYTES:
        raise MessageError(f"a frame claims {size} bytes, more than {MAX_PAYLOAD_BYTES}")
    return size


def receive(connection: socket.socket) -> bytes:
    """Wait for the next payload. Raises MessageError, and EOFError if the other end is gone."""
    return _receive_exactly(connection, payload_size(_receive_exactly(connection, HEADER_BYTES)))


async def read(reader: asyncio.StreamReader) -> bytes:
    """Wait for the next payload on an asyncio stream. Raises IncompleteReadError at its end."""
    return await reader.readexactly(payload_size(await reader.readexactly(HEADER_BYTES)))


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view, filled = memoryview(data), 0
    while filled < size:
        count = connection.recv_into(view[filled:])
        if count == 0:
            raise EOFError("the other end closed the connection")
        filled += count
    return bytes(data)
