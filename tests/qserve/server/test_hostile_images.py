"""Hostile images: each is refused with one line, from any source, and no other request waits."""

import base64
import os
import socket
import zlib

import pytest

from qserve.config import ServerConfig
from qserve.multimodal.reader import MediaReader
from qserve.multimodal.settings import AllowedHost, MediaLimits
from qserve.server.prepare.media import MediaAccess
from qserve.text.tokenizer import Tokenizer
from tests.qserve.server import pictures
from tests.qserve.server.pictures import (
    FakeProcessor,
    bmp,
    chunk,
    data_url,
    gif,
    image_file,
    png,
    webp,
)
from tests.tiny_vision import write_tiny_tokenizer

GOOD = image_file()
PIXELS, BYTES, IMAGES = 2**16, 2**17, 3
# what the resolver says in these tests; the web server runs on 127.0.0.1, which is listed
ADDRESSES = {
    "pictures.example": ["127.0.0.1"],
    "private.example": ["10.0.0.7"],
    "mixed.example": ["93.184.216.34", "127.0.0.2"],
    "mapped.example": ["::ffff:192.168.0.1"],
    "tunnel.example": ["64:ff9b::a00:1"],
    "metadata.example": ["169.254.169.254"],
    "nowhere.example": [],
}


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("with_images")
    ids = write_tiny_tokenizer(folder, ["<image>"], "<image>")
    made = Tokenizer(folder)
    made.image = ids["<image>"]
    return made


@pytest.fixture(scope="module")
def web():
    with pictures.web_pages() as server:
        yield server


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """An allowed folder, with a secret next to it."""
    folder = tmp_path_factory.mktemp("files") / "allowed"
    folder.mkdir()
    (folder / "good.png").write_bytes(GOOD)
    (folder.parent / "secret.png").write_bytes(GOOD)
    (folder / "link.png").symlink_to(folder.parent / "secret.png")
    (folder / "circle.png").symlink_to(folder / "circle.png")
    (folder / "up").symlink_to(folder.parent)
    (folder / "large.png").write_bytes(GOOD + bytes(BYTES))
    os.mkfifo(folder / "pipe")
    return folder


@pytest.fixture
def served(make_server, tokenizer, web, files, monkeypatch):
    """(server, processor): with all sources allowed, within limits."""
    port = web.server_port
    hosts = [f"127.0.0.1:{port}", *(f"{name}:{port}" for name in ADDRESSES)]
    limits = MediaLimits(
        hosts=tuple(map(AllowedHost.parse, hosts)),
        local_path=str(files),
        max_images=IMAGES,
        max_bytes=BYTES,
        max_pixels=PIXELS,
        fetch_seconds=0.25,
    )
    real = socket.getaddrinfo

    def look_up(host, port, *rest, **options):
        if host not in ADDRESSES:
            return real(host, port, *rest, **options)
        return [(0, 0, 0, "", (address, port)) for address in ADDRESSES[host]]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    processor = FakeProcessor(tokenizer.image)
    monkeypatch.setattr(MediaReader, "load", lambda reader: processor)
    config = ServerConfig(served_model_name=["tiny"], max_body_bytes=2**22)
    server = make_server(config, media=MediaAccess(limits))
    server.client.vocab_size = tokenizer.image + 1
    return server, processor


def part(url) -> dict:
    return {"type": "image_url", "image_url": {"url": url}}


def ask(server, *parts, role="user", **fields):
    content = [{"type": "text", "text": "What is it?"}, *parts]
    return server.chat(messages=[{"role": role, "content": content}], **fields)


LARGE = png(300, 300)
SVG = b'<svg xmlns="http://www.w3.org/2000/svg"/>'
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n"
JP2 = b"\x00\x00\x00\x0cjP  \x0d\x0a\x87\x0a\x00\x00\x00\x14ftypjp2 "
TEXT_BOMB = chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**22)))  # Pillow's limit is 2**20
FILES = {
    "no bytes": (b"", "is empty"),
    "random bytes": (bytes(range(256)), "expected one of PNG, JPEG"),
    "text": (b"hello " * 99, "expected one of PNG, JPEG"),
    "SVG": (SVG, "expected one of PNG, JPEG"),
    "EPS, which runs a program": (EPS, "expected one of PNG, JPEG"),
    "PDF": (b"%PDF-1.7\n1 0 obj\n", "expected one of PNG, JPEG"),
    "JPEG 2000": (JP2, "expected one of PNG, JPEG"),
    "TIFF": (image_file("TIFF"), "expected one of PNG, JPEG"),
    "ICO": (image_file("ICO"), "expected one of PNG, JPEG"),
    "PPM": (image_file("PPM"), "expected one of PNG, JPEG"),
    "head of a PNG alone": (GOOD[:20], "image: "),
    "PNG cut in its pixels": (image_file(size=(99, 99))[:-30], "is broken or truncated"),
    "JPEG cut in its pixels": (image_file("JPEG", (200, 200))[:-90], "is broken or truncated"),
    "WebP cut in its pixels": (image_file("WEBP", (99, 99))[:-40], "image: "),
    "GIF cut in its pixels": (image_file("GIF", (99, 99))[:-40], "is broken or truncated"),
    "PNG with a wrong checksum": (
        png(9, 9, chunk(b"tEXt", b"a\0b", crc=1)).replace(b"IDAT", b"IDAX"),
        "image: ",
    ),
    "PNG without pixels": (png(9, 9, pixels=b""), "is broken or truncated"),
    "PNG of no width": (png(0, 9), "image: "),
    "PNG of more pixels than allowed": (LARGE, f"has more than {PIXELS} pixels: 300 x 300"),
    "PNG that states 4 gigapixels": (png(2**16, 2**16, pixels=b""), "has more than"),
    "PNG that states 2^62 pixels": (png(2**31 - 1, 2**31 - 1, pixels=b""), "has more than"),
    "PNG with a bomb of text": (png(9, 9, TEXT_BOMB), "image: "),
    "GIF that states 4 gigapixels": (gif(65535, 65535), "has more than"),
    "WebP that states 268 megapixels": (webp(16383, 16383), "image: "),
    "BMP that states 4 gigapixels": (bmp(2**16, 2**16), "has more than"),
    "BMP of no pixels": (bmp(0, 0), "image: "),
    "more bytes than allowed": (GOOD + bytes(BYTES), f"has more than {BYTES} bytes"),
}


@pytest.mark.parametrize("name", FILES)
def test_hostile_files(served, error, name):
    server, processor = served
    data, words = FILES[name]
    check_refused(server, processor, error, ask(server, part(data_url(data))), words)


def check_refused(server, processor, error, reply, words):
    message = error(reply, 400)["message"]
    assert words in message
    assert "\n" not in message and len(message) < 400
    for leaked in ("PIL", "0x", "Traceback", "Errno", "/usr", "secret", "BytesIO"):
        assert leaked not in message
    assert not server.client.requests and not processor.images


BASE64 = base64.b64encode(GOOD).decode()
NO_HOST = "is not allowed by --allowed-media-domains"
PRIVATE = "has an address that is not public"
LATE = "did not send it, or not in time"
URLS = {
    "no URL": ("", "with a URL in image_url"),
    "number": (5, "with a URL in image_url"),
    "plain base64": (BASE64, "expected data:, http:, https: or file:"),
    "data without base64": (f"data:image/png,{BASE64}", "expected data:image/TYPE;base64"),
    "data of a page": (f"data:text/html;base64,{BASE64}", "expected the media type of an image"),
    "base64 of other letters": ("data:image/png;base64,!!!!", "is not valid base64"),
    "data without end of its head": ("data:" + "a;" * 5000, "expected data:image/TYPE;base64"),
    "other scheme": ("ftp://pictures.example/a.png", "expected data:, http:, https: or file:"),
    "gopher": ("gopher://127.0.0.1:6379/_x", "expected data:, http:, https: or file:"),
    "file outside": ("file:///etc/passwd", "names no regular file"),
    "path that climbs out": ("file://FOLDER/../secret.png", "names no regular file"),
    "escaped path that climbs out": ("file://FOLDER/%2e%2e/secret.png", "names no regular file"),
    "link out": ("file://FOLDER/link.png", "names no regular file"),
    "link of a folder out": ("file://FOLDER/up/secret.png", "names no regular file"),
    "circle of links": ("file://FOLDER/circle.png", "names no regular file"),
    "folder": ("file://FOLDER", "names no regular file"),
    "pipe": ("file://FOLDER/pipe", "names no regular file"),
    "NUL in a path": ("file://FOLDER/a%00.png", "names no regular file"),
    "file of another machine": ("file://host/FOLDER/good.png", "names no regular file"),
    "large file": ("file://FOLDER/large.png", f"has more than {BYTES} bytes"),
    "host that is not listed": ("http://other.example/a.png", NO_HOST),
    "port that is not listed": ("http://pictures.example:22/a.png", NO_HOST),
    "user name that looks like a host": ("http://pictures.example:PORT@evil.example/", "user name"),
    "metadata address": ("http://169.254.169.254/latest/meta-data", NO_HOST),
    "metadata by a name": ("http://metadata.example:PORT/a", PRIVATE),
    "loopback as a number": ("http://2130706433:PORT/a.png", NO_HOST),
    "private address": ("http://private.example:PORT/a.png", PRIVATE),
    "one of two addresses is private": ("http://mixed.example:PORT/a.png", PRIVATE),
    "private address inside IPv6": ("http://mapped.example:PORT/a.png", PRIVATE),
    "private address behind a tunnel": ("http://tunnel.example:PORT/a.png", PRIVATE),
    "host without address": ("http://nowhere.example:PORT/a.png", "has no address"),
    "invalid port": ("http://pictures.example:99999/a.png", "is not valid"),
    "invalid IPv6": ("http://[::1/a.png", "is not valid"),
    "long URL": ("http://pictures.example:PORT/" + "a" * 9000, "at most 8192 characters"),
    "redirect to another host": ("WEB/to?http://evil.example/a.png", NO_HOST),
    "redirect to a private address": ("WEB/to?http://private.example:PORT/a.png", PRIVATE),
    "redirect to a file": ("WEB/to?file:///etc/passwd", "expected http or https"),
    "redirect to itself": ("WEB/to?to?to?to?to?to?to?to?a", "has more than 5 redirects"),
    "no such page": ("WEB/missing", "answered with status 404"),
    "page instead of an image": ("WEB/page", "expected one of PNG, JPEG"),
    "compressed": ("WEB/gzip", "sent it with a Content-Encoding"),
    "stated length of gigabytes": ("WEB/stated", f"has more than {BYTES} bytes"),
    "endless body": ("WEB/endless", f"has more than {BYTES} bytes"),
    "body that ends early": ("WEB/short", "bytes of 60000"),
    "body by single bytes": ("WEB/drip", LATE),
    "headers by single bytes": ("WEB/headers", LATE),
    "TLS to a server without": ("https://pictures.example:PORT/a.png", LATE),
    "line break in a path": ("WEB/a%0d%0aHost: x", "OK"),
}


@pytest.mark.parametrize("name", URLS)
def test_hostile_urls(served, error, web, files, name):
    server, processor = served
    url, words = URLS[name]
    if isinstance(url, str):
        url = url.replace("WEB", "http://pictures.example:PORT")
        url = url.replace("PORT", str(web.server_port)).replace("FOLDER", str(files))
    reply = ask(server, part(url))
    if words == "OK":
        assert reply.status_code == 200
        assert web.paths[-1] == "/a%0d%0aHost:%20x"  # one line of the request
        return
    check_refused(server, processor, error, reply, words)


GOOD_PART = part(data_url(GOOD))
REQUESTS = {
    "more images than allowed": (
        {"parts": [GOOD_PART] * (IMAGES + 1)},
        f"expected at most {IMAGES} images, found {IMAGES + 1}",
    ),
    "images that are large together": (
        {"parts": [part(data_url(png(200, 200 - i))) for i in range(2)]},
        f"has more than {PIXELS - 200 * 200} pixels",
    ),
    "video": ({"parts": [{"type": "video_url", "video_url": {"url": "x"}}]}, "takes no video"),
    "audio": ({"parts": [{"type": "input_audio", "input_audio": {}}]}, "input_audio is not"),
    "file id": ({"parts": [{"type": "image_url", "file_id": "f"}]}, "file_id: this server"),
    "unknown detail": (
        {"parts": [{"type": "image_url", "image_url": {"url": data_url(GOOD), "detail": "no"}}]},
        "detail: expected one of auto",
    ),
    "image of the system": ({"parts": [GOOD_PART], "role": "system"}, "role user or tool"),
    "truncated prompt": ({"parts": [GOOD_PART], "truncate_prompt_tokens": 5}, "would cut images"),
    "beams": (
        {"parts": [GOOD_PART], "use_beam_search": True, "n": 2, "temperature": 0},
        "runs on text only",
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_hostile_requests(served, error, name):
    server, processor = served
    fields, words = REQUESTS[name]
    fields = dict(fields)
    check_refused(server, processor, error, ask(server, *fields.pop("parts"), **fields), words)


def test_valid_images_of_each_source(served, web, files):
    """The controls of the cases above: every source and limit lets a good image pass."""
    server, processor = served
    urls = [
        data_url(GOOD),
        data_url(GOOD).replace("+", "%2B").replace("base64,", "base64,\n"),
        f"DATA:IMAGE/PNG;charset=utf-8;BASE64,{BASE64}",
        f"http://127.0.0.1:{web.server_port}/a.png",
        f"http://PICTURES.example.:{web.server_port}/to?/b.png?c=d",
        (files / "good.png").as_uri(),
        data_url(png(256, 256)),
    ]
    for url in urls:
        reply = ask(server, part(url))
        assert reply.status_code == 200, reply.text
    assert [image.size for image in processor.images] == [(24, 16)] * 6 + [(256, 256)]
    assert reply.json()["usage"]["prompt_tokens"] == len(server.client.requests[-1][1])
    assert web.paths[-1] == "/b.png?c=d"
