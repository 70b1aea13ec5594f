"""Hostile videos: each is refused with one line, within the limits, from any source."""

import io
import struct

import numpy as np
import pytest
from PIL import Image

from qserve.config import ServerConfig
from qserve.multimodal.reader import MediaReader
from qserve.multimodal.settings import MediaLimits
from qserve.multimodal.video_processor import VideoLimits
from qserve.server.prepare.media import MediaAccess
from qserve.text.tokenizer import Tokenizer
from tests.qserve.multimodal.video_files import animation, ramp, video_file
from tests.qserve.server.pictures import data_url, gif, image_file, png, webp
from tests.tiny_vision import write_tiny_tokenizer

BYTES, PIXELS = 2**18, 2**14
HLS = b"#EXTM3U\n#EXTINF:9,\nhttp://169.254.169.254/latest/meta-data\n#EXT-X-ENDLIST\n"
CONCAT = b"ffconcat version 1.0\nfile /etc/passwd\n"
SDP = b"v=0\no=- 0 0 IN IP4 10.0.0.7\ns=x\nm=video 5004 RTP/AVP 96\n"
UNKNOWN, BROKEN = "expected one of MP4, MOV, WebM", "is broken, truncated"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("with_videos")
    write_tiny_tokenizer(folder, ["<image>", "<|video_pad|>"], "<image>")
    return Tokenizer(folder)


class Reading:
    """A processor that reads all frames and is not asked for the rest."""

    def __init__(self) -> None:
        self.videos = []

    def prepare(self, ids, images, digests, videos):
        for video in videos:
            assert sum(1 for _ in video.read(range(video.num_frames))) == video.num_frames
        self.videos += videos
        return ids, ()


@pytest.fixture
def served(make_server, tokenizer, monkeypatch):
    limits = MediaLimits(max_pixels=PIXELS, max_video_bytes=BYTES, max_videos=1, video_seconds=20)
    processor = Reading()
    monkeypatch.setattr(MediaReader, "load", lambda reader: processor)
    config = ServerConfig(served_model_name=["tiny"], max_body_bytes=2**22)
    server = make_server(config, media=MediaAccess(limits, kinds=("image", "video")))
    server.client.vocab_size = 2**14
    return server, processor


def part(url) -> dict:
    return {"type": "video_url", "video_url": {"url": url}}


def ask(server, *parts, role="user", **fields):
    content = [{"type": "text", "text": "What is it?"}, *parts]
    return server.chat(messages=[{"role": role, "content": content}], **fields)


def check_refused(server, processor, error, reply, words):
    message = error(reply, 400)["message"]
    assert words in message
    assert "\n" not in message and len(message) < 400
    for leaked in ("PIL", "0x", "Traceback", "Errno", "/usr", "av.", "BytesIO", "169.254"):
        assert leaked not in message
    assert not server.client.requests and not processor.videos


def box(kind: bytes, *content: bytes) -> bytes:
    body = b"".join(content)
    return struct.pack(">I", 8 + len(body)) + kind + body


def jpegs(*sizes: tuple[int, int]) -> bytes:
    """A file that states 64 x 48 pixels, whose frames have other sizes."""
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        stream = container.add_stream("mjpeg", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuvj420p"
        container.start_encoding()
        for number, size in enumerate(sizes):
            image = io.BytesIO()
            Image.new("RGB", size, 9).save(image, "JPEG")
            packet = av.Packet(image.getvalue())
            packet.stream, packet.pts, packet.dts = stream, number * 100, number * 100
            packet.time_base = stream.time_base
            container.mux(packet)
    return file.getvalue()


def sound() -> bytes:
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def damaged() -> bytes:
    data = bytearray(video_file(ramp(30), "matroska", "libx264"))
    data[700:-300] = bytes(each ^ 0x5A for each in data[700:-300])
    return bytes(data)


WITHOUT_LIBRARY = {
    "no bytes": (b"", "is empty"),
    "random bytes": (bytes(range(256)), UNKNOWN),
    "HLS playlist, which fetches": (HLS, UNKNOWN),
    "list of files, which opens them": (CONCAT, UNKNOWN),
    "session description, which listens": (SDP, UNKNOWN),
    "page": (b"<html><body>hello</body></html>", UNKNOWN),
    "SVG": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', UNKNOWN),
    "PNG": (image_file(), UNKNOWN),
    "JPEG": (image_file("JPEG"), UNKNOWN),
    "PNG that states 2^62 pixels": (png(2**31 - 1, 2**31 - 1, pixels=b""), UNKNOWN),
    "MPEG transport stream": (b"G\x40\0\x10" * 200, UNKNOWN),
    "GIF that states 4 gigapixels": (gif(65535, 65535), BROKEN),
    "WebP that states 268 megapixels": (webp(16383, 16383), "video"),
    "GIF of more pixels than allowed": (animation(ramp(2, 129, 128)), "has more than 16384 pixels"),
    "GIF cut in its frames": (animation(ramp(9))[:-60], BROKEN),
    "WebP cut in its frames": (animation(ramp(9), "WEBP")[:-60], BROKEN),
    "head of a GIF alone": (animation(ramp(9))[:20], BROKEN),
    "more bytes than allowed": (animation(ramp(2)) + bytes(BYTES), f"more than {BYTES} bytes"),
}
WITH_LIBRARY = {
    "head of an MP4 alone": (lambda: box(b"ftyp", b"isom", bytes(4)), BROKEN),
    "MP4 of zeros": (lambda: box(b"ftyp", b"isom", bytes(4)) + bytes(9999), BROKEN),
    "MP4 whose box has 4 GB": (lambda: b"\xff\xff\xff\xffmoov" + bytes(99), "has no frames"),
    "MP4 of nested boxes": (
        lambda: b"".join(struct.pack(">I", 8 * n) + b"moov" for n in range(4000, 0, -1)),
        BROKEN,
    ),
    "MP4 cut before its index": (lambda: video_file(ramp(9))[:700], "has no frames"),
    "Matroska of zeros": (lambda: b"\x1aE\xdf\xa3" + bytes(999), BROKEN),
    "Matroska of an endless element": (lambda: b"\x1aE\xdf\xa3\x01" + b"\xff" * 99, BROKEN),
    "AVI of zeros": (lambda: b"RIFF\xff\xff\xff\xffAVI " + bytes(999), BROKEN),
    "HLS playlist behind the head of an MP4": (
        lambda: box(b"ftyp", b"isom", bytes(4)) + HLS * 9,
        BROKEN,
    ),
    "sound alone": (sound, "has no frames"),
    "decoder that is not listed": (lambda: video_file(ramp(3), "matroska", "ffv1"), "video"),
    "frames of more pixels than allowed": (
        lambda: video_file(ramp(3, 144, 128)),
        "has frames of more than 16384 pixels: 144 x 128",
    ),
    "frames larger than stated": (lambda: jpegs((64, 48), (64, 48), (4000, 4000)), "video"),
    "damaged frames": (damaged, BROKEN),
}
FILES = {name: (lambda data=data: data, words) for name, (data, words) in WITHOUT_LIBRARY.items()}


@pytest.mark.parametrize("name", [*FILES, *WITH_LIBRARY])
def test_hostile_files(served, error, name):
    server, processor = served
    if name in WITH_LIBRARY:
        pytest.importorskip("av")
    make, words = {**FILES, **WITH_LIBRARY}[name]
    reply = ask(server, part(data_url(make(), "video/mp4")))
    check_refused(server, processor, error, reply, words)


GOOD = data_url(animation(ramp(4)), "video/mp4")
REQUESTS = {
    "no URL": ([part("")], {}, "with a URL in video_url"),
    "number": ([part(5)], {}, "with a URL in video_url"),
    "type of an image": ([part(GOOD.replace("video/mp4", "image/png"))], {}, "type of a video"),
    "type of a page": ([part(GOOD.replace("video/mp4", "text/html"))], {}, "type of a video"),
    "host that is not allowed": ([part("http://evil.example/a.mp4")], {}, "fetches no media"),
    "local file": ([part("file:///etc/passwd")], {}, "reads no local files"),
    "more than allowed": ([part(GOOD)] * 2, {}, "expected at most 1 videos, found 2"),
    "of the system": ([part(GOOD)], {"role": "system"}, "videos in messages of role user or tool"),
    "truncated prompt": ([part(GOOD)], {"truncate_prompt_tokens": 5}, "would cut images and"),
    "video as an image": (
        [{"type": "image_url", "image_url": {"url": GOOD}}],
        {},
        "expected the media type of an image",
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_hostile_requests(served, error, name):
    server, processor = served
    parts, fields, words = REQUESTS[name]
    check_refused(server, processor, error, ask(server, *parts, **fields), words)


def test_slow_video_is_refused_in_time(served, error, monkeypatch):
    server, processor = served
    now = iter(range(0, 10**6, 5))
    monkeypatch.setattr("qserve.multimodal.decode_video.time.monotonic", lambda: next(now))
    reply = ask(server, part(data_url(animation(ramp(20)), "image/gif")))
    check_refused(server, processor, error, reply, "takes more than 20 s to decode")


def test_valid_videos(served):
    """The controls of the cases above."""
    server, processor = served
    for kind in ("video/mp4", "image/gif", "application/octet-stream"):
        url = data_url(animation(ramp(4, 128, 128)), kind)
        for given in (part(url), {"type": "video_url", "video_url": url}):
            assert ask(server, given).status_code == 200
    assert ask(server, {"type": "video", "video": url}).status_code == 200
    assert [video.num_frames for video in processor.videos] == [4] * 7


def test_valid_video_files(served):
    server, processor = served
    assert ask(server, part(data_url(video_file(ramp(30)), "video/mp4"))).status_code == 200
    assert ask(server, part(data_url(jpegs((64, 48), (90, 90)), "video/x-matroska"))).is_success
    assert [(each.num_frames, each.width) for each in processor.videos] == [(30, 64), (2, 64)]


def test_limits_of_the_server_reach_the_processor(tokenizer, monkeypatch):
    made = []
    monkeypatch.setattr(
        "qserve.multimodal.processor.MediaProcessor", lambda *arguments: made.append(arguments)
    )
    config = ServerConfig(max_video_frames=5, max_video_pixels=999)
    reader = MediaAccess(config.media_limits, kinds=("image", "video")).reader(tokenizer)
    reader.load()
    assert made == [(tokenizer.folder, tokenizer.encode, VideoLimits(5, 999))]
    assert reader.kinds == ("image", "video")
