"""Video files for tests: with PyAV, and animations with Pillow."""

import io
from typing import Any

import numpy as np
from PIL import Image

# Identity, and a turn by 90 degrees clockwise, in an MP4 file's matrices.
UPRIGHT = b"".join(n.to_bytes(4, "big") for n in (2**16, 0, 0, 0, 2**16, 0, 0, 0, 2**30))
TURNED = b"".join(
    (n % 2**32).to_bytes(4, "big") for n in (0, 2**16, 0, -(2**16), 0, 0, 0, 0, 2**30)
)


def ramp(num_frames: int, width: int = 64, height: int = 48) -> np.ndarray:
    """Frames of one colour each, which encodes their number: 8 * number in red."""
    frames = np.full((num_frames, height, width, 3), 100, np.uint8)
    frames[..., 0] = np.arange(num_frames, dtype=np.uint8)[:, None, None] * 8
    return frames


def video_file(frames: np.ndarray, kind: str = "mp4", codec: str = "mpeg4", fps: int = 10) -> bytes:
    """Encode frames. Skips a test without PyAV."""
    import pytest

    av: Any = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=fps)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = {"mjpeg": "yuvj420p", "ffv1": "bgr0"}.get(codec, "yuv420p")
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def animation(frames: np.ndarray, kind: str = "GIF", milliseconds: int = 100) -> bytes:
    """Encode frames without loss."""
    images = [Image.fromarray(frame) for frame in frames]
    file = io.BytesIO()
    options = {"lossless": True} if kind == "WEBP" else {}
    images[0].save(
        file,
        kind,
        save_all=True,
        append_images=images[1:],
        duration=milliseconds,
        loop=0,
        **options,
    )
    return file.getvalue()
