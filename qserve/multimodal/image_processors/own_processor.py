"""OwnImageProcessor: an image processor of transformers that needs torchvision, without it."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from formats.architecture.sizes import is_size
from formats.checkpoint import CONFIG, read_json
from formats.errors import CheckpointError
from qserve.multimodal.image_processors.cohere2_vision import COHERE_2_VISION
from qserve.multimodal.image_processors.deepseek_ocr import (
    DEEPSEEK_OCR,
    DEEPSEEK_OCR_2,
    UNLIMITED_OCR,
)
from qserve.multimodal.image_processors.gemma4_unified import GEMMA_4_UNIFIED
from qserve.multimodal.image_processors.internvl import INTERNVL_CHAT
from qserve.multimodal.image_processors.kimi import KIMI_K25, KIMI_VL
from qserve.multimodal.image_processors.kind import Cut, Kind, is_number
from qserve.multimodal.image_processors.lfm2_vl import LFM2_VL
from qserve.multimodal.image_processors.llama4 import LLAMA_4
from qserve.multimodal.image_processors.muse_glimmer import MUSE_GLIMMER
from qserve.multimodal.image_processors.nemotron import NEMOTRON
from qserve.multimodal.image_processors.phi4 import PHI_4
from qserve.multimodal.image_processors.stated_options import COPY_OPTIONS, stated_options
from qserve.multimodal.image_processors.step import STEP

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from qserve.multimodal.image_processors.normalizer import Normalizer

KINDS: dict[str, Kind] = {
    "lfm2_vl": LFM2_VL,
    "llama4": LLAMA_4,
    "cohere2_vision": COHERE_2_VISION,
    "kimi": KIMI_K25,
    "kimi_vl": KIMI_VL,
    "gemma4_unified": GEMMA_4_UNIFIED,
    "internvl": INTERNVL_CHAT,
    "muse_glimmer": MUSE_GLIMMER,
    "nemotron": NEMOTRON,
    "phi4": PHI_4,
    "step": STEP,
    "deepseek_ocr": DEEPSEEK_OCR,
    "deepseek_ocr_2": DEEPSEEK_OCR_2,
    "unlimited_ocr": UNLIMITED_OCR,
}
# (file that may have the options, key of the options in it; "": the whole file); the first one
# found counts
FILES = (("processor_config.json", "image_processor"), ("preprocessor_config.json", ""))
CHANNELS = 3
COMMON: dict[str, Any] = {
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
}


class OwnImageProcessor:
    """The image processor of one model."""

    def __init__(self, folder: str | Path, kind: str) -> None:
        """Read the options in a model's folder. Raises CheckpointError.

        `kind`: key of KINDS.
        """
        self.folder, self.kind = str(folder), KINDS[kind]
        if self.kind.from_config is not None:
            stated = self.kind.from_config(read_json(Path(folder) / CONFIG))
        else:
            found = stated_options(Path(folder), FILES)
            if found is None and self.kind.needs_options:
                raise CheckpointError(
                    self.folder, "has no options of an image processor", COPY_OPTIONS
                )
            stated = self.kind.renamed(found or {})
        self.options = {**COMMON, **self.kind.defaults, **stated}
        if not self.options.get("do_resize", True):
            raise CheckpointError(
                f"{folder} do_resize of the image processor",
                "expected true: the vision tower takes no other sizes",
                COPY_OPTIONS,
            )
        for key, most in self.kind.sizes.items():
            value = self.options[key]
            if not is_size(value) or value > most:
                self._refuse(key, f"a positive whole number up to {most}")
        if not is_number(self.options["rescale_factor"], above=0):
            self._refuse("rescale_factor", "a number above 0")
        if not _are_numbers(self.options["image_mean"]):
            self._refuse("image_mean", f"{CHANNELS} numbers")
        if not _are_numbers(self.options["image_std"], above=0):
            self._refuse("image_std", f"{CHANNELS} numbers above 0")
        self.kind.check(self.options)

    def _refuse(self, key: str, expected: str) -> NoReturn:
        raise CheckpointError(
            f"{self.folder} {key} of the image processor",
            f"expected {expected}, found {self.options[key]!r:.100}",
            COPY_OPTIONS,
        )

    def normalizer(self, device: "torch.device") -> "Normalizer":
        """Return the last step of the processor, which rounds as transformers' does."""
        import torch

        from qserve.multimodal.image_processors.normalizer import Normalizer

        options, rounds_to = self.options, self.kind.rounds_to
        if not rounds_to:
            return Normalizer.of_video(options, device)
        dtype = getattr(torch, rounds_to)
        stated = options["image_mean"], options["image_std"]
        if not options["do_normalize"]:
            stated = [0.0] * CHANNELS, [1.0] * CHANNELS
        mean_C1, std_C1 = (
            torch.tensor(each, device=device, dtype=dtype)[:, None] for each in stated
        )
        factor = options["rescale_factor"] if options["do_rescale"] else 1.0
        return Normalizer(factor, mean_C1, std_C1, dtype)

    def to_dict(self) -> dict[str, Any]:
        """Return all options."""
        return dict(self.options)

    def cut(self, image: "Image") -> Cut:
        """Scale an RGB image and cut it into tiles."""
        return self.kind.cut(np.asarray(image), self.options)

    def __call__(self, images: "Sequence[Image]") -> dict[str, Any]:
        """Return the arguments of transformers' model for images."""
        import torch

        normalize = self.normalizer(torch.device("cpu"))
        cuts = [self.cut(image.convert("RGB")) for image in images]
        tiles = [
            [normalize(torch.from_numpy(tile_CHW)).numpy() for tile_CHW in cut.tiles_CHW]
            for cut in cuts
        ]
        return self.kind.arguments(tiles, cuts, self.options)


def normalizer_of(processor: Any, device: "torch.device") -> "Normalizer":
    """Return the last step of an image processor, this project's or transformers'."""
    from qserve.multimodal.image_processors.normalizer import Normalizer

    if isinstance(processor, OwnImageProcessor):
        return processor.normalizer(device)
    return Normalizer.of(processor, device)


def _are_numbers(values: Any, above: float = -math.inf) -> bool:
    """Return True for a number above a limit for each channel."""
    is_list = isinstance(values, list | tuple) and len(values) == CHANNELS
    return is_list and all(is_number(value, above) for value in values)
