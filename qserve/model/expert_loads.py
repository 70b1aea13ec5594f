"""ExpertLoads: counts the tokens of each expert while the model runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from formats.architecture.sizes import num_experts
from formats.errors import InputError
from qkernels.moe.routing import Routes
from qserve.model.blocks.moe import MoeMlp, Router
from qserve.model.decoder import Decoder
from qserve.model.model_config import ModelConfig
from qserve.parallel.expert_placement import write_loads

FLAG = "--record-expert-loads"


def check_loads(config: ModelConfig, file: str | None) -> None:
    """Raise InputError if loads cannot be recorded to `file`. Reads no weights."""
    if file is None:
        return
    if not config.family.experts or not num_experts(config.values):
        raise InputError(FLAG, f"{config.family.architecture} has no experts", "remove the flag")
    if config.family.experts.media_inner:
        raise InputError(
            FLAG,
            f"does not work with {config.family.architecture}, which has other experts for images",
            "remove the flag",
        )
    if not Path(file).absolute().parent.is_dir():
        raise InputError(f"{FLAG} {file}", "its folder does not exist", "create the folder first")


class ExpertLoads:
    """Token counts [layers, experts]. Every row of a step counts, so steps must have no padding."""

    def __init__(self, decoder: Decoder, device: torch.device) -> None:
        """Start counting in all layers of a decoder."""
        shape = len(decoder.layers), num_experts(decoder.config.values)
        self._counts_LE = torch.zeros(shape, dtype=torch.int64, device=device)
        for counts_E, layer in zip(self._counts_LE, decoder.layers, strict=True):
            for module in layer.modules():
                if isinstance(module, MoeMlp):
                    module.router.register_forward_hook(_counting(counts_E))

    def reset(self) -> None:
        """Set all counts to 0, for example after a warm-up."""
        self._counts_LE.zero_()

    def rows(self) -> list[list[int]]:
        """Return the token counts, by layer and expert. Waits for the device."""
        return self._counts_LE.tolist()

    def write(self, file: str, model: str) -> None:
        """Write the table if any token was counted. `model`: model name to note in the file."""
        rows = self.rows()
        if any(map(any, rows)):
            write_loads(file, rows, model)


def _counting(counts_E: torch.Tensor) -> Callable[[Router, tuple[Any, ...], Routes], None]:
    def count(router: Router, given: tuple[Any, ...], routes: Routes) -> None:
        x_TC, *numbers = given
        if any(each is not None for each in numbers):
            routes = router.forward(x_TC)  # routes with the model's expert numbers
        ids = routes.ids_Mk.flatten().long()
        counts_E.index_add_(0, ids, torch.ones_like(ids))

    return count
