"""Decoding of a video file: with PyAV, or with Pillow for an animated GIF or WebP.

Before anything is decoded, the file's first bytes choose one demuxer. Only a short list of decoders
is allowed: a video library has hundreds, and some of them open other files. The number of frames,
their pixels and the decoding time are limited. Errors never quote the messages of PyAV or Pillow.
"""

import contextlib
import io
import math
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from formats.errors import InputError
from qserve.multimodal.decode import INSTALL as INSTALL_PILLOW
from qserve.multimodal.decode import as_shown, check_size
from qserve.multimodal.media import digest_of
from qserve.multimodal.video import SUBJECT, Video

if TYPE_CHECKING:
    import av
    import av.container

FORMATS = "MP4, MOV, WebM, MKV, AVI, GIF, WebP"
INSTALL = "install the extra: pip install 'qserve-kit[video]'"
# demuxer -> (offset, bytes of which its files have one there)
DEMUXERS = {
    "mov": (4, (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")),
    "matroska": (0, (b"\x1aE\xdf\xa3",)),
    "avi": (8, (b"AVI ",)),
}
ANIMATIONS = {"GIF": (0, (b"GIF87a", b"GIF89a")), "WEBP": (8, (b"WEBP",))}
DECODERS = "h264,hevc,vp8,vp9,libvpx,libvpx-vp9,libdav1d,av1,mpeg4,mjpeg"
HIDES_FRAMES = ("vp8", "libvpx")  # decoders with packets whose frame is not shown
MAX_FILE_FRAMES = 2**17  # more than an hour at 30 frames a second
GIF_SECONDS = 0.1  # duration of a frame that states none, as in browsers
NUM_THREADS = 4
# Up to this number of pixels of a frame an error reports its size; a file with larger frames is
# reported as broken.
OPENED_PIXELS = 2**26


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLimits:
    max_pixels: int  # limit of one frame
    seconds: float  # time for decoding all frames of a video
    max_frames: int = MAX_FILE_FRAMES


def decode_video(data: bytes, limits: DecodeLimits) -> Video:
    """Open a video file; its frames are decoded when they are read. Raises InputError.

    The time limit covers both this call and the later reading of frames.
    """
    clock = _Clock(limits.seconds)
    digest = digest_of("file", data)
    animation, demuxer = _kind_of(data, ANIMATIONS), _kind_of(data, DEMUXERS)
    if animation is not None:
        with _errors(), clock.running():
            return _animation(data, animation, digest, limits, clock)
    if demuxer is None:
        raise InputError(SUBJECT, f"expected one of {FORMATS}", "convert it")
    file = _File(data, demuxer, limits, clock)
    with _errors(), clock.running():
        return file.video(digest)


def _kind_of(data: bytes, known: dict[str, tuple[int, tuple[bytes, ...]]]) -> str | None:
    for name, (offset, marks) in known.items():
        if any(data[offset : offset + len(mark)] == mark for mark in marks):
            return name
    return None


class _Clock:
    """The time that is left for decoding one video. It runs only inside of `running`."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._left, self._ends = seconds, seconds, 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._ends = time.monotonic() + self._left
        try:
            yield
        finally:
            self._left = self._ends - time.monotonic()

    def check(self) -> None:
        """Raise InputError when no time is left."""
        if time.monotonic() > self._ends:
            raise InputError(
                SUBJECT, f"takes more than {self.seconds:g} s to decode", "send a shorter video"
            )


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Turn every error of PyAV or Pillow into an InputError that does not quote it."""
    try:
        yield
    except InputError:
        raise
    except MemoryError:
        raise InputError(SUBJECT, "needs too much memory", "send a smaller video") from None
    except Exception:  # for a broken file a decoder may raise an exception of any kind
        raise InputError(
            SUBJECT,
            "is broken, truncated, too large or of an unknown codec",
            f"send a whole {FORMATS} file",
        ) from None


def _check_count(count: int, limits: DecodeLimits) -> None:
    if count > limits.max_frames:
        raise InputError(
            SUBJECT, f"has more than {limits.max_frames} frames", "send a shorter video"
        )
    if count < 1:
        raise InputError(SUBJECT, "has no frames", "send another video, or its frames as images")


def _animation(data: bytes, kind: str, digest: str, limits: DecodeLimits, clock: _Clock) -> Video:
    """Open an animated GIF or WebP as a video."""
    try:
        import PIL.Image
    except ImportError as error:
        raise InputError("animated images", "need Pillow", INSTALL_PILLOW) from error

    def opened() -> Any:
        image = PIL.Image.open(io.BytesIO(data), formats=(kind,))
        check_size(image, limits.max_pixels)
        return image

    def frames_of(image: Any) -> Iterator[Any]:
        # image.n_frames is not used: it reads a whole GIF file, however many frames it has.
        for number in range(limits.max_frames + 1):
            clock.check()
            try:
                image.seek(number)
            except EOFError:
                return
            check_size(image, limits.max_pixels)
            image.load()
            yield image

    def read(indices: Sequence[int]) -> Iterator[np.ndarray]:
        with _errors(), clock.running(), _quiet(), opened() as image:
            wanted = iter(indices)
            index = next(wanted, None)
            for number, frame in enumerate(frames_of(image)):
                while number == index:
                    yield np.asarray(as_shown(frame.copy()))
                    index = next(wanted, None)
                if index is None:
                    return

    with _quiet(), opened() as image:
        seconds = [
            frame.info.get("duration", 0) / 1000 or GIF_SECONDS for frame in frames_of(image)
        ]
        _check_count(len(seconds), limits)
        return Video(
            num_frames=len(seconds),
            fps=len(seconds) / sum(seconds),
            height=image.height,
            width=image.width,
            digest=digest,
            do_sample_frames=True,
            read=read,
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # Pillow would warn on stderr about its own pixel limit and about broken metadata.
        warnings.simplefilter("ignore")
        yield


class _File:
    """A video file in memory."""

    def __init__(self, data: bytes, demuxer: str, limits: DecodeLimits, clock: _Clock) -> None:
        try:
            import av
            import av.stream
        except ImportError as error:
            raise InputError(
                "video files, except animated GIF and WebP,", "need PyAV", INSTALL
            ) from error
        self._av: Any = av
        self._data, self._demuxer, self._limits, self._clock = data, demuxer, limits, clock
        # Opening decodes some frames: without this limit the decoder would allocate any size.
        self._options = {"max_pixels": str(max(limits.max_pixels, OPENED_PIXELS))}
        self._height = self._width = 0

    def video(self, digest: str) -> Video:
        """Return the video, after counting its frames and decoding the first one."""
        with self._opened() as container:
            stream = self._stream(container)
            rate = stream.average_rate or stream.guessed_rate
            count = self._count(container, stream)
        _check_count(count, self._limits)
        fps = float(rate) if rate else 0.0
        first = next(self._decoded([0]), None)
        if first is None:
            raise InputError(
                SUBJECT, "has no frames", "send another video, or its frames as images"
            )
        self._height, self._width = first.shape[:2]
        return Video(
            num_frames=count,
            fps=fps if 0 < fps < math.inf else None,
            height=self._height,
            width=self._width,
            digest=digest,
            do_sample_frames=True,
            read=self._read,
        )

    def _opened(self) -> "av.container.InputContainer":
        return self._av.open(
            io.BytesIO(self._data),
            format=self._demuxer,
            options=self._options,
            container_options={"codec_whitelist": DECODERS, "protocol_whitelist": "none"},
        )

    def _stream(self, container: Any) -> Any:
        """Return the first video stream, with the options for decoding set."""
        cover = self._av.stream.Disposition.attached_pic  # a cover picture is no video
        found = [each for each in container.streams.video if cover not in each.disposition]
        if not found:
            raise InputError(SUBJECT, "has no frames", "send a file with a video stream")
        context = found[0].codec_context
        if context.name not in DECODERS.split(","):
            raise InputError(SUBJECT, f"has an unknown codec; known are {DECODERS}", "convert it")
        self._check_pixels(context.width, context.height)
        # A decoder's limit counts the margins of a frame too, so it is higher than ours.
        context.options = {"max_pixels": str(2 * self._limits.max_pixels + 2**16)}
        context.thread_type, context.thread_count = "AUTO", NUM_THREADS
        return found[0]

    def _check_pixels(self, width: int, height: int) -> None:
        most = self._limits.max_pixels
        if width * height > most:
            raise InputError(
                SUBJECT,
                f"has frames of more than {most} pixels: {width} x {height}",
                "scale the video down",
            )

    def _count(self, container: Any, stream: Any) -> int:
        """Return the number of frames, without decoding them for most codecs."""
        count = 0
        is_decoded = stream.codec_context.name in HIDES_FRAMES
        for packet in container.demux(stream):
            self._clock.check()
            count += len(packet.decode()) if is_decoded else packet.size > 0
            if count > self._limits.max_frames:
                break
        return count

    def _read(self, indices: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield the frames of some indices.

        In a truncated file the last frame found replaces the missing ones.
        """
        frame, number = None, 0
        with _errors(), self._clock.running():
            for frame in self._decoded(indices):
                number += 1
                yield frame
            if frame is None:
                raise InputError(
                    SUBJECT, "has no frames", "send another video, or its frames as images"
                )
            for _ in range(len(indices) - number):
                yield frame

    def _decoded(self, indices: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield the frames of some indices, as far as the file has them."""
        wanted = iter(indices)
        index = next(wanted, None)
        with self._opened() as container:
            for number, frame in enumerate(container.decode(self._stream(container))):
                self._clock.check()
                if number != index:
                    continue
                pixels = self._pixels(frame)
                while number == index:
                    yield pixels
                    index = next(wanted, None)
                if index is None:
                    return

    def _pixels(self, frame: Any) -> np.ndarray:
        """Return a frame upright, scaled to the size of the first one."""
        self._check_pixels(frame.width, frame.height)
        quarters = round(frame.rotation / 90) % 4
        width, height = self._width or 0, self._height or 0
        if quarters % 2:
            width, height = height, width
        size = {"width": width, "height": height} if width else {}
        pixels = frame.reformat(format="rgb24", **size).to_ndarray()
        return np.ascontiguousarray(np.rot90(pixels, quarters))
