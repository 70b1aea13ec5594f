"""A row of the table of folders."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

Weights = dict[str, torch.Tensor]  # [N, K] of each linear, by its name in the file


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """A folder that a tool writes: `write(source, target, **options)` returns its weights."""

    distribution: str
    write: Callable[..., Weights]
    also: tuple[str, ...] = ()  # other distributions whose versions count
    options: Mapping[str, object] = field(default_factory=dict)
    model: str = "llama"  # of float_models.MODELS
    whole: bool = False  # hold the expected weights, with which tests compute logits
    metadata: bool = False  # keep the metadata of the tool's own weight files
