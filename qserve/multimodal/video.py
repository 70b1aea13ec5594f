"""Video: frames that are read when they are needed. Here it is made from frames in memory.

Loads no torch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from formats.errors import InputError
from qserve.multimodal.media import digest_of

SUBJECT = "video"
OPTIONS = ("fps", "do_sample_frames")
FORMS = "a list of PIL images or an array [frames, height, width, 3] of bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Video:
    """The frames of a video, all of one size."""

    num_frames: int
    fps: float | None  # frames per second; None: unknown
    height: int
    width: int
    digest: str  # SHA-256 of the content, as hex digits
    # True: the model sees some of the frames; False: all; None: the model's video processor decides
    do_sample_frames: bool | None = None
    # indices in ascending order -> frames, uint8 [height, width, 3]
    read: Callable[[Sequence[int]], Iterator[np.ndarray]]


def video_of_frames(stated: Any) -> Video:
    """Make a video from frames, or from a pair of frames and options. Raises InputError."""
    options: Mapping[str, Any] = {}
    if isinstance(stated, tuple) and len(stated) == 2 and isinstance(stated[1], Mapping):
        stated, options = stated
    unknown = sorted(map(str, set(options) - set(OPTIONS)))
    if unknown:
        raise InputError(
            SUBJECT,
            f"expected {' and '.join(OPTIONS)}, found {', '.join(unknown)}",
            "leave the others out",
        )
    fps = options.get("fps")
    if fps is not None and (not isinstance(fps, int | float) or not 0 < fps < float("inf")):
        raise InputError(
            f"{SUBJECT} fps",
            f"expected a number above 0, found {fps!r:.100}",
            "leave it out if it is unknown",
        )
    frames = _frames(stated)
    height, width = frames[0].shape[:2]
    views = (memoryview(np.ascontiguousarray(frame)).cast("B") for frame in frames)
    return Video(
        num_frames=len(frames),
        fps=None if fps is None else float(fps),
        height=height,
        width=width,
        digest=digest_of("frames", repr((height, width, sorted(options.items()))), *views),
        do_sample_frames=options.get("do_sample_frames"),
        read=lambda indices: (frames[index] for index in indices),
    )


def _frames(stated: Any) -> Sequence[np.ndarray]:
    """Convert frames to uint8 arrays of one shape. Raises InputError."""
    frames: Any
    if isinstance(stated, list | tuple):
        is_image = [all(hasattr(each, name) for name in ("size", "convert")) for each in stated]
        frames = [
            np.asarray(each.convert("RGB") if is_one else each)
            for each, is_one in zip(stated, is_image, strict=True)
        ]
    else:
        frames = stated.numpy() if hasattr(stated, "numpy") else stated
        frames = frames if isinstance(frames, np.ndarray) and frames.ndim else ()
    is_array = all(isinstance(each, np.ndarray) for each in frames)
    found = {(str(each.dtype), each.shape) for each in frames} if is_array else set()
    if len(found) > 1:
        shapes = ", ".join(sorted(str(list(shape)) for _, shape in found))
        raise InputError(
            SUBJECT,
            f"expected frames of one size, found {shapes:.200}",
            "scale the frames to one size",
        )
    dtype, shape = next(iter(found), ("", ()))
    if dtype != "uint8" or len(shape) != 3 or shape[2] != 3 or not shape[0] * shape[1]:
        what = f"{dtype} {[len(frames), *shape]}" if found else type(stated).__name__
        raise InputError(
            SUBJECT, f"expected {FORMS}, found {what}", "convert the frames to RGB arrays of uint8"
        )
    return frames
