"""Scale images and frames of videos exactly as torchvision does on a CPU, with torch alone.

Only Lanczos with torch before 2.12 is Pillow's, which rounds some pixels otherwise.
"""

import numpy as np

from formats.errors import CheckpointError
from qserve.multimodal.image_processors.stated_options import COPY_OPTIONS

RESAMPLING = {1: "lanczos", 2: "bilinear", 3: "bicubic"}  # Pillow's number -> torch's name


def mode_of(resample: object) -> str:
    """Return torch's name of a filter from Pillow's number. Raises CheckpointError."""
    if type(resample) is not int or resample not in RESAMPLING:
        raise CheckpointError(
            "resample of the processor",
            f"expected {' or '.join(map(str, RESAMPLING))}, found {resample!r:.100}",
            COPY_OPTIONS,
        )
    return RESAMPLING[resample]


def scaled(pixels_HWC: np.ndarray, height: int, width: int, resample: int) -> np.ndarray:
    """Scale the uint8 pixels of an image. Raises CheckpointError.

    `resample`: Pillow's number of the filter, from the options of a processor.
    """
    if pixels_HWC.shape[:2] == (height, width):
        return pixels_HWC
    import torch

    mode = mode_of(resample)
    plain = torch.from_numpy(np.array(pixels_HWC)).permute(2, 0, 1).contiguous()[None]
    try:
        found = torch.nn.functional.interpolate(
            plain, size=(height, width), mode=mode, align_corners=False, antialias=True
        )
    except (NotImplementedError, ValueError):  # "lanczos" in torch before 2.12
        if mode != "lanczos":
            raise
        from PIL import Image

        image = Image.fromarray(pixels_HWC).resize((width, height), resample)
        return np.asarray(image)
    return found[0].permute(1, 2, 0).numpy()
