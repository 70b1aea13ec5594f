"""Image files decoded as a viewer shows them."""

import io

import numpy as np
import pytest
from PIL import Image

from formats.errors import InputError
from qserve.multimodal.decode import decode_image

RED, BLUE = (200, 0, 0), (0, 0, 200)


def file_of(image, kind="PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def decoded(image, kind="PNG", **options) -> np.ndarray:
    found = decode_image(file_of(image, kind, **options), 10**6)
    assert found.mode == "RGB"
    return np.asarray(found)


def halves(mode="RGB", colors=(RED, BLUE)) -> Image.Image:
    """The left half of 4 x 2 pixels in one color, the right one in the other."""
    image = Image.new(mode, (4, 2), colors[0])
    image.paste(colors[1], (2, 0, 4, 2))
    return image


@pytest.mark.parametrize("kind", ["PNG", "BMP", "WEBP", "GIF"])
def test_formats_without_loss(kind):
    found = decoded(halves(), kind, **({"lossless": True} if kind == "WEBP" else {}))
    assert found.tolist() == np.asarray(halves()).tolist()


def test_a_photograph_is_shown_upright():
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    found = decoded(halves(), exif=exif)
    assert found.shape == (4, 2, 3)
    assert found[0, 0].tolist() == list(RED) and found[3, 1].tolist() == list(BLUE)


def test_broken_exif_is_ignored():
    assert decoded(halves(), exif=b"Exif\0\0MM\0*\xff\xff\xff\xff").shape == (2, 4, 3)


def test_cmyk_has_its_colors():
    found = decoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=100)
    red, green, blue = found[4, 4].tolist()
    assert red > 200 and green < 60 and blue < 60


def test_sixteen_bits_are_scaled_not_clipped():
    values = np.array([[0, 256, 32768, 65535]], np.uint16)
    assert decoded(Image.fromarray(values))[0, :, 0].tolist() == [0, 1, 128, 255]


def test_transparent_pixels_are_white():
    whole, clear = (10, 20, 30, 255), (10, 20, 30, 0)
    found = decoded(halves("RGBA", (whole, clear)))
    assert found[0, 0].tolist() == [10, 20, 30] and found[0, 3].tolist() == [255, 255, 255]
    palette = halves().quantize()
    found = decoded(palette, transparency=palette.getpixel((0, 0)))
    assert found[0, 0].tolist() == [255, 255, 255] and found[0, 3].tolist() == list(BLUE)


def test_gray_and_single_bits():
    assert decoded(Image.new("L", (1, 1), 77)).tolist() == [[[77] * 3]]
    assert decoded(Image.new("1", (3, 1), 1)).tolist() == [[[255] * 3] * 3]
    assert decoded(Image.new("LA", (1, 1), (77, 255))).tolist() == [[[77] * 3]]


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_an_animation(kind):
    frames = [Image.new("RGB", (4, 4), color) for color in (RED, BLUE)]
    more = {"lossless": True} if kind == "WEBP" else {}
    found = decoded(frames[0], kind, save_all=True, append_images=frames[1:], **more)
    assert found[0, 0].tolist() == list(RED)


@pytest.mark.parametrize("size", [(1, 2**16 + 1), (2**16 + 1, 1)])
def test_a_long_side_is_rejected_before_it_is_decoded(size):
    """Scaling the first of these to a width of 6144 pixels would make 1 GiB of it."""
    side = 2**16
    data = file_of(Image.new("1", size))
    with pytest.raises(
        InputError, match=f"a side of more than {side} pixels: {size[0]} x {size[1]}"
    ):
        decode_image(data[:-40], 2**26)
    assert max(decoded(Image.new("1", tuple(min(each, side) for each in size))).shape) == side


def test_pixels_are_counted_before_they_are_decoded():
    data = file_of(Image.effect_noise((30, 20), 50))
    assert decode_image(data, 600).size == (30, 20)
    # The file is cut: a decoder would find it broken.
    with pytest.raises(InputError, match="has more than 599 pixels: 30 x 20"):
        decode_image(data[:-40], 599)
