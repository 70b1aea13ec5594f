"""Normalizer: converts the bytes of pixels to floats, with the rounding of transformers.

Suffix of tensor names: C1 one value for each channel.
"""

from collections.abc import Mapping
from typing import Any

import torch


class Normalizer:
    """The last step of an image processor: converts bytes to floats as transformers does."""

    def __init__(
        self,
        factor: float,
        mean_C1: torch.Tensor,
        std_C1: torch.Tensor,
        rounds_to: torch.dtype | None = None,
    ) -> None:
        """Store the constants. `rounds_to`: dtype of each step; None: float32, as most have."""
        self.factor, self.mean, self.std, self.rounds_to = factor, mean_C1, std_C1, rounds_to

    @classmethod
    def of(cls, processor: Any, device: torch.device) -> "Normalizer":
        """Read the options of an image processor of transformers."""
        factor = processor.rescale_factor if processor.do_rescale else 1.0
        mean, std = [0.0] * 3, [1.0] * 3
        if processor.do_normalize:
            mean, std = processor.image_mean, processor.image_std
        return cls(factor, *(torch.tensor(each, device=device)[:, None] for each in (mean, std)))

    @classmethod
    def of_video(cls, options: Mapping[str, Any], device: torch.device) -> "Normalizer":
        """Read the options of a video processor.

        Here, as in transformers, the factor is a part of mean and standard deviation.
        """
        factor = options["rescale_factor"] if options["do_rescale"] else 1.0
        if not options["do_normalize"]:
            mean, std = torch.zeros(3, 1, device=device), torch.ones(3, 1, device=device)
            return cls(factor, mean, std)
        mean, std = (
            torch.tensor(options[name], device=device)[:, None] * (1.0 / factor)
            for name in ("image_mean", "image_std")
        )
        return cls(1.0, mean, std)

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Normalize uint8 pixels [..., channels, rows, columns], or patches [N, values]."""
        if pixels.ndim == 2:  # in a patch all values of one channel are next to each other
            return self._normalized(pixels.unflatten(1, (len(self.mean), -1))).flatten(1)
        return self._normalized(pixels.flatten(-2)).view(pixels.shape)

    def _normalized(self, pixels: torch.Tensor) -> torch.Tensor:
        if self.rounds_to is not None:
            return ((pixels.to(self.rounds_to) * self.factor - self.mean) / self.std).float()
        # float64, as in transformers: another rounding would give another pixel
        return ((pixels.double() * self.factor).float() - self.mean) / self.std
