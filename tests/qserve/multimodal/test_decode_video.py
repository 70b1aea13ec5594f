"""Video files are decoded frame by frame, upright, within limits."""

import sys

import numpy as np
import pytest

from formats.errors import InputError
from qserve.multimodal.decode_video import DecodeLimits, decode_video
from tests.qserve.multimodal.video_files import TURNED, UPRIGHT, animation, ramp, video_file

LIMITS = DecodeLimits(max_pixels=10**5, seconds=60.0)
INDICES = [0, 7, 7, 21, 29]
FILES = [
    ("mp4", "mpeg4"),
    ("mp4", "libx264"),
    ("mov", "mjpeg"),
    ("matroska", "libx264"),
    ("webm", "libvpx"),
    ("webm", "libvpx-vp9"),
    ("avi", "mpeg4"),
]


def reds(video, indices) -> list[int]:
    frames = list(video.read(indices))
    assert all(frame.shape == (video.height, video.width, 3) for frame in frames)
    return [int(frame[..., 0].mean()) for frame in frames]


@pytest.mark.parametrize(("kind", "codec"), FILES)
def test_frames_of_files(kind, codec):
    video = decode_video(video_file(ramp(30), kind, codec), LIMITS)
    assert (video.num_frames, video.height, video.width) == (30, 48, 64)
    assert video.fps == pytest.approx(10) and video.do_sample_frames
    assert reds(video, INDICES) == pytest.approx([8 * index for index in INDICES], abs=8.1)
    assert reds(video, [29]) == pytest.approx([232], abs=8.1), "it can be read again"


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
def test_frames_of_animations(kind):
    frames = ramp(9)
    frames[:, :24] = 255 - frames[:, :24]
    video = decode_video(animation(frames, kind, 250), LIMITS)
    assert (video.num_frames, video.height, video.width, video.fps) == (9, 48, 64, 4.0)
    assert np.array_equal(np.stack(list(video.read([0, 3, 8, 8]))), frames[[0, 3, 8, 8]])


def test_digests_are_those_of_files():
    first, second = animation(ramp(3)), animation(ramp(3)[::-1])
    found = [decode_video(data, LIMITS).digest for data in (first, first, second)]
    assert found[0] == found[1] != found[2]


def test_a_video_of_a_phone_is_shown_upright():
    frames = np.zeros((4, 48, 64, 3), np.uint8)
    frames[:, :, :32, 0] = 255
    data = video_file(frames, "mp4", "mpeg4")
    assert data.count(UPRIGHT) == 2  # of the film and of the track
    film, track, rest = data.split(UPRIGHT)
    video = decode_video(film + UPRIGHT + track + TURNED + rest, LIMITS)
    assert (video.height, video.width) == (64, 48)
    (frame,) = video.read([2])
    assert frame[:28, :, 0].min() > 200 and frame[36:, :, 0].max() < 50


def test_a_cut_file_repeats_its_last_frame():
    data = video_file(ramp(30), "matroska", "mjpeg")
    video = decode_video(data[: len(data) * 2 // 3], LIMITS)
    assert 10 < video.num_frames < 29
    found = reds(video, [0, video.num_frames - 1, video.num_frames + 5])
    assert found[0] < 10 and found[1] == found[2] > 80


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(InputError, match=r"except animated GIF and WebP,: need PyAV .*\[video\]"):
        decode_video(b"\0\0\0 ftypisom" + bytes(99), LIMITS)
    assert decode_video(animation(ramp(2)), LIMITS).num_frames == 2


@pytest.mark.parametrize("make", [animation, video_file])
def test_limits(make):
    data = make(ramp(20))
    for limits, words in (
        (DecodeLimits(max_pixels=47 * 64, seconds=60.0), "more than 3008 pixels"),
        (DecodeLimits(max_pixels=10**5, seconds=60.0, max_frames=19), "more than 19 frames"),
        (DecodeLimits(max_pixels=10**5, seconds=0.0), "takes more than 0 s to decode"),
    ):
        with pytest.raises(InputError, match=words):
            decode_video(data, limits)


def test_the_time_counts_while_frames_are_read(monkeypatch):
    video, now = decode_video(animation(ramp(20)), LIMITS), [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    frames = video.read(range(20))
    next(frames)
    now[0] = 61.0
    with pytest.raises(InputError, match="takes more than 60 s to decode"):
        next(frames)
