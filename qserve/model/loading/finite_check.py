"""FiniteCheck: finds NaN and infinity in float tensors while they load."""

import torch

from formats.errors import CheckpointError
from formats.table import names_text


class FiniteCheck:
    """Collects the minimum and maximum of each tensor on its device; reads them once, at the end.

    A minimum or maximum is NaN if any value is. On a GPU a tensor is read at memory bandwidth and
    the host does not wait.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._ends: list[torch.Tensor] = []  # minimum and maximum of each name

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Look for NaN and infinity in a tensor. Integers have neither."""
        if not tensor.is_floating_point() or not tensor.numel():
            return
        if tensor.element_size() == 1:
            tensor = tensor.to(torch.bfloat16)  # float8 has no minimum
        self._names.append(name)
        self._ends += [each.float() for each in torch.aminmax(tensor)]

    def check(self) -> None:
        """Raise CheckpointError with the names of tensors that have NaN or infinity."""
        names, ends, self._names, self._ends = self._names, self._ends, [], []
        if not names:
            return
        is_finite = torch.stack(ends).isfinite().view(-1, 2).all(1).tolist()
        found = [name for name, is_good in zip(names, is_finite, strict=True) if not is_good]
        if found:
            raise CheckpointError(
                names_text(found),
                "NaN or infinity among the weights",
                "download the file again, or use a model without; `qserve inspect` counts the"
                " values",
            )
