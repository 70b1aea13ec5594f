"""Random images and videos."""

import numpy as np


def film(num_frames: int, width: int, height: int, seed: int = 0) -> np.ndarray:
    """Frames [num_frames, height, width, 3], each a picture of its own."""
    return np.stack([np.asarray(picture(width, height, 99 * seed + n)) for n in range(num_frames)])


def picture(width: int, height: int, seed: int = 0):
    """A PIL image of random coloured blocks."""
    from PIL import Image

    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize((width, height), Image.Resampling.NEAREST)
