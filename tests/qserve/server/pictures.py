"""Files of images, good and hostile, a web server that misbehaves by its path, and a processor."""

import base64
import http.server
import io
import struct
import threading
import zlib
from contextlib import contextmanager

from PIL import Image

from qserve.multimodal.media import MediaItem


def image_file(kind="PNG", size=(24, 16), mode="RGB", **options) -> bytes:
    file = io.BytesIO()
    Image.new(mode, size, 7).save(file, kind, **options)
    return file.getvalue()


def data_url(data: bytes, kind="image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def chunk(kind: bytes, data: bytes, crc: int | None = None) -> bytes:
    crc = zlib.crc32(kind + data) if crc is None else crc
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc)


def png(width: int, height: int, *more: bytes, pixels: bytes | None = None) -> bytes:
    """A gray PNG file with a stated size, whatever its pixels are."""
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress(bytes((width + 1) * height) if pixels is None else pixels)
    chunks = [chunk(b"IHDR", head), *more, chunk(b"IDAT", rows), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def bmp(width: int, height: int) -> bytes:
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + head


def gif(width: int, height: int) -> bytes:
    data = bytearray(image_file("GIF"))
    data[6:10] = struct.pack("<HH", width, height)
    return bytes(data)


def webp(width: int, height: int) -> bytes:
    """A lossless WebP file that states a size."""
    bits = (width - 1) | (height - 1) << 14
    body = b"\x2f" + struct.pack("<I", bits) + bytes(16)
    inner = b"WEBPVP8L" + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", len(inner)) + inner + bytes(len(inner) % 2)


class _Pages(http.server.BaseHTTPRequestHandler):
    def log_message(self, *arguments) -> None:
        pass

    def do_GET(self) -> None:
        name = self.path[1:]
        self.server.paths.append(self.path)
        if name.startswith("to?"):
            return self._send(302, b"", {"Location": name[3:]})
        if name == "hang":
            self.server.is_asked.set()
            self.server.is_released.wait(60)
            return self._send(404, b"no")
        if name == "missing":
            return self._send(404, b"no")
        if name == "gzip":
            return self._send(200, image_file(), {"Content-Encoding": "gzip"})
        if name == "short":
            return self._send(200, image_file(), {"Content-Length": "60000"})
        if name == "stated":
            return self._send(200, b"", {"Content-Length": "9999999999"})
        if name == "page":
            return self._send(200, b"<html>secret</html>")
        if name == "endless":
            return self._pour(b"\x89PNG\r\n\x1a\n" + bytes(2**14), 0)
        if name == "drip":
            return self._pour(b"a", 0.02)
        if name == "headers":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX-A: ")
            return self._drip()
        return self._send(200, image_file())

    def _send(self, status, body, headers=()) -> None:
        self.send_response(status)
        for item in dict(headers).items():
            self.send_header(*item)
        self.end_headers()
        self.wfile.write(body)

    def _pour(self, piece, seconds) -> None:
        self._send(200, b"")
        self._drip(piece, seconds)

    def _drip(self, piece=b"a", seconds=0.02) -> None:
        try:
            while not self.server.is_over.wait(seconds):
                self.wfile.write(piece)
                self.wfile.flush()
        except OSError:
            return


@contextmanager
def web_pages():
    """Run the server and yield it. Its port: `server_port`; requested paths: `paths`."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Pages)
    server.paths, server.is_over = [], threading.Event()
    server.is_asked, server.is_released = threading.Event(), threading.Event()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.is_over.set()
        server.is_released.set()
        server.shutdown()
        server.server_close()
        thread.join(5)


class FakeProcessor:
    """Makes three tokens of each image, and remembers the images."""

    def __init__(self, placeholder: int) -> None:
        self.placeholder, self.images = placeholder, []

    def prepare(self, ids, images, digests, videos=()):
        assert ids.count(self.placeholder) == len(images) == len(digests)
        self.images += images
        found, items = [], []
        left = list(digests)
        for token in ids:
            if token == self.placeholder:
                digest = left.pop(0)
                items.append(MediaItem(kind="image", digest=digest, offset=len(found), length=3))
            found += [token] * (3 if token == self.placeholder else 1)
        return found, tuple(items)
