"""VideoProcessor: chooses, scales and cuts frames exactly as transformers' processors of Qwen do.

transformers' video processors need torchvision but compute with torch alone, so they are not used.

Suffixes of array names: G groups of frames, P patches of a group, V values of a patch.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from formats.errors import CheckpointError, InputError
from qserve.multimodal.image_processors.scaling import scaled
from qserve.multimodal.image_processors.stated_options import stated_options
from qserve.multimodal.video import SUBJECT, Video

# (file that may have the options, key of the options in it; "": the whole file); the first one
# found counts
FILES = (
    ("processor_config.json", "video_processor"),
    ("video_preprocessor_config.json", ""),
    ("preprocessor_config.json", ""),
)
UNKNOWN_FPS = 24.0  # assumed for a video that does not state it, as in transformers
DEFAULT_FPS = 2.0  # number of frames chosen per second, where the options do not state it
MAX_RATIO = 200  # limit for the ratio of the longer to the shorter side
COMMON: dict[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "resample": 3,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "fps": None,
    "num_frames": None,
    "min_frames": 4,
    "max_frames": 768,
    "cap_pixels_per_frame": None,
}
# keys of `size`; despite their names they are the least and the most pixels
EDGES = ("shortest_edge", "longest_edge")


class VideoLimits(NamedTuple):
    """Limits in addition to the model's own. None: no limit."""

    max_frames: int | None = None  # number of chosen frames
    max_pixels: int | None = None  # pixels of all chosen frames together, after scaling


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """The chosen frames of one video, as inputs of the encoder."""

    seconds: tuple[float, ...]  # mean time of each group
    seconds_per_group: float
    patches_GPV: np.ndarray  # uint8
    grid: tuple[int, int, int]  # numbers of groups, and of rows and columns of patches


class VideoProcessor:
    """The video processor of one model."""

    def __init__(self, folder: str | Path, kind: str) -> None:
        """Read the options in a model's folder. Raises InputError.

        `kind`: key of KINDS.
        """
        self._kind = KINDS[kind]
        stated = stated_options(Path(folder), FILES) or {}
        self.options = {**COMMON, **self._kind.defaults, **stated}
        size = dict(self.options["size"])
        if self._kind.has_pixel_keys:
            for key, edge in zip(("min_pixels", "max_pixels"), EDGES, strict=True):
                # Older files have these keys inside of `size`.
                stated = self.options.get(key) or size.get(key)
                if stated is not None:
                    size[edge] = stated
        self.options["size"] = size
        if not all(type(size.get(edge)) is int and size[edge] > 0 for edge in EDGES):
            raise CheckpointError(
                f"{folder} size of videos",
                f"expected {' and '.join(EDGES)} in pixels, found {size!r:.200}",
                "copy video_preprocessor_config.json from the original model",
            )

    @property
    def text(self) -> str:
        """All options as JSON text."""
        return json.dumps(self.options, sort_keys=True, default=str)

    def prepare(self, video: Video, limits: VideoLimits = VideoLimits()) -> Clip:  # noqa: B008
        """Choose frames of a video, scale them, and cut them into patches. Raises InputError."""
        group, patch = self.options["temporal_patch_size"], self.options["patch_size"]
        indices = self.sample(video, limits.max_frames)
        height, width = self.size(len(indices), video.height, video.width, limits.max_pixels)
        fps = video.fps or UNKNOWN_FPS
        sampled_fps = len(indices) / video.num_frames * fps if self._samples(video) else fps
        rows, columns = height // patch, width // patch
        num_groups = -(-len(indices) // group)
        patches_GPV = np.empty((num_groups, rows * columns, 3 * group * patch**2), np.uint8)
        resample = self.options["resample"]
        frames = (scaled(frame, height, width, resample) for frame in video.read(indices))
        for number, chosen in enumerate(_groups(frames, group)):
            patches_GPV[number] = _patches(chosen, patch, self.options["merge_size"])
        times = [index / fps for index in indices]
        times += [times[-1]] * (num_groups * group - len(times))
        return Clip(
            seconds=tuple(
                (first + last) / 2
                for first, last in zip(times[::group], times[group - 1 :: group], strict=True)
            ),
            seconds_per_group=group / sampled_fps,
            patches_GPV=patches_GPV,
            grid=(num_groups, rows, columns),
        )

    def sample(self, video: Video, most: int | None = None) -> list[int]:
        """Return the indices of the frames that the model sees, at most `most`."""
        if not self._samples(video):
            return list(range(video.num_frames))
        total, options = video.num_frames, self.options
        highest = options["max_frames"] if most is None else min(most, options["max_frames"])
        if options["num_frames"] is not None:
            count = options["num_frames"]
        else:
            count = total / (video.fps or UNKNOWN_FPS) * (options["fps"] or DEFAULT_FPS)
        return self._kind.sample(total, count, options["min_frames"], highest, options)

    def size(
        self, num_frames: int, height: int, width: int, most: int | None = None
    ) -> tuple[int, int]:
        """Return the height and width to which frames are scaled. Raises InputError.

        `most`: limit for the pixels of all frames together.
        """
        unit = self.options["patch_size"] * self.options["merge_size"]
        if self.options["do_resize"]:
            height, width = self._kind.size(num_frames, (height, width), unit, self.options, most)
        if height % unit or width % unit:
            raise InputError(
                SUBJECT,
                f"expected sides that are multiples of {unit}, found {width} x {height}",
                "scale the frames",
            )
        return height, width

    def _samples(self, video: Video) -> bool:
        stated = video.do_sample_frames
        return bool(self.options["do_sample_frames"] if stated is None else stated)


def _groups(frames: Iterator[np.ndarray], length: int) -> Iterator[np.ndarray]:
    """Yield stacks of `length` frames. The last one is filled up with copies of the last frame."""
    chosen: list[np.ndarray] = []
    for frame in frames:
        chosen.append(frame)
        if len(chosen) == length:
            yield np.stack(chosen)
            chosen = []
    if chosen:
        yield np.stack(chosen + [chosen[-1]] * (length - len(chosen)))


def _patches(frames: np.ndarray, patch: int, merge: int) -> np.ndarray:
    """Cut frames [group, height, width, 3] into patches [P, V].

    The patches of one embedding are next to each other.
    """
    group, height, width, _ = frames.shape
    rows, columns = height // (patch * merge), width // (patch * merge)
    cut = frames.reshape(group, rows, merge, patch, columns, merge, patch, 3)
    cut = cut.transpose(1, 4, 2, 5, 7, 0, 3, 6)
    return cut.reshape(-1, 3 * group * patch**2)


def _sample_evenly(
    total: int, count: float, low: int, high: int, options: Mapping[str, Any]
) -> list[int]:
    """Choose frames at equal distances, from the first one to the last one (Qwen3-VL)."""
    chosen = min(max(int(count), low), high, total)
    return np.linspace(0, total - 1, chosen).round().astype(int).tolist()


def _sample_groups(
    total: int, count: float, low: int, high: int, options: Mapping[str, Any]
) -> list[int]:
    """Choose frames at equal distances from the first one on, in whole groups (Qwen2.5-VL)."""
    group = options["temporal_patch_size"]
    chosen = math.floor(min(max(count, low), high // group * group, total) / group) * group
    if chosen < group:
        return list(range(min(total, high)))
    return np.arange(0, total, total / chosen)[:chosen].astype(int).tolist()


Sides = tuple[int, int]


def _size_of_all(
    num_frames: int, sides: Sides, unit: int, options: Mapping[str, Any], most: int | None
) -> Sides:
    """Return the scaled sides, where `size` limits the pixels of all frames together (Qwen3-VL)."""
    low, high = (options["size"][edge] for edge in EDGES)
    group = options["temporal_patch_size"]
    times = max(num_frames, group)
    if options["cap_pixels_per_frame"]:
        cap = min(options["max_video_tokens"] * unit**2, high // times)
        high = max(cap, int(low * 1.05)) * times
    if most is not None:
        high = min(high, most)
    if min(sides) < unit and max(sides) <= MAX_RATIO * min(sides):
        scale = max(unit / side for side in sides)
        sides = int(sides[0] * scale), int(sides[1] * scale)
    return _fitted(sides, unit, min(low, high), high, times, round(times / group) * group)


def _size_of_each(
    num_frames: int, sides: Sides, unit: int, options: Mapping[str, Any], most: int | None
) -> Sides:
    """Return the scaled sides, where `size` limits the pixels of each frame (Qwen2.5-VL)."""
    low, high = (options["size"][edge] for edge in EDGES)
    if options["cap_pixels_per_frame"]:
        total = int(options["max_video_tokens"] * unit**2 * 0.9)
        share = total * options["temporal_patch_size"] // num_frames
        high = max(min(high, share), int(low * 1.05))
    if most is not None:
        high = min(high, max(1, most // num_frames))
    return _fitted(sides, unit, min(low, high), high, 1, 1)


def _fitted(sides: Sides, unit: int, low: int, high: int, times: int, counted: int) -> Sides:
    """Scale sides to multiples of `unit`, with an area from `low` to `high`. Raises InputError.

    The area is multiplied by a number of frames: by `counted` where it is compared with the limits,
    by `times` where the scale is computed.
    """
    if max(sides) > MAX_RATIO * min(sides):
        raise InputError(
            SUBJECT,
            f"expected sides of at most {MAX_RATIO}:1, found {sides[1]} x {sides[0]}",
            "crop the frames",
        )
    rounded = [round(side / unit) * unit for side in sides]
    area, whole = counted * math.prod(rounded), times * math.prod(sides)
    if area > high:
        shrink = math.sqrt(whole / high)
        rounded = [max(unit, math.floor(side / shrink / unit) * unit) for side in sides]
    elif area < low:
        grow = math.sqrt(low / whole)
        rounded = [math.ceil(side * grow / unit) * unit for side in sides]
    return rounded[0], rounded[1]


# number of frames, requested number, least number, greatest number, options -> indices
Sample = Callable[[int, float, int, int, Mapping[str, Any]], list[int]]
# number of frames, (height, width), unit, options, most pixels of all frames -> (height, width)
Size = Callable[[int, Sides, int, Mapping[str, Any], int | None], Sides]


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoKind:
    """Describes one video processor of transformers."""

    defaults: Mapping[str, Any]
    sample: Sample
    size: Size
    has_pixel_keys: bool = False  # True: the options may have min_pixels and max_pixels


KINDS: dict[str, VideoKind] = {
    "qwen2": VideoKind(
        defaults={
            "size": {"shortest_edge": 128 * 28**2, "longest_edge": 768 * 28**2},
            "patch_size": 14,
            "do_sample_frames": False,
            "max_video_tokens": 128000,
            "image_mean": (0.48145466, 0.4578275, 0.40821073),
            "image_std": (0.26862954, 0.26130258, 0.27577711),
        },
        sample=_sample_groups,
        size=_size_of_each,
        has_pixel_keys=True,
    ),
    "qwen3": VideoKind(
        defaults={
            "size": {"shortest_edge": 128 * 32**2, "longest_edge": 768 * 32**2},
            "patch_size": 16,
            "do_sample_frames": True,
            "fps": 2,
            "max_video_tokens": 768,
            "image_mean": (0.5, 0.5, 0.5),
            "image_std": (0.5, 0.5, 0.5),
        },
        sample=_sample_evenly,
        size=_size_of_all,
    ),
}
