"""Image processors without torchvision give the numbers of transformers' processors, bit for bit.

Those need torchvision; without it, checksums of what they gave are compared.
"""

import hashlib
import json

import numpy as np
import pytest
import torch
from PIL import Image

from formats.errors import CheckpointError, InputError
from qserve.multimodal.image_processors.own_processor import OwnImageProcessor
from qserve.multimodal.image_processors.scaling import scaled
from tests.tiny_vision import picture

CLASSES = {
    "lfm2_vl": "Lfm2VlImageProcessor",
    "llama4": "Llama4ImageProcessor",
    "cohere2_vision": "Cohere2VisionImageProcessor",
    "kimi": "Kimi_K25ImageProcessor",
    "gemma4_unified": "Gemma4UnifiedImageProcessor",
    "muse_glimmer": "MuseGlimmerImageProcessor",
    "nemotron": "NemotronH_Omni_Reasoning_V3ImageProcessor",
    "step": "Step3p7ImageProcessor",
    "phi4": "Phi4MultimodalImageProcessor",
}
PIXELS = {"image_mean": [0.5, 0.4, 0.5], "image_std": [0.5, 0.5, 0.6]}
SIDE = {"size": {"height": 32, "width": 32}}
# (kind, options): small sizes, so that an image has several tiles
CASES = [
    (
        "lfm2_vl",
        {
            **{"encoder_patch_size": 8, "tile_size": 32, "max_tiles": 6},
            **{"min_image_tokens": 2, "max_image_tokens": 9},
        },
    ),
    (
        "lfm2_vl",
        {
            **{"encoder_patch_size": 8, "tile_size": 32, "use_thumbnail": False},
            **{"min_image_tokens": 4, "max_image_tokens": 6, "max_pixels_tolerance": 1.0},
        },
    ),
    ("lfm2_vl", {"encoder_patch_size": 8, "tile_size": 32, "do_image_splitting": False}),
    ("llama4", {**SIDE, "max_patches": 5}),
    ("llama4", {**SIDE, "max_patches": 16, "resize_to_max_canvas": True}),
    ("llama4", {**SIDE, "max_patches": 16}),
    ("cohere2_vision", {**SIDE, "max_patches": 6}),
    ("cohere2_vision", {**SIDE, "crop_to_patches": False}),
    ("kimi", {"patch_size": 8, "max_patches": 24, "size": {"max_height": 7, "max_width": 7}}),
    ("gemma4_unified", {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}),
    ("muse_glimmer", {"patch_size": 8, "max_image_tokens": 12}),
    ("step", {"size": {"height": 48, "width": 48}, "patch_size": 32, "max_image_size": 96}),
    ("step", {"size": {"height": 72, "width": 72}, "patch_size": 40, "max_image_size": 300}),
    ("nemotron", {"patch_size": 8, "min_num_patches": 8, "max_num_patches": 40}),
    (
        "nemotron",
        {"patch_size": 4, "min_num_patches": 16, "max_num_patches": 0, "max_model_len": 90},
    ),
    ("phi4", {**SIDE, "patch_size": 8, "dynamic_hd": 4}),
    ("phi4", {"size": {"height": 56, "width": 56}, "patch_size": 14, "dynamic_hd": 36}),
]
SIZES = [
    *[(1, 1), (3, 1), (1, 50), (40, 30), (30, 40), (200, 1), (64, 64), (65, 33), (100, 80)],
    *[(80, 100), (64, 32), (97, 31), (300, 300), (130, 700), (45, 36), (36, 45)],
]


# of the tiles of each case, whose numbers were transformers'
CHECKSUMS = (
    "e60744ce1b96",
    "755f0b2b7971",
    "37f490927b4d",
    "5e5b74372711",
    "959f87de246b",
    "37015a34b8d5",
    "b8e0f1bb037f",
    "a75b55ba1b92",
    "8eefab52f7d7",
    "ce369f70b099",
    "b29bc576151c",
    "49e6029aa0a9",
    "44c047b1006f",
    "a92f777241d2",
    "2233244e5999",
    "b42023cbc1a4",
    "41c30da559b6",
)


def sizes_of(kind):
    """The sizes of images that the processor takes."""
    return [size for size in SIZES if kind != "phi4" or max(size) < 20 * min(size)]


def processor_of(folder, kind, options):
    (folder / "preprocessor_config.json").write_text(json.dumps({**PIXELS, **options}))
    return OwnImageProcessor(folder, kind)


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_numbers_are_those_of_transformers(tmp_path, kind, options):
    pytest.importorskip("torchvision")
    import transformers

    own = processor_of(tmp_path, kind, options)
    theirs = getattr(transformers, CLASSES[kind])(**PIXELS, **options)
    images = [picture(*size, seed) for seed, size in enumerate(sizes_of(kind))]
    for chosen in (*([image] for image in images), images[3:5]):
        wanted, found = theirs(chosen, return_tensors="pt"), own(chosen)
        assert found.keys() <= wanted.keys()
        mask = wanted.get("pixel_attention_mask")
        if mask is not None and mask.shape != wanted["pixel_values"].shape[:2]:
            del found["pixel_attention_mask"]  # theirs is too short for such an image
        for name, value in found.items():
            want = wanted[name].float().numpy() if name == "pixel_values" else wanted[name].numpy()
            assert value.dtype == want.dtype and np.array_equal(value, want), (name, chosen)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_tiles_are_those_that_were_compared(tmp_path, number):
    own, found = processor_of(tmp_path, *CASES[number]), hashlib.sha256()
    for seed, size in enumerate(sizes_of(CASES[number][0])):
        cut = own.cut(picture(*size, seed))
        assert len(cut.tiles_CHW) == cut.grid[0] * cut.grid[1] + (
            cut.has_overview and cut.grid != (1, 1)
        )
        for tile_CHW in cut.tiles_CHW:
            if tile_CHW.dtype == np.float32:  # last bits depend on the CPU; few numbers are at .69
                tile_CHW = np.floor(tile_CHW + 0.31).astype(np.int16)
            found.update(repr(tile_CHW.shape).encode() + tile_CHW.tobytes())
    assert found.hexdigest()[:12] == CHECKSUMS[number]


def test_sides_that_differ_too_much_are_refused(tmp_path):
    own = processor_of(tmp_path, *CASES[-2])
    words = r"image: of 50 x 1 pixels becomes 64 x 1; .* at least 10 \(send an image whose sides"
    with pytest.raises(InputError, match=words):
        own.cut(picture(50, 1))


WRONG = [
    ("nemotron", {"downsample_ratio": 0}, "downsample_ratio .*: expected a number from 0.015625"),
    ("nemotron", {"downsample_ratio": 0.001}, "downsample_ratio .*, found 0.001"),
    ("nemotron", {"max_num_patches": -1}, "max_num_patches .*: expected a whole number up to"),
    ("muse_glimmer", {"resample": 3}, "resample of the image processor: expected 1, found 3"),
    ("phi4", {"resample": 2}, "resample of the image processor: expected 3, found 2"),
    ("phi4", {**SIDE, "patch_size": 14}, "size .*expected a multiple of patch_size 14, found 32"),
    ("phi4", {"dynamic_hd": 0}, "dynamic_hd .*: expected a positive whole number up to 256"),
    ("lfm2_vl", {"tile_size": 0}, "tile_size of the image processor: expected a positive whole"),
    ("lfm2_vl", {"tile_size": 10**6}, "tile_size .*number up to 4096, found 1000000"),
    ("lfm2_vl", {"min_tiles": 9, "max_tiles": 4}, "min_tiles .*: is 9, and max_tiles is 4"),
    ("lfm2_vl", {"max_pixels_tolerance": "2"}, "max_pixels_tolerance .*: expected a number above"),
    ("cohere2_vision", {"max_patches": 10**9}, "max_patches .*number up to 256, found 1000000000"),
    ("cohere2_vision", {"size": 512}, "size of the image processor: expected height and an equal"),
    ("cohere2_vision", {"image_std": [1, 1, 0]}, "image_std .*: expected 3 numbers above 0"),
    ("cohere2_vision", {"image_mean": [0.5]}, "image_mean .*: expected 3 numbers, found"),
    ("kimi_vl", {"rescale_factor": True}, "rescale_factor .*: expected a number above 0, found Tr"),
    ("kimi_vl", {"merge_kernel_size": [2, 3]}, r"merge_size .*: expected a positive .*\[2, 3\]"),
    ("kimi_vl", {"merge_kernel_size": [[2], []]}, r"merge_size .*: expected a positive whole"),
    ("gemma4_unified", {"max_soft_tokens": 71}, "max_soft_tokens .*: expected one of 70, 140"),
    ("kimi", {"size": [512, 512]}, "size of the image processor: expected max_height"),
    ("lfm2_vl", {"do_resize": False}, "do_resize of the image processor: expected true"),
    ("llama4", {"size": {"height": 8, "width": 9}}, "size of the image processor: expected height"),
    ("kimi", {"size": {"max_height": 8}}, "size of the image processor: expected max_height"),
    ("llama4", {"resample": 4}, "resample of the processor: expected 1 or 2 or 3, found 4"),
    ("lfm2_vl", {"resample": [2]}, r"resample of the processor: expected 1 or 2 or 3, found \[2\]"),
]


@pytest.mark.parametrize(("kind", "options", "words"), WRONG)
def test_wrong_options_are_named(tmp_path, kind, options, words):
    """The processor is made when a server starts, so that no request meets a wrong option."""
    with pytest.raises(CheckpointError, match=words):
        processor_of(tmp_path, kind, options)


def test_options_of_moonshots_own_file(tmp_path):
    own = {"in_patch_limit": 50, "patch_size": 8, "merge_kernel_size": 2, "image_mean": [0, 0, 0]}
    own |= {"patch_limit_on_one_side": 9, "fixed_output_tokens": None}
    found = processor_of(tmp_path, "kimi", {"media_proc_cfg": own}).to_dict()
    assert (found["max_patches"], found["patch_size"], found["merge_size"]) == (50, 8, 2)
    assert found["size"] == {"max_height": 9, "max_width": 9}
    assert found["image_mean"] == [0, 0, 0] and found["image_std"] == PIXELS["image_std"]


# byte of a gray pixel -> normalized channels, as transformers computes them in bfloat16
IN_BFLOAT16 = {
    1: (-0.9921875, -0.79296875, -0.494140625),
    77: (-0.39453125, -0.1953125, 0.0032501220703125),
    200: (0.5703125, 0.76953125, 0.8046875),
    255: (1.0, 1.203125, 1.1640625),
}


def test_llama_4_normalizes_in_bfloat16(tmp_path):
    constants = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.5, 0.6]}
    size = {"size": {"height": 4, "width": 4}}
    own = processor_of(tmp_path, "llama4", {**constants, **size, "max_patches": 1})
    for byte, wanted in IN_BFLOAT16.items():
        image = Image.new("RGB", (4, 4), (byte,) * 3)
        assert own([image])["pixel_values"][0, :, 0, 0].tolist() == list(wanted)


def test_defaults_are_those_of_transformers(tmp_path):
    pytest.importorskip("torchvision")
    import transformers

    (tmp_path / "preprocessor_config.json").write_text("{}")
    for kind, name in CLASSES.items():
        theirs = getattr(transformers, name)()
        for key, value in OwnImageProcessor(tmp_path, kind).to_dict().items():
            assert getattr(theirs, key) == value, (kind, key)


@pytest.mark.parametrize("error", [NotImplementedError, ValueError])
def test_lanczos_is_pillows_where_torch_has_none(monkeypatch, error):
    def refuse(*_, **__):
        raise error("torch 2.11 has no antialiased lanczos")

    monkeypatch.setattr(torch.nn.functional, "interpolate", refuse)
    pixels = np.random.default_rng(0).integers(0, 256, (30, 40, 3), np.uint8)
    want = np.asarray(Image.fromarray(pixels).resize((28, 14), Image.Resampling.LANCZOS))
    assert np.array_equal(scaled(pixels, 14, 28, 1), want)
    with pytest.raises(error):
        scaled(pixels, 14, 28, 3)
