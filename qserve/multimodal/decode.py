"""Decoding of an image file, with Pillow, to RGB as a viewer shows it.

Formats and pixels are checked before any pixel is decoded. No text of the library is in an error:
it may contain an address or a path.
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
SIXTEEN_BITS = ("I", "I;16", "I;16B", "I;16L", "I;16N")
WHITE = (255, 255, 255, 255)
INSTALL = "install the extra: pip install 'qserve-kit[vision]'"


def decode_image(data: bytes, max_pixels: int) -> "Image":
    """Return the first frame of a file in RGB, upright, on white. Raises InputError."""
    try:
        import PIL.Image
    except ImportError as error:
        raise InputError("images", "need Pillow", INSTALL) from error
    names = ", ".join(FORMATS)
    try:
        with warnings.catch_warnings():
            # Pillow's own limit, and broken metadata, about which it would write to stderr.
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
        raise InputError(SUBJECT, "needs too much memory", "send a smaller one") from None
    except InputError:
        raise
    # A broken file raises any exception of its decoder.
    except Exception:
        raise InputError(SUBJECT, "is broken or truncated", f"send a whole {names} file") from None


def check_size(image: "Image", max_pixels: int) -> None:
    width, height = image.size
    if width < 1 or height < 1:
        raise InputError(SUBJECT, "has no pixels")
    if width * height > max_pixels:
        raise _too_large(max_pixels, f": {width} x {height}")


def _too_large(max_pixels: int, found: str = "") -> InputError:
    return InputError(SUBJECT, f"has more than {max_pixels} pixels{found}", "send a smaller one")


def as_shown(image: "Image") -> "Image":
    import PIL.Image
    import PIL.ImageOps

    # A broken orientation leaves the image as it is stored.
    with contextlib.suppress(Exception):
        image = PIL.ImageOps.exif_transpose(image)
    if image.mode in SIXTEEN_BITS:
        # Pillow would clip the values instead of scaling them.
        values = np.asarray(image).astype(np.int64) >> 8
        image = PIL.Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = PIL.Image.alpha_composite(PIL.Image.new("RGBA", image.size, WHITE), image)
    return image.convert("RGB")
