"""Decoding of an image file with Pillow, to the RGB image that a viewer would show.

The format and the number of pixels are checked before any pixel is decoded. Errors never quote
Pillow's own messages, which may contain a memory address or a path.
"""

import contextlib
import io
import warnings
from typing import TYPE_CHECKING

import numpy as np

from formats.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
SUBJECT = "image"
# Limit of an image's width and height. To scale an image with more rows, Pillow and torch would
# first scale each row, which takes gigabytes even where the image has few pixels.
MAX_SIDE = 2**16
SIXTEEN_BITS = ("I", "I;16", "I;16B", "I;16L", "I;16N")
WHITE = (255, 255, 255, 255)
INSTALL = "install the extra: pip install 'qserve-kit[vision]'"


def decode_image(data: bytes, max_pixels: int) -> "Image":
    """Return the first frame of a file: RGB, upright, on a white background. Raises InputError."""
    try:
        import PIL.Image
    except ImportError as error:
        raise InputError("images", "need Pillow", INSTALL) from error
    names = ", ".join(FORMATS)
    try:
        with warnings.catch_warnings():
            # Pillow would warn on stderr about its own pixel limit and about broken metadata.
            warnings.simplefilter("ignore")
            with PIL.Image.open(io.BytesIO(data), formats=FORMATS) as image:
                check_size(image, max_pixels)
                image.load()
                check_size(image, max_pixels)
                return as_shown(image)
    except PIL.Image.DecompressionBombError:
        raise _too_large(max_pixels) from None
    except PIL.UnidentifiedImageError:
        raise InputError(SUBJECT, f"expected one of {names}", "convert it") from None
    except MemoryError:
        raise InputError(SUBJECT, "needs too much memory", "send a smaller image") from None
    except InputError:
        raise
    # For a broken file a decoder may raise an exception of any kind.
    except Exception:
        raise InputError(SUBJECT, "is broken or truncated", f"send a whole {names} file") from None


def check_size(image: "Image", max_pixels: int) -> None:
    width, height = image.size
    if width < 1 or height < 1:
        raise InputError(SUBJECT, "has no pixels", "send another image")
    if width * height > max_pixels:
        raise _too_large(max_pixels, f": {width} x {height}")
    if max(width, height) > MAX_SIDE:
        raise InputError(
            SUBJECT,
            f"has a side of more than {MAX_SIDE} pixels: {width} x {height}",
            "send it in several parts",
        )


def _too_large(max_pixels: int, found: str = "") -> InputError:
    return InputError(SUBJECT, f"has more than {max_pixels} pixels{found}", "send a smaller image")


def as_shown(image: "Image") -> "Image":
    import PIL.Image
    import PIL.ImageOps

    # An image whose orientation tag is broken stays as it is stored.
    with contextlib.suppress(Exception):
        image = PIL.ImageOps.exif_transpose(image)
    if image.mode in SIXTEEN_BITS:
        # Pillow would clip the values instead of scaling them.
        values = np.asarray(image).astype(np.int64) >> 8
        image = PIL.Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = PIL.Image.alpha_composite(PIL.Image.new("RGBA", image.size, WHITE), image)
    return as_rgb(image)


def as_rgb(image: "Image") -> "Image":
    """Return the image in RGB. Pillow's `convert` would copy an image that already is."""
    return image if image.mode == "RGB" else image.convert("RGB")
