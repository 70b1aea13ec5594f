"""Frames are chosen, scaled and cut as transformers' video processors do, bit for bit.

Those need torchvision; without it, figures that they gave are compared.
"""

import itertools
import json

import numpy as np
import pytest
from PIL import Image

from formats.errors import CheckpointError, InputError
from qserve.multimodal.video import video_of_frames
from qserve.multimodal.video_processor import VideoLimits, VideoProcessor
from tests.tiny_vision import film

VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
CLASSES = {"qwen2": "Qwen2VLVideoProcessor", "qwen3": "Qwen3VLVideoProcessor"}
SIZES = {
    "qwen2": {"shortest_edge": 256, "longest_edge": 4000},
    "qwen3": {"shortest_edge": 1024, "longest_edge": 40000},
}


def processor_of(folder, kind, **options):
    (folder / "video_preprocessor_config.json").write_text(json.dumps(options))
    return VideoProcessor(folder, kind)


def options_of(kind, **more):
    return {"patch_size": 8, "size": SIZES[kind], "do_sample_frames": True, "fps": 2, **more}


def video(num_frames, fps=None, height=30, width=40, **options):
    stated = {"fps": fps} if fps else {}
    return video_of_frames((film(num_frames, width, height), {**stated, **options}))


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("is_capped", [False, True])
def test_pixels_are_those_of_transformers(tmp_path, kind, is_capped):
    pytest.importorskip("torchvision")
    import transformers

    more = {"cap_pixels_per_frame": True, "max_video_tokens": 20} if is_capped else {}
    own = processor_of(tmp_path, kind, **options_of(kind, **more))
    theirs = getattr(transformers, CLASSES[kind])(**options_of(kind, **more))
    frames = np.random.default_rng(0).integers(0, 256, (90, 300, 300, 3), dtype=np.uint8)
    sides = (40, 30), (16, 16), (9, 70), (64, 65), (100, 300)
    rates = (2.0, 7.5, 24, 29.97, *[None] * (kind == "qwen3"))
    for count, (height, width), fps in itertools.product((2, 3, 5, 7, 24, 90), sides, rates):
        given = frames[:count, :height, :width]
        clip = own.prepare(video_of_frames((given, {"fps": fps} if fps else {})))
        found = theirs(
            videos=[given],
            video_metadata=[{"total_num_frames": count, "fps": fps}],
            do_normalize=False,
            do_rescale=False,
            return_metadata=True,
            input_data_format="channels_last",
        )
        (metadata,) = found["video_metadata"]
        assert clip.grid == tuple(found["video_grid_thw"][0].tolist())
        pixels = found["pixel_values_videos"].numpy()
        assert np.array_equal(clip.patches_GPV.reshape(pixels.shape), pixels)
        assert clip.seconds_per_group == pytest.approx(2 / metadata.sampled_fps)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_tokens_are_those_of_the_models_own_processor(vision, family):
    pytest.importorskip("torchvision")
    import transformers

    model = vision(family)
    name = {"qwen3_vl": "Qwen3VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor"}[family]
    videos = getattr(transformers, CLASSES[model.processor.config.family.video])
    theirs = getattr(transformers, name)(
        transformers.Qwen2VLImageProcessor.from_pretrained(model.folder),
        transformers.AutoTokenizer.from_pretrained(model.folder),
        videos.from_pretrained(model.folder),
    )
    for count, fps in ((30, 10.0), (7, 3.7), (2, 1.0)):
        frames = film(count, 40, 30)
        found = theirs(
            text=f"look {VIDEO} there",
            videos=[frames],
            video_metadata=[{"total_num_frames": count, "fps": fps}],
        )
        given = frames, {"fps": fps}
        ids, _ = model.prompt(f"look {VIDEO} there", (), (given,))
        assert ids == found["input_ids"][0]
        wanted, pixels = model.video_inputs((given,)), found["pixel_values_videos"]
        assert np.allclose(wanted.pop("pixel_values_videos"), pixels, atol=1e-5)
        for name, value in wanted.items():
            assert np.allclose(value, np.asarray(list(found[name])))


@pytest.mark.parametrize(
    ("kind", "num_frames", "fps", "indices"),
    [
        ("qwen3", 30, 10.0, [0, 6, 12, 17, 23, 29]),
        ("qwen3", 7, 3.7, [0, 2, 4, 6]),
        ("qwen3", 3, 30.0, [0, 1, 2]),
        ("qwen3", 10, None, [0, 3, 6, 9]),
        ("qwen2", 30, 10.0, [0, 5, 10, 15, 20, 25]),
        ("qwen2", 31, 29.97, [0, 7, 15, 23]),
        ("qwen2", 3, 1.0, [0, 1]),
        ("qwen2", 1, 1.0, [0]),
    ],
)
def test_chosen_frames(tmp_path, kind, num_frames, fps, indices):
    own = processor_of(tmp_path, kind, **options_of(kind))
    assert own.sample(video(num_frames, fps)) == indices
    whole = video(num_frames, fps, do_sample_frames=False)
    assert own.sample(whole) == list(range(num_frames))


@pytest.mark.parametrize(
    ("kind", "num_frames", "sides", "expected"),
    [
        ("qwen3", 5, (9, 70), (16, 128)),
        ("qwen3", 24, (64, 65), (32, 32)),
        ("qwen3", 90, (100, 300), (16, 32)),
        ("qwen2", 5, (9, 70), (16, 64)),
        ("qwen2", 24, (64, 65), (48, 48)),
        ("qwen2", 24, (100, 300), (32, 96)),
    ],
)
def test_sizes(tmp_path, kind, num_frames, sides, expected):
    assert processor_of(tmp_path, kind, **options_of(kind)).size(num_frames, *sides) == expected


@pytest.mark.parametrize("kind", CLASSES)
def test_times_and_groups(tmp_path, kind):
    own = processor_of(tmp_path, kind, **options_of(kind))
    clip = own.prepare(video(5, 2.0, do_sample_frames=False))
    assert clip.seconds == (0.25, 1.25, 2.0), "the last frame is repeated"
    assert clip.grid[0] == 3 and clip.seconds_per_group == 1.0
    last = clip.patches_GPV[-1].reshape(-1, 3, 2, 64)
    assert np.array_equal(last[:, :, 0], last[:, :, 1])


def test_limits_of_a_server(tmp_path):
    for kind in CLASSES:
        own = processor_of(tmp_path, kind, **options_of(kind))
        long = video(90, 2.0, 300, 300)
        clip = own.prepare(long, VideoLimits(max_frames=10, max_pixels=10 * 32 * 32))
        assert clip.grid == (5, 4, 4)
        assert own.prepare(long).grid[0] == 45


def test_files_of_the_options(tmp_path):
    plain = {"patch_size": 8, "size": SIZES["qwen3"]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**plain, "merge_size": 1}))
    assert VideoProcessor(tmp_path, "qwen3").options["merge_size"] == 1
    assert processor_of(tmp_path, "qwen3", **plain).options["merge_size"] == 2
    nested = {"video_processor": {**plain, "max_frames": 5}, "image_processor": {}}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    assert VideoProcessor(tmp_path, "qwen3").options["max_frames"] == 5
    (tmp_path / "processor_config.json").unlink()
    own = processor_of(tmp_path, "qwen2", patch_size=8, min_pixels=64, max_pixels=900)
    assert own.options["size"] == {"shortest_edge": 64, "longest_edge": 900}
    old = {"min_pixels": 64, "max_pixels": 900}
    own = processor_of(tmp_path, "qwen2", patch_size=8, size=old)
    assert own.size(4, 90, 90) == processor_of(tmp_path, "qwen2", patch_size=8, **old).size(
        4, 90, 90
    )
    with pytest.raises(CheckpointError, match="expected shortest_edge and longest_edge in pixels"):
        processor_of(tmp_path, "qwen3", size={"height": 5, "width": 5})


def test_a_list_of_images_is_an_array_of_frames():
    frames = film(3, 8, 6)
    images = [Image.fromarray(frame) for frame in frames]
    assert video_of_frames(images).digest == video_of_frames(frames).digest
    read = video_of_frames(images).read([0, 2])
    assert np.array_equal(np.stack(list(read)), frames[[0, 2]])
    changed = (frames, {"fps": 3}), frames[::-1], frames[:2]
    digests = {video_of_frames(each).digest for each in (frames, *changed)}
    assert len(digests) == 4


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ([], "expected a list of PIL images or an array .*, found list"),
        ("film.mp4", "found str"),
        (film(2, 4, 4).astype(np.float32), r"found float32 \[2, 4, 4, 3\]"),
        (film(2, 4, 4)[..., 0], r"found uint8 \[2, 4, 4\]"),
        ([film(1, 4, 4)[0], film(1, 5, 4)[0]], "expected frames of one size, found"),
        ((film(2, 4, 4), {"speed": 3}), "expected fps and do_sample_frames, found speed"),
        ((film(2, 4, 4), {"fps": 0}), "video fps: expected a number above 0, found 0"),
        ((film(2, 4, 4), {"fps": float("nan")}), "video fps: expected a number above 0, found nan"),
    ],
)
def test_wrong_frames_are_refused(stated, words):
    with pytest.raises(InputError, match=words):
        video_of_frames(stated)


def test_wrong_shapes_are_refused(tmp_path):
    own = processor_of(tmp_path, "qwen3", **options_of("qwen3"))
    with pytest.raises(InputError, match="expected sides of at most 200:1, found 2 x 402"):
        own.prepare(video(2, 2.0, 402, 2))
    own.options["do_resize"] = False
    with pytest.raises(InputError, match="expected sides that are multiples of 16, found 40 x 30"):
        own.prepare(video(2, 2.0))
