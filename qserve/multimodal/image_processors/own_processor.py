"""OwnImageProcessor: an image processor of transformers that needs torchvision, without it."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from formats.architecture.sizes import is_size
from formats.checkpoint import CONFIG, read_json
from formats.errors import CheckpointError
from qserve.multimodal.image_processors.cohere2_vision import COHERE_2_VISION
from qserve.multimodal.image_processors.internvl import INTERNVL_CHAT
from qserve.multimodal.image_processors.kimi import KIMI_K25, KIMI_VL
from qserve.multimodal.image_processors.kind import Cut, Kind
from qserve.multimodal.image_processors.lfm2_vl import LFM2_VL
from qserve.multimodal.image_processors.llama4 import LLAMA_4

if TYPE_CHECKING:
    from PIL.Image import Image

KINDS: dict[str, Kind] = {
    "lfm2_vl": LFM2_VL,
    "llama4": LLAMA_4,
    "cohere2_vision": COHERE_2_VISION,
    "kimi": KIMI_K25,
    "kimi_vl": KIMI_VL,
    "internvl": INTERNVL_CHAT,
}
# (file that may have the options, key of the options in it; "": the whole file); the first one
# found counts
FILES = (("processor_config.json", "image_processor"), ("preprocessor_config.json", ""))
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
        self.kind = KINDS[kind]
        if self.kind.from_config is not None:
            stated = self.kind.from_config(read_json(Path(folder) / CONFIG))
        else:
            stated = self.kind.renamed(_stated_options(Path(folder)))
        self.options = {**COMMON, **self.kind.defaults, **stated}
        if not self.options.get("do_resize", True):
            raise CheckpointError(
                f"{folder} do_resize of the image processor",
                "expected true: the vision tower takes no other sizes",
                "copy preprocessor_config.json from the original model",
            )
        for key in self.kind.sizes:
            if not is_size(self.options[key]):
                raise CheckpointError(
                    f"{folder} {key} of the image processor",
                    f"expected a positive number, found {self.options[key]!r:.100}",
                    "copy preprocessor_config.json from the original model",
                )

    def to_dict(self) -> dict[str, Any]:
        """Return all options."""
        return dict(self.options)

    def cut(self, image: "Image") -> Cut:
        """Scale an RGB image and cut it into tiles. Raises CheckpointError, or ValueError."""
        return self.kind.cut(np.asarray(image), self.options)

    def __call__(self, images: "Sequence[Image]") -> dict[str, Any]:
        """Return the arguments of transformers' model for images. Raises CheckpointError."""
        import torch

        from qserve.multimodal.image_processors.normalizer import Normalizer

        normalize = Normalizer.of_own(self, torch.device("cpu"))
        cuts = [self.cut(image.convert("RGB")) for image in images]
        tiles = [
            [normalize(torch.from_numpy(tile_CHW)).numpy() for tile_CHW in cut.tiles_CHW]
            for cut in cuts
        ]
        return self.kind.arguments(tiles, cuts, self.options)


def _stated_options(folder: Path) -> dict[str, Any]:
    """Read the options from the first file of FILES that has them. Raises CheckpointError."""
    for name, key in FILES:
        if (folder / name).is_file():
            found = read_json(folder / name)
            found = found.get(key) if key else found
            if isinstance(found, dict):
                return {name: value for name, value in found.items() if value is not None}
    raise CheckpointError(
        str(folder),
        "has no options of an image processor",
        "copy preprocessor_config.json from the original model",
    )
