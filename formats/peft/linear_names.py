"""Names of a base model's linears in adapters: those of the checkpoint, or of transformers."""

import re
from collections.abc import Callable, Collection

from formats.architecture.bare_model import PREFIX as MODEL
from formats.architecture.family import Family
from formats.architecture.text_part import text_name

WEIGHT = ".weight"
EXPERTS = "mlp"  # transformers' usual name of the module with experts (Experts.module)


class LinearNames:
    """The linears of a base model. An adapter may name them as transformers names its modules."""

    def __init__(self, modules: Collection[str], family: Family | None = None) -> None:
        """`modules`: names in the checkpoint. `family`: its row, if the model has one."""
        self._modules = modules
        self._ours: dict[str, str] = {}  # name in transformers -> name in the checkpoint
        self._theirs: dict[str, str] = {}
        if family is not None:
            self._rename(family)

    def _rename(self, family: Family) -> None:
        layer = re.compile(re.escape(family.layer).replace(r"\{i\}", r"(\d+)") + r"\.(.+)")
        module = f"{family.experts.module}." if family.experts is not None else ""
        for name in self._modules:
            parts = layer.fullmatch(name)
            if parts is None:
                continue
            number, below = parts.groups()
            prefix = (family.layer_in_transformers or family.layer).format(i=number)
            theirs = f"{prefix}.{_below_layer(family, below)}"
            if theirs not in self._modules:
                self._theirs[name], self._ours[theirs] = theirs, name
            if module and below.startswith(module):
                named = f"{prefix}.{EXPERTS}.{below.removeprefix(module)}"
                if named not in self._modules:
                    self._ours.setdefault(named, name)

    def find(self, name: str) -> str | None:
        """Return the checkpoint's name of a linear that an adapter names; None: there is none."""
        # an adapter of a model without a head lacks the prefix, as the model does
        for each in (name, f"{MODEL}{name}", text_name(name) or ""):
            found = each if each in self._modules else self._ours.get(each)
            if found is not None:
                return found
        return None

    def in_adapter(self, like: Collection[str]) -> Callable[[str], str]:
        """Return a function: a linear's name in the checkpoint to that in an adapter.

        `like`: names of linears in the adapter.
        """
        theirs = any((text_name(each) or "") in self._ours for each in like)
        names = self._theirs if theirs else {}
        return lambda module: names.get(module, module)


def _below_layer(family: Family, name: str) -> str:
    """Return the name in transformers of a linear below a layer."""
    tensor, renamed = name + WEIGHT, family.names_in_transformers
    for _ in renamed:  # once the linear's own name, then that of its module
        own = max((n for n in renamed if f"{tensor}.".startswith(f"{n}.")), key=len, default=None)
        if own is None:
            break
        tensor = renamed[own] + tensor[len(own) :]
    return tensor.removesuffix(WEIGHT)
